"""A run directory, a checkpoint or a comparison that someone else sent: commands refuse it in a line or show it, and it
does nothing to the files, the terminal or the browser of whoever looks at it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rung.checkpoint.files import TensorFile, partial_file
from rung.checkpoint.manifest import find_damage, find_untiled, prune, put_in_place, read_checkpoint, write_whole
from rung.checkpoint.notes import compose, join
from rung.checkpoint.places import make_memory_folder, memory_folder, refuse_escapes
from rung.checkpoint.plan import read_whole
from rung.cli.main import main
from rung.cli.watch_view import Watcher, draw
from rung.compare.report import as_markdown, as_page
from rung.distributed.live_status import read_snapshot, snapshot_path
from rung.distributed.status_board import StatusBoard, read_statuses
from rung.errors import CheckpointError, ConfigError, ReportError
from rung.launch.console import JobConsole
from rung.launch.prepare import prepare
from rung.launch.rendezvous.elastic import launchers, running_launcher, scale
from rung.launch.train_command import train
from rung.system.processes import machine_name
from rung.system.untrusted import find_escapes, lines_of, open_regular, parse_json, printable, read_regular
from tests.comparison import sample
from tests.made_checkpoints import make_checkpoint, replace_file, rewrite
from tests.security.mutate import ESCAPE, MARKUP, nested

REPO = Path(__file__).parents[2]
START = {"event": "start", "total_steps": 8, "task": "toy", "strategy": "ddp", "ranks": 2, "device": "cpu"}
STEP = {"step": 1, "epoch": 0, "samples": 4, "loss": 0.5, "grad_norm": 0.1, "lr": 0.1, "step_seconds": 0.5,
        "samples_per_second": 8.0, "data_wait_seconds": 0.1, "slowest_reader": 0, "peak_memory_bytes": 2**20,
        "event": "step"}  # fmt: skip
EVAL = {"event": "eval", "step": 1, "epoch": 0, "seconds": 0.1, "loss": 0.5}
END = {"event": "end", "steps": 1, "seconds": 1.0, "state_bytes": [{"parameters": 8}]}


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """What reads for ever fails, and does not hang the suite."""

    def ring(*_: Any) -> None:
        raise TimeoutError("it takes for ever")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_run(folder: Path, *lines: Any) -> Path:
    (folder / ".state").mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("# rung 0.1.0: toy, ddp\nbatch_size = 4\n")
    rows = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines or (START, STEP, END)]
    (folder / "metrics.jsonl").write_bytes(b"".join(row + b"\n" for row in rows))
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command ends in."""
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.err.startswith("rung: ") and "Traceback" not in told.err
    return told.err


# -- pages ------------------------------------------------------------------------------------------------------------


def _spoiled(data: Any, word: str) -> Iterator[tuple[str, Any]]:
    """The comparison with one value after the other replaced."""

    def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        yield path
        items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
        for key, inner in items:
            yield from places(inner, (*path, key))

    text = json.dumps(data)
    for path in places(data):
        if path and path != ("format",):
            copy = json.loads(text)
            owner = copy
            for key in path[:-1]:
                owner = owner[key]
            owner[path[-1]] = word
            yield "/".join(map(str, path)), copy


def test_no_value_of_a_received_comparison_is_markup_of_the_page(tmp_path: Path) -> None:
    data = sample()
    data["rows"] = [row for row in data["rows"] if row["strategy"] in ("single", "pp2", "tp2")]
    data["notes"] = ["a note"]
    shown = 0
    for where, spoiled in _spoiled(data, MARKUP):
        try:
            page, words = as_page(spoiled), as_markdown(spoiled)
        except ReportError:
            continue
        shown += 1
        assert "<xss" not in page and page.count("</script>") == 2, where
        for line in words.splitlines():
            assert not re.search(r"(?<!\\)(?:\\\\)*<xss", re.sub(r"`[^`]*`", "", line)), (where, line)
    assert shown > 20


def test_a_bar_does_not_end_the_code_that_a_name_is_in() -> None:
    """Of a backslash and a bar, escaping the bar makes an escaped backslash and the end of a cell."""
    data = sample()
    data["rows"][1]["strategy"] = "a\\|<xss>"
    rows = [line for line in as_markdown(data).splitlines() if "<xss>" in line]
    assert rows and all("`a\\\N{BROKEN BAR}<xss>`" in row for row in rows)


def test_a_micro_batch_is_a_number() -> None:
    data = sample()
    row = next(row for row in data["rows"] if row["strategy"] == "pp2")
    row["timeline"]["ranks"][0]["spans"][0]["micro_batch"] = "<img src=x onerror=alert(1)>"
    with pytest.raises(Exception, match="is not a whole number"):
        as_page(data)


def test_names_of_metrics_kinds_and_strategies_are_escaped_where_they_are_keys() -> None:
    data = sample()
    row = data["rows"][1]
    row["memory"][0]["kinds"] = {MARKUP: 5}
    row["messages"][0]["collective"] = MARKUP
    data["settings"][MARKUP] = MARKUP
    data["machine"]["device_name"] = MARKUP
    page = as_page(data)
    assert "<xss" not in page and "&lt;xss" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": float("inf")}, {"ranks": "2"}, {"step_seconds": {"median": 1e308, "high": 1e308}},
        {"losses": [[1, 1.7e308], [2, -1.7e308]]}, {"losses": [[1, 5e-324], [2, 0.0]]}, {"not_predicted": {"a": 1}},
        {"timeline": {"step": 1, "seconds": 5e-324, "ranks": []}}, {"memory": [{"rank": 0, "kinds": {"x": 10**320}}]},
        {"step_seconds": 3}, {"messages": {"a": 1}}, {"losses": [[1]]},
    ],
)  # fmt: skip
def test_figures_that_nobody_measured_are_left_out_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    data = sample()
    data["rows"][1].update(changes)
    path = tmp_path / "received.json"
    path.write_text(json.dumps(data))
    code = main(["report", str(path), "--out", str(tmp_path / "page.html")])
    assert code == 0 or re.search("is damaged|holds a number", capsys.readouterr().err)
    both = main(["report", str(path), str(path), "--out", str(tmp_path / "page.md")])
    assert both in (0, 2) and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b'{"a":' * 500 + b"1" + b"}" * 500, b"\xff", b'{"x": "\\ud800"}', b"9" * 9999]
)
def test_json_that_cannot_be_walked_or_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "received.json"
    path.write_bytes(content)
    assert "is not a JSON file" in refused(capsys, "report", str(path), "--out", str(tmp_path / "page.html"))


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _chunks(*boxes: tuple[list[int], list[int]]) -> list[dict[str, Any]]:
    return [{"file": "f", "key": str(n), "offsets": o, "shape": s} for n, (o, s) in enumerate(boxes)]


@pytest.mark.parametrize(
    ("shape", "chunks", "problem"),
    [
        ([4, 4], _chunks(([0, 0], [2, 4]), ([2, 0], [2, 4])), None),
        ([4, 4], _chunks(([0, 0], [4, 1]), ([0, 1], [2, 3]), ([2, 1], [2, 3])), None),
        ([3, 3], _chunks(([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1]), ([1, 1], [1, 1])),
         None),
        ([], _chunks(([], [])), None),
        ([0, 5], [], None),
        ([4], _chunks(([0], [4]), ([2], [0])), None),
        ([4, 4], _chunks(([0, 0], [2, 4]), ([1, 0], [2, 4])), "overlap or leave a gap"),  # as large as the whole
        ([4, 4], _chunks(([0, 0], [2, 4]), ([0, 0], [2, 4])), "overlap or leave a gap"),
        ([4], _chunks(([0], [3])), "overlap or leave a gap"),
        ([], _chunks(([], []), ([], [])), "overlap or leave a gap"),
        ([4], [], "overlap or leave a gap"),
        ([4], _chunks(([2], [4])), "lie outside of it"),
        ([2] * 8, _chunks(*(([n >> d & 1 for d in range(8)], [1] * 8) for n in range(256))), "more than 6 dimensions"),
        ([4], {"0": 1}, "are invalid"),
    ],
)  # fmt: skip
def test_chunks_tile_a_tensor(shape: list[int], chunks: Any, problem: str | None) -> None:
    found = find_untiled({"shape": shape, "chunks": chunks})
    assert found is None if problem is None else problem in str(found)


def _lines_run(side: int) -> int:
    """How many lines of Python the check of a square of `side` times `side` chunks takes."""
    tensor = {"shape": [side, side], "chunks": _chunks(*(([x, y], [1, 1]) for x in range(side) for y in range(side)))}
    count = 0

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        assert find_untiled(tensor) is None
    finally:
        sys.settrace(before)
    return count


def test_tiling_takes_no_longer_for_many_chunks_however_they_lie() -> None:
    assert _lines_run(40) < 5 * _lines_run(20)  # comparing each with each takes 16 times as many


def test_overlapping_chunks_do_not_show_what_memory_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_checkpoint(tmp_path / "checkpoints", 4)
    tensors = dict(read_checkpoint(folder).manifest["tensors"])
    body = tensors["model/body.weight"]
    first, second = body["chunks"]
    assert (first["shape"], second["shape"]) == ([4, 5], [3, 5])
    moved = {**body, "chunks": [first, {**second, "offsets": [1, 0]}]}  # three rows are nobody's
    rewrite(folder, tensors={**tensors, "model/body.weight": moved})
    with pytest.raises(CheckpointError, match=r"the chunks of model/body\.weight overlap or leave a gap"):
        read_checkpoint(folder)
    told = refused(capsys, "export", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "out.safetensors"))
    assert "overlap" in told and not (tmp_path / "out.safetensors").exists()


def test_a_small_file_is_not_room_for_a_large_tensor(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    tensors = dict(read_checkpoint(folder).manifest["tensors"])
    table = tensors["model/table"]
    (chunk,) = table["chunks"]
    many = [{**chunk, "offsets": [3 * n]} for n in range(1000)]
    rewrite(folder, tensors={**tensors, "model/table": {**table, "shape": [3000], "chunks": many}})
    with pytest.raises(CheckpointError, match="belongs to two chunks"):
        read_checkpoint(folder)
    keyed = [{**one, "key": str(n)} for n, one in enumerate(many)]
    rewrite(folder, tensors={**tensors, "model/table": {**table, "shape": [3000], "chunks": keyed}})
    with pytest.raises(CheckpointError, match="larger than its file"):
        read_checkpoint(folder)


def test_notes_of_ranks_that_overlap_or_count_for_ever_are_no_state() -> None:
    part = {"dtype": "F32", "shape": [4]}
    notes = [
        {
            "rank": rank,
            "files": {},
            "needs_all": False,
            "tensors": {"model/a": {**part, "chunks": [{"file": "f", "key": "k", "offsets": [rank], "shape": [2]}]}},
            "facts": {"topology": {"axes": {"dp_shard": 2}}, "ranks": 2, "optimizer": {"values": {}}},
        }
        for rank in range(2)
    ]
    assert join([note["tensors"] for note in notes])["model/a"]["chunks"][1]["offsets"] == [1]
    assert compose(notes) is None
    for ranks in (2**60, -1, "2", float("inf"), None):
        spoiled = [{**note, "facts": {**note["facts"], "ranks": ranks}} for note in notes]  # type: ignore[dict-item]
        with pytest.raises(CheckpointError, match="notes are invalid"):
            compose(spoiled)
    listed = [{**note, "facts": {**note["facts"], "topology": {"axes": ["dp_shard"]}}} for note in notes]  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="notes are invalid"):
        compose(listed)
    zero = [{**note, "facts": {**note["facts"], "topology": {"axes": {"dp_shard": 0}}}} for note in notes]  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        compose(zero)


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "folder", "loop"])
@pytest.mark.parametrize("name", ["rank-00002.safetensors", "manifest.json"])
def test_only_regular_files_of_a_checkpoint_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    folder, _ = make_checkpoint(tmp_path / "checkpoints", 4)
    if name != "manifest.json":
        (folder / name).touch()  # empty, as a FIFO is, too
        replace_file(folder, name, b"")
    _put(folder / name, kind)
    assert main(["checkpoints", str(tmp_path / "checkpoints")]) in (0, 1, 2)
    assert "none of them is whole" in capsys.readouterr().out
    refused(capsys, "export", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "out.safetensors"))
    read: Callable[[], object] = lambda: read_checkpoint(folder)  # noqa: E731
    if name != "manifest.json":
        read = lambda: TensorFile(folder / name)  # noqa: E731
    with pytest.raises(CheckpointError, match=r"cannot be read|is not a regular|damaged|missing"):
        read()


def _put(path: Path, kind: str) -> None:
    """Something that is no regular file, in the place of one."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "loop" else kind)


@pytest.mark.parametrize("metadata", [{"step": "9" * 5000}, {"step": 4}, {"step": "²"}, ["a"], "x"])
def test_a_file_of_weights_with_strange_words_about_itself_is_read_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metadata: Any
) -> None:
    header = json.dumps({"__metadata__": metadata, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    code = main(["export", str(tmp_path), "--output", str(tmp_path / "out" / "w.safetensors")])
    assert code in (0, 2) and "Traceback" not in capsys.readouterr().err


# -- links ------------------------------------------------------------------------------------------------------------


def test_pruning_removes_a_link_and_not_what_it_leads_to(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "manifest.json").write_text("{}")
    (mine / "thesis.txt").write_text("years of work")
    checkpoints = tmp_path / "run" / "checkpoints"
    make_checkpoint(checkpoints, 8)
    (checkpoints / "step-00000002").symlink_to(mine)
    (checkpoints / ".step-00000003.partial").symlink_to(mine)
    assert prune(checkpoints, keep=1, keep_every=None, newest=8) == [2]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000008"]
    assert sorted(path.name for path in mine.iterdir()) == ["manifest.json", "thesis.txt"]
    (checkpoints / "step-00000009").symlink_to(mine)
    partial, _ = make_checkpoint(tmp_path / "other", 9)
    put_in_place(partial, checkpoints / "step-00000009")
    assert read_checkpoint(checkpoints / "step-00000009").step == 9 and len(list(mine.iterdir())) == 2


def test_a_partly_written_file_is_never_a_link_that_is_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in (".a.json.partial", ".b.safetensors.partial"):
        (tmp_path / name).symlink_to(mine)
    write_whole(tmp_path / "a.json", b"new")
    with partial_file(tmp_path / "b.safetensors") as partial:
        partial.write_bytes(b"new")
    assert mine.read_text() == "mine"
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.safetensors").read_bytes() == b"new"


ESCAPES = ["logs/rank-0.log", "logs", "metrics.jsonl", "config.toml", ".state/status", ".state", "tensorboard",
           "checkpoints", "checkpoints/step-00000004", "model.safetensors", ".model.safetensors.partial", "wandb/run",
           "rescue", "failures", "profile/steps-1-2.json.gz"]  # fmt: skip


@pytest.mark.parametrize("name", ESCAPES)
def test_a_run_whose_files_lead_elsewhere_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mine = tmp_path / "mine"
    run = make_run(tmp_path / "run")
    is_file = (
        Path(name).suffix in (".log", ".jsonl", ".toml", ".partial", ".safetensors", ".gz") or name[-6:] == "status"
    )
    if is_file:
        mine.write_text((run / name).read_text() if (run / name).exists() else "mine")
    else:
        mine.mkdir()
    before = mine.read_text() if is_file else None
    link = run / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        link.rmdir()
    link.unlink(missing_ok=True)
    link.symlink_to(mine)
    with pytest.raises(ConfigError, match=f"{re.escape(str(link))} is a link to {re.escape(str(mine))}"):
        refuse_escapes(run)
    assert (mine.read_text() == before) if is_file else not any(mine.iterdir())


def test_links_within_a_run_and_to_the_whole_of_it_are_welcome(tmp_path: Path) -> None:
    scratch = make_run(tmp_path / "scratch" / "run")
    (scratch / "wandb" / "run-1").mkdir(parents=True)
    (scratch / "wandb" / "latest").symlink_to("run-1")
    (scratch / "venv").symlink_to("/usr")  # of the user's own, in a directory of --out; no run writes there
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    refuse_escapes(tmp_path / "runs" / "run")
    refuse_escapes(tmp_path / "nowhere")
    (scratch / "logs").mkdir()
    os.mkfifo(scratch / "logs" / "rank-0.log")
    with pytest.raises(ConfigError, match="neither a file nor a directory"):
        refuse_escapes(tmp_path / "runs" / "run")
    assert len(find_escapes(scratch, ["venv"])) == 1


@pytest.mark.parametrize("name", ["logs", ".state"])
def test_a_link_within_a_run_hides_no_link_that_leads_out_of_it(tmp_path: Path, name: str) -> None:
    run, mine = make_run(tmp_path / "run"), tmp_path / "mine"
    mine.write_text("mine")
    shutil.rmtree(run / name, ignore_errors=True)
    (run / "extra" / "deeper").mkdir(parents=True)
    (run / name).symlink_to("extra")
    (run / "extra" / "back").symlink_to("../extra")  # a circle is no reason to look for ever
    refuse_escapes(run)
    (run / "extra" / "deeper" / "launcher").symlink_to(mine)
    with pytest.raises(ConfigError, match=f"launcher is a link to {re.escape(str(mine))}"):
        refuse_escapes(run)


def test_a_link_to_a_pipe_within_a_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "pipe")
    (run / "metrics.jsonl").symlink_to("pipe")
    with pytest.raises(ConfigError, match="neither a file nor a directory"):
        refuse_escapes(run)


def test_shared_memory_of_somebody_else_holds_no_state_of_a_run(tmp_path: Path) -> None:
    """All users may write to /dev/shm: a folder in our place may be theirs, or open to them."""
    ours = make_memory_folder(tmp_path)
    try:
        assert ours.parent == Path("/dev/shm") and memory_folder(tmp_path) == ours
        ours.chmod(0o777)
        assert memory_folder(tmp_path) == make_memory_folder(tmp_path) == tmp_path / ".state" / ours.name
        ours.rmdir()
        assert not memory_folder(tmp_path).is_relative_to("/dev/shm"), "who looks for state makes nobody's folder it"
        ours.symlink_to(tmp_path)
        assert make_memory_folder(tmp_path) == tmp_path / ".state" / ours.name
        ours.unlink()
        if os.geteuid() == 0:
            ours.mkdir(0o700)
            os.chown(ours, 12345, 12345)
            assert make_memory_folder(tmp_path) == tmp_path / ".state" / ours.name
    finally:
        ours.unlink() if ours.is_symlink() else shutil.rmtree(ours, ignore_errors=True)


def test_train_refuses_before_it_writes(tmp_path: Path) -> None:
    """The command itself, for a run that is resumed and for a new one in a directory that is there."""
    task = REPO / "examples" / "babycnn"
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("# rung 0.1.0: babycnn, single\nbatch_size = 64\n")
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").symlink_to(mine)
    flags: dict[str, Any] = {"steps": 1, "out": None}
    with pytest.raises(ConfigError, match=r"leads out of itself: .*rank-0\.log is a link to"):
        train(task, config_file=None, flags=flags, assignments={"device": "cpu"}, resume=str(run))
    (run / "config.toml").unlink()
    with pytest.raises(ConfigError, match="leads out of itself"):
        train(task, config_file=None, flags={**flags, "out": str(run)}, assignments={"device": "cpu"})
    assert mine.read_text() == "mine" and sorted(path.name for path in run.iterdir()) == ["logs"]


def test_scale_and_merge_write_through_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    run = make_run(tmp_path / "run")
    told = {"pid": os.getpid(), "least": 1, "most": 4, "machine": machine_name()}
    (run / ".state" / "launcher").write_text(json.dumps(told))
    (run / ".state" / ".scale").symlink_to(mine)
    with pytest.raises(ConfigError, match="is a link to"):
        scale(run, 2)
    facts = {"rank": 0, "ranks": 1, "strategy": "ddp", "machine": "a", "clocks_ns": [1]}
    (run / "profile").mkdir()
    trace = gzip.compress(json.dumps({"rung": facts, "traceEvents": []}).encode())
    (run / "profile" / "rank-0-steps-1-2.json.gz").write_bytes(trace)
    (run / "profile" / "steps-1-2.json.gz").symlink_to(mine)
    assert "is a link to" in refused(capsys, "profile", "merge", str(run))
    (run / "profile" / "steps-1-2.json.gz").unlink()
    (tmp_path / "out.json").symlink_to(mine)
    assert main(["profile", "merge", str(run), "--out", str(tmp_path / "out.json")]) == 0
    assert mine.read_text() == "mine" and not (tmp_path / "out.json").is_symlink()


# -- terminals --------------------------------------------------------------------------------------------------------


def test_text_of_others_is_made_printable() -> None:
    assert printable("as it is: é 日本") == "as it is: é 日本"
    assert printable("\x1b[31m\r\x9b\0\u202e\ud800") == "\\x1b[31m\\r\\x9b\\x00\\u202e\\ud800"
    assert printable("a\nb\t\x1b", keep="\n\t") == "a\nb\t\\x1b"


CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]")


def test_control_characters_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(
        tmp_path / "run",
        {**START, "strategy": ESCAPE, "device": ESCAPE, "task": ESCAPE},
        {**STEP, "loss": ESCAPE},
        {**EVAL, f"top{ESCAPE}": ESCAPE},
    )
    live = {"step": 1, "when": time.time(), "step_seconds": 0.5, "ranks": [{"seconds": {}, "samples_per_second": 1.0,
            "memory_bytes": 5}], "slow": [{"rank": 0, "phase": ESCAPE, "seconds": 1.0, "others_seconds": 0.1,
            "text": ESCAPE}]}  # fmt: skip
    snapshot_path(run).write_text(json.dumps(live))
    folder, _ = make_checkpoint(run / "checkpoints", 4)
    rewrite(
        folder,
        strategy=ESCAPE,
        saved_at=ESCAPE,
        evaluation={f"m{ESCAPE}": 1.0},
        best={"metric": f"m{ESCAPE}", "better": "max", "value": 1.0, "step": 4},
        computed=[ESCAPE],
    )
    other, _ = make_checkpoint(run / "checkpoints", 6)
    tensors = dict(read_checkpoint(other).manifest["tensors"])
    rewrite(other, tensors={**tensors, f"x{ESCAPE}": {"dtype": 3}})
    named = tmp_path / f"named{ESCAPE.replace('/', '')}[/red]"
    make_run(named)
    make_checkpoint(named / "checkpoints", 4)
    main(["watch", "--once", str(run)])
    main(["watch", "--once", str(named)])
    main(["checkpoints", str(run)])
    main(["checkpoints", str(run), "--json"])
    main(["checkpoints", str(named)])
    main(["export", str(run), "--output", str(tmp_path / "w.safetensors")])
    main(["export", str(tmp_path / f"none{ESCAPE}"), "--output", str(tmp_path / "v.safetensors")])
    main(["report", str(tmp_path / f"none{ESCAPE}"), "--out", str(tmp_path / "v.html")])
    told = capsys.readouterr()
    assert "\\x1b" in told.out and "\\x1b" in told.err
    assert not CONTROL.search(told.out) and not CONTROL.search(told.err)


@pytest.mark.parametrize("terminal", [True, False])
def test_brackets_in_a_metric_or_a_path_do_not_end_the_console(tmp_path: Path, terminal: bool) -> None:
    run = tmp_path / "[/red]run[bold]"
    (run / "logs").mkdir(parents=True)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, color_system=None)
    board = StatusBoard(tmp_path / "status", 1, create=True)
    with JobConsole(run, console) as view:
        view.follow(board, [0])
        view.say(f"results: {run}")
        with (run / "metrics.jsonl").open("w") as file:
            for row in ({**START}, {**STEP, "loss": "[/x]"}, {**EVAL, "[/red]top1": 0.5}, [1], "x", {"event": "step"}):
                file.write(json.dumps(row) + "\n")
            file.write("{half\n")
            file.write(json.dumps({**EVAL, "step": 2, "last": 0.25}) + "\n")
        deadline = time.monotonic() + 20
        while "last 0.25" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert any(thread.name == "rung-console" and thread.is_alive() for thread in threading.enumerate())
    shown = out.getvalue()
    assert "[/red]top1 0.5" in shown and "last 0.25" in shown and f"results: {run}" in shown


def test_no_console_reads_markup() -> None:
    """Names and paths with brackets in them are data. Colour is given as a style."""
    for path in (REPO / "src" / "rung").rglob("*.py"):
        text = path.read_text()
        for call in re.findall(r"(?<![\w.])Console\((?!\))[^\n]*", text):
            assert "markup=False" in call, (path, call)
        for call in re.findall(r"TextColumn\([^\n]*", text):
            assert "markup=False" in call or "import" in call, (path, call)
        assert not re.search(r"\[/?(?:red|green|yellow|bold)\]", text), path


def test_brackets_in_the_path_of_a_run_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "[/red]" / "[bold]run")
    assert main(["checkpoints", str(run)]) == 0
    assert f"no checkpoints in {run}" in capsys.readouterr().out
    make_checkpoint(run / "checkpoints", 4)
    page, weights = run / "p.html", run / "w.safetensors"
    for words, told in (
        (["watch", "--once", str(run)], "[bold]run"),
        (["checkpoints", str(run)], str(run / "checkpoints" / "step-00000004")),
        (["report", str(run), "--out", str(page)], str(page)),
        (["export", str(run), "--output", str(weights)], str(weights)),
    ):
        assert main(words) == 0
        assert told in capsys.readouterr().out


# -- what a run says of itself ----------------------------------------------------------------------------------------

LINES: dict[str, list[Any]] = {
    "wrong types": [{**START, "ranks": "two", "total_steps": "many"}, {**STEP, "step": "1"}, {**EVAL, "step": []}],
    "missing keys": [{"event": "start"}, {"event": "step"}, {"event": "eval"}, {"event": "end"}, {"event": "slow"}],
    "no objects": [[1, 2], "x", 5, None, {"event": ["start"]}, {"event": None}],
    "nan": [START, {**STEP, "step_seconds": float("nan"), "samples_per_second": float("inf"), "loss": "abc"}, END],
    "huge": [START, {**STEP, "step": 10**320, "loss": 10**320, "step_seconds": 1e308, "epoch": 2**80}, END],
    "negative": [START, {**STEP, "step": -1, "step_seconds": -5}, {**END, "seconds": -1e308}],
    "no UTF-8": [START, b'{"event": "step", "loss": "\xff\xfe"}', END],
    "deep": [START, json.dumps(nested(600)).encode(), b"[" * 10**5, END],
    "states": [START, STEP, {**END, "state_bytes": {"a": 1}, "seconds": "x"}, {**END, "state_bytes": [{"a": []}, 3]}],
    "slow": [START, STEP, {"event": "slow", "rank": [], "phase": {}, "seconds": "x", "others_seconds": None}],
    "half a character": [START, b'{"event": "eval", "step": 1, "x": "\\ud800"}', {**STEP, "loss": "nan"}],
    "resumed": [START, STEP, {**START, "event": "resume", "step": "x"}, {**START, "event": "resume", "step": None}],
    "total": [{**START, "total_steps": 0}, {**STEP, "step": 5}, {**START, "total_steps": 10**400 // 10**200}],
    "a long line": [START, b'{"event": "step", "loss": "' + b"x" * 10**7 + b'"}', STEP],
    "an end alone": [END],
    "nothing": [b"", b"\0" * 1000],
}


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize("is_running", [True, False])
def test_damaged_metrics_are_passed_over_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, is_running: bool
) -> None:
    run = make_run(tmp_path / "run", *LINES[kind])
    if is_running:
        told = {"pid": os.getpid(), "least": 1, "most": 4, "machine": machine_name()}
        (run / ".state" / "launcher").write_text(json.dumps(told))
    assert main(["watch", "--once", str(run)]) == 0
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) in (0, 2)
    assert main(["report", str(run), str(make_run(tmp_path / "b")), "--out", str(tmp_path / "page.md")]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


LIVES: dict[str, bytes] = {
    "no object": b"[1]",
    "ranks of no kind": b'{"step": 1, "when": 1, "step_seconds": 1, "ranks": [{"seconds": 5}], "slow": []}',
    "text for a number": b'{"step": "1", "when": "x", "step_seconds": [], "ranks": [], "slow": []}',
    "infinite": b'{"step": Infinity, "when": NaN, "step_seconds": 1, "ranks": [], "slow": []}',
    "huge": b'{"step": 1e300, "when": 1, "step_seconds": 1, "ranks": [], "slow": []}',
    "deep": b"[" * 10**5,
    "no UTF-8": b"\xff",
}


@pytest.mark.parametrize("kind", LIVES)
def test_a_damaged_file_of_the_moment_counts_as_none(tmp_path: Path, kind: str) -> None:
    run = make_run(tmp_path / "run")
    snapshot_path(run).write_bytes(LIVES[kind])
    assert read_snapshot(snapshot_path(run)) is None
    assert main(["watch", "--once", str(run)]) == 0


def test_a_board_with_phases_that_are_not_known_is_shown(tmp_path: Path) -> None:
    board = StatusBoard(tmp_path / "status", 2, create=True)
    board.writer(0).phase("forward")
    content = bytearray((tmp_path / "status").read_bytes())
    for phase in (99, -1, 2**31 - 1):
        content[64 + 8 : 64 + 12] = phase.to_bytes(4, "little", signed=True)
        (tmp_path / "status").write_bytes(content)
        assert read_statuses(tmp_path / "status")[0].phase == f"phase {phase}"
    (tmp_path / "status").write_bytes(content[:70])
    assert read_statuses(tmp_path / "status") == {}


@pytest.mark.parametrize(
    "told",
    [
        [], "x", {"pid": "../../etc"}, {"pid": -1, "least": 1, "most": 1}, {"pid": 1.5, "least": 1, "most": 1},
        {"pid": True, "least": 1, "most": 1}, {"pid": 1, "least": "x", "most": 1}, {"pid": 1, "least": 1,
         "most": 1, "machine": []},
    ],
)  # fmt: skip
def test_a_launcher_is_a_process_with_a_number(tmp_path: Path, told: Any) -> None:
    run = make_run(tmp_path / "run")
    (run / ".state" / "launcher").write_text(json.dumps(told))
    assert launchers(run) == {} and running_launcher(run / ".state") is None
    console = Console(file=io.StringIO(), markup=False)
    console.print(draw(Watcher(run).poll(), 4))
    with pytest.raises(ConfigError, match="is not a run that is running"):
        scale(run, 2)


@pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "folder", "loop"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.toml", ".state/live.json", ".state/status", ".state/launcher"]
)
def test_only_regular_files_of_a_run_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str
) -> None:
    run = make_run(tmp_path / "run")
    _put(run / name, kind)
    (run / "model.safetensors").touch()
    for words in (
        ["watch", "--once", str(run)],
        ["report", str(run), "--out", str(tmp_path / "p.html")],
        ["checkpoints", str(run)],
        ["train", str(REPO / "examples" / "babycnn"), "--resume", str(run)]
        if name == "config.toml"
        else ["strategies"],
    ):
        with contextlib.suppress(SystemExit):
            assert main(words) in (0, 2), words
    assert "Traceback" not in capsys.readouterr().err


def test_files_are_read_whole_only_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
    with pytest.raises(OSError, match="larger than 1,000 bytes"):
        read_regular(path, 1000)
    run = make_run(tmp_path / "run")
    os.truncate(run / "metrics.jsonl", 2**40)
    with pytest.raises(ConfigError, match="a run's metrics have at most"):
        Watcher(run).poll()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "fifo")


def test_lines_longer_than_any_are_left_out() -> None:
    file = io.BytesIO(b"a\n" + b"x" * 100 + b"\nb\n" + b"y" * 9 + b"\n" + b"z" * 200)
    assert list(lines_of(file, 10)) == [b"a\n", b"b\n", b"y" * 9 + b"\n"]


# -- settings ---------------------------------------------------------------------------------------------------------

SETTINGS = {
    "no TOML": b"= 5\n",
    "no UTF-8": b'strategy = "\xff"\n',
    "deep": b"x = " + b"[" * 10**5,
    "deep keys": b".".join([b"a"] * 5000) + b" = 1\n",
    "many digits": b"steps = " + b"9" * 5000,
    "huge": b"batch_size = 1" + b"0" * 300,
    "a count as text": b'batch_size = "four"\n',
    "a list": b"batch_size = [1]\n",
    "a switch": b"seed = true\n",
    "digits in text": b'nproc = "' + b"9" * 5000 + b'"\n',
    "superscript": 'nproc = "²"\n'.encode(),
    "steps of a profile": 'profile = "²:³"\n'.encode(),
    "rank of powersgd": 'compress = "powersgd:²"\n'.encode(),
    "evaluation": 'eval_every = "²"\n'.encode(),
    "for ever": b"timeout = 99999999999\n",
    "large": b"# " + b"x" * 2**21,
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_of_a_received_run_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_bytes(b"# rung 0.1.0: babycnn, single\n" + SETTINGS[kind])
    told = refused(capsys, "train", str(REPO / "examples" / "babycnn"), "--resume", str(run))
    assert len(told) < 6000 and not (run / ".state").exists()


def test_a_received_run_meets_nobody(tmp_path: Path) -> None:
    """What it says of machines would have this one meet another, whose word it then takes for that of the job."""
    run = tmp_path / "run"
    run.mkdir()
    said = {"nnodes": "2", "rdzv": "foreign.example:29500", "rdzv_key": "/etc/hostname", "rpc_host": "0.0.0.0"}
    settings = "batch_size = 64\n" + "".join(f'{key} = "{value}"\n' for key, value in said.items())
    (run / "config.toml").write_text(f"# rung 0.1.0: babycnn, single\n{settings}")
    plan = prepare(REPO / "examples" / "babycnn", run=run)
    assert plan.policy.nodes == (1, 1)
    assert (plan.config.rdzv, plan.config.rdzv_key, plan.config.rpc_host) == (None, None, None)


# -- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"[]", b'{"rung": 5, "traceEvents": []}', b'{"rung": {"ranks": 1}, "traceEvents": []}', b"[" * 10**5,
        b'{"rung": {"ranks": 1000000000, "strategy": "", "machine": "", "clocks_ns": [1]}, "traceEvents": []}',
        b'{"rung": {"ranks": 1, "strategy": "", "machine": "", "clocks_ns": [1]}, "traceEvents": [5]}',
        b'{"rung": {"ranks": 1, "strategy": "", "machine": "", "clocks_ns": [1]}, "traceEvents": [{"pid": 1, '
        b'"ph": "s", "name": "", "ts": "x", "id": []}]}',
    ],
)  # fmt: skip
def test_damaged_traces_are_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-0-steps-1-2.json.gz").write_bytes(gzip.compress(content))
    refused(capsys, "profile", "merge", str(tmp_path))
    assert len(list((tmp_path / "profile").iterdir())) == 1


def test_a_trace_is_unpacked_only_up_to_a_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rung.cli.profile_merge._MAX_TRACE", 10**6)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-0-steps-1-2.json.gz").write_bytes(gzip.compress(b" " * 10**8))
    assert "more than 1,000,000 bytes" in refused(capsys, "profile", "merge", str(tmp_path))


def test_json_of_others_can_be_walked_and_written() -> None:
    assert parse_json(b'{"a": [1, 2.5, "\\ud83d\\ude00", NaN]}')["a"][:3] == [1, 2.5, "\N{GRINNING FACE}"]
    assert parse_json(json.dumps(nested(90)).encode()) == nested(90)
    for content in (json.dumps(nested(120)).encode(), b"[" * 10**5, b"1" + b"0" * 400, b"\xff", b'"\\ud800"', b""):
        with pytest.raises(ValueError, match="it "):
            parse_json(content)


def test_the_room_of_a_load_is_written_to_its_last_element(tmp_path: Path) -> None:
    """With memory that is not what it happens to be: torch fills it with a pattern."""
    folder, whole = make_checkpoint(tmp_path, 4)
    checkpoint = read_checkpoint(folder)
    assert find_damage(checkpoint) is None
    torch.use_deterministic_algorithms(True)
    try:
        for name, value in whole.items():
            assert torch.equal(read_whole(checkpoint, name), value)
    finally:
        torch.use_deterministic_algorithms(False)
