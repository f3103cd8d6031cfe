"""Hostile files through the readers of the commands, by the ten thousand.

    python -m tests.security.fuzz --inputs 100000 --seed 1 --out benchmarks/results/fuzz.json

A target is a kind of file with seeds (as Rung writes it), a way to change them, and the readers that meet it. Of each
input, readers may refuse (a RungError) or make something; they may not raise anything else, take longer than a few
seconds, touch what lies outside of the input's directory, or let markup and control characters through. Each input
follows from the seed, the target's name and its number, so that one can be run alone: --target manifest --only 4711.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import shlex
import struct
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from rung.checkpoint.export import find_source
from rung.checkpoint.files import TensorFile
from rung.checkpoint.manifest import read_checkpoint
from rung.checkpoint.plan import read_whole
from rung.checkpoint.survey import best_whole, inspect_checkpoint, locate, survey
from rung.cli.checkpoints_view import checkpoints_command
from rung.cli.profile_merge import merge_command
from rung.cli.watch_view import Watcher, draw
from rung.compare.report import as_markdown, as_page
from rung.compare.report.runs import read_all
from rung.distributed.live_status import JobSnapshot, RankFigures, StragglerStatus, snapshot_path, write_snapshot
from rung.distributed.signed_store import ForgedMessage, SignedStore
from rung.distributed.status_board import StatusBoard
from rung.errors import CheckpointError, EnvironmentProblem, RungError
from rung.launch.rendezvous.elastic import running_launcher, wanted_processes
from rung.launch.rendezvous.round import HostOffer, JobResult, LauncherResult, Round, WorldPlan, read_message
from rung.launch.rendezvous.state import JsonRendezvousBackend, StateCodec
from rung.launch.resume import find_run, is_finished, refuse_differences, settings_of
from rung.spec.config import RunConfig, read_toml, resolve
from rung.spec.task import Task
from rung.system.processes import machine_name
from tests.comparison import sample
from tests.made_checkpoints import make_checkpoint
from tests.security.guard import Guard, TooLong, working_directory
from tests.security.mutate import as_json, change, damage, hostile_value
from tests.tasks import babycnn_task

SECONDS = 5.0  # for one input
_CONTROL = re.compile(r"[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_EMBEDDED = re.compile(r'<script type="application/json" id="data">.*?</script>', re.DOTALL)


class Broken(Exception):
    """A reader accepted something, and what it made of it is not sound."""


@dataclass(frozen=True)
class Target:
    """A kind of file. `prepare` lays out a directory with sound files; `make` gives one changed input; `read` puts it
    into its place and goes through the readers."""

    prepare: Callable[[Path], Any]
    make: Callable[[random.Random, Any], bytes]
    read: Callable[[Path, bytes], None]


@dataclass
class Result:
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    seconds: float = 0.0
    findings: list[dict[str, Any]] = field(default_factory=list)


# -- what comes out ---------------------------------------------------------------------------------------------------


def check_shown(text: str) -> None:
    found = _CONTROL.search(text)
    if found:
        raise Broken(f"{found.group()!r} reaches the terminal")


def check_page(page: str) -> None:
    visible = _EMBEDDED.sub("", page)
    if "<xss" in page or '"onxss' in visible or "\x1b" in page:
        raise Broken("markup of the data is markup of the page")
    if page.count("</script>") != 2:
        raise Broken("the data end the script that they are in")


def check_markdown(words: str) -> None:
    for line in words.splitlines():
        if re.search(r"(?<!\\)(?:\\\\)*<xss", re.sub(r"`[^`]*`", "", line)):
            raise Broken("markup of the data is markup of the Markdown")
    check_shown(words)


def _is_drawn(made: bytes) -> bool:
    """Layout of a terminal takes longer than all readers together: some inputs are drawn, all are read."""
    return zlib.crc32(made) % 6 == 0


@contextlib.contextmanager
def _captured() -> Iterator[None]:
    """Everything that a command prints, looked at."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield
    finally:
        check_shown(out.getvalue())


def _refusals(*readers: Callable[[], Any]) -> None:
    """All of them meet the input, also after one has refused it; the refusal counts, and must be fit to print."""
    refusal: RungError | None = None
    for reader in readers:
        try:
            reader()
        except RungError as error:
            if not str(error).strip():
                raise Broken("the refusal says nothing") from error
            refusal = error
    if refusal is not None:
        raise refusal


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _prepare_checkpoint(folder: Path) -> dict[str, Any]:
    made, _ = make_checkpoint(folder / "checkpoints", 4)
    (folder / "metrics.jsonl").touch()
    content: dict[str, Any] = json.loads((made / "manifest.json").read_text())
    evaluation = {"evaluation": {"loss": 0.5, "top1": 0.25}, "best": {"metric": "top1", "better": "max", "value": 0.25,
                                                                      "step": 4}}  # fmt: skip
    return {**{key: value for key, value in content.items() if key != "digest"}, **evaluation}


def _digested(content: Any) -> bytes:
    """As an attacker would, who knows how the digest is made."""
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    except (RecursionError, TypeError):
        return as_json(content)
    return as_json({**content, "digest": hashlib.sha256(text).hexdigest()}) if isinstance(content, dict) else text


def _make_manifest(draw: random.Random, content: dict[str, Any]) -> bytes:
    chunks_alone = draw.random() < 0.4
    changed = {**content, "tensors": change(content["tensors"], draw)} if chunks_alone else change(content, draw)
    made = _digested(changed)
    return damage(made, draw) if draw.random() < 0.05 else made


def _read_manifest(folder: Path, made: bytes) -> None:
    step = folder / "checkpoints" / "step-00000004"
    (step / "manifest.json").write_bytes(made)

    def load() -> None:
        checkpoint = read_checkpoint(step)
        for name, tensor in checkpoint.manifest["tensors"].items():
            _check_tiling(name, tensor)
            read_whole(checkpoint, name)

    def exported() -> None:
        source = find_source(locate(folder))
        check_shown(" ".join(note for note in source.notes if note.isprintable()))

    _refusals(load, lambda: _listed(folder, made), exported)


def _listed(folder: Path, made: bytes) -> None:
    if _is_drawn(made):
        with _captured():
            checkpoints_command(str(folder), as_json=False, quick=True)
    else:
        best_whole(survey(locate(folder), thorough=False))


def _check_tiling(name: str, tensor: dict[str, Any]) -> None:
    """Counted element by element: nothing of `find_untiled` is used."""
    shape = tensor["shape"]
    if np.prod(shape, dtype=object) > 10**6:
        raise Broken(f"{name} has room for more than its files hold")
    count = np.zeros(shape, dtype=int)
    for chunk in tensor["chunks"]:
        count[tuple(slice(o, o + n) for o, n in zip(chunk["offsets"], chunk["shape"], strict=True))] += 1
    if not (count == 1).all():
        raise Broken(f"{name} has elements in {sorted(set(count.flatten().tolist()))} chunks")


def _prepare_notes(folder: Path) -> list[dict[str, Any]]:
    """A rescued state of two ranks: no manifest, a note of each."""
    content = _prepare_checkpoint(folder / "made")
    step = folder / "rescue" / "step-00000004"
    step.parent.mkdir(parents=True)
    (folder / "made" / "checkpoints" / "step-00000004").rename(step)
    (step / "manifest.json").unlink()
    (folder / "metrics.jsonl").touch()
    tensors, files = content.pop("tensors"), content.pop("files")
    facts = {**content, "topology": {"axes": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 1}, "zero": 3}}
    notes = []
    for rank, name in enumerate(sorted(files)):
        own = {
            tensor: {**told, "chunks": [chunk for chunk in told["chunks"] if chunk["file"] == name]}
            for tensor, told in tensors.items()
            if any(chunk["file"] == name for chunk in told["chunks"])
        }
        notes.append({"rank": rank, "files": {name: files[name]}, "tensors": own, "facts": facts, "needs_all": False})
    return notes


def _make_notes(draw: random.Random, notes: list[dict[str, Any]]) -> bytes:
    made = as_json(change(notes, draw))
    return damage(made, draw) if draw.random() < 0.05 else made


def _read_notes(folder: Path, made: bytes) -> None:
    step = folder / "rescue" / "step-00000004"
    try:
        parts = [as_json(part) for part in json.loads(made)][:4]
    except (ValueError, TypeError, RecursionError):
        parts = [made]
    for old in step.glob("rank-*.json"):
        old.unlink()
    for rank, part in enumerate(parts):
        (step / f"rank-{rank:05d}.json").write_bytes(part)

    def load() -> None:
        found = inspect_checkpoint(step, 4, "rescue")
        if found.checkpoint is None or found.problem is not None:
            raise CheckpointError(str(found.problem))
        for name, tensor in found.checkpoint.manifest["tensors"].items():
            _check_tiling(name, tensor)
            read_whole(found.checkpoint, name)

    _refusals(load, lambda: _listed(folder, made))


def _prepare_weights(folder: Path) -> tuple[Any, bytes]:
    made, _ = make_checkpoint(folder / "made", 4)
    content = (made / "rank-00001.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _make_weights(draw: random.Random, seed: tuple[Any, bytes]) -> bytes:
    header, data = seed
    text = as_json(change({**header, "__metadata__": {"format": "pt", "step": "12"}}, draw))
    length = len(text) if draw.random() < 0.9 else draw.choice((0, 1, len(text) + 8, 2**31, 2**63, 2**64 - 1))
    made = length.to_bytes(8, "little") + text + data
    return damage(made, draw) if draw.random() < 0.1 else made


def _read_weights(folder: Path, made: bytes) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(made)

    def load() -> None:
        file, held = TensorFile(path), 0
        for key in file.keys():  # noqa: SIM118
            with file.open(key) as tensor:
                held += tensor.clone().numel() * tensor.element_size()
        if held > len(made):
            raise Broken("more tensors than the file has bytes")

    _refusals(load, lambda: find_source(locate(folder)))


# -- metrics, boards and what a run says of this moment ---------------------------------------------------------------


def _run_lines() -> list[dict[str, Any]]:
    start = {"event": "start", "total_steps": 8, "task": "toy", "strategy": "ddp", "ranks": 2, "device": "cpu"}
    steps = [
        {"step": n, "epoch": 0, "samples": 4 * n, "loss": 2.0 / n, "grad_norm": 0.1, "lr": 0.1, "step_seconds": 0.5,
         "samples_per_second": 8.0, "data_wait_seconds": 0.1, "slowest_reader": 1, "peak_memory_bytes": 2**20,
         "event": "step"}
        for n in range(1, 5)
    ]  # fmt: skip
    return [
        start,
        *steps,
        {"event": "eval", "step": 4, "epoch": 0, "seconds": 0.1, "loss": 0.5, "top1": 0.5},
        {"event": "checkpoint", "step": 4, "stall_seconds": 0.1, "write_seconds": 0.1, "num_bytes": 100, "error": None},
        {
            "event": "slow",
            "step": 4,
            "rank": 1,
            "phase": "data",
            "seconds": 0.1,
            "others_seconds": 0.01,
            "text": "slow",
        },
        {**start, "event": "resume", "step": 3},
        {**steps[3], "loss": "nan", "grad_norm": None},
        {"event": "end", "steps": 4, "seconds": 3.0, "state_bytes": [{"parameters": 8, "optimizer": 16}] * 2},
    ]


def _prepare_run(folder: Path) -> list[dict[str, Any]]:
    (folder / ".state").mkdir(parents=True)
    lines = _run_lines()
    (folder / "metrics.jsonl").write_bytes(b"".join(as_json(line) + b"\n" for line in lines))
    (folder / "config.toml").write_text('batch_size = 4\nprecision = "fp32"\n')
    write_snapshot(snapshot_path(folder), _live())
    board = StatusBoard(folder / ".state" / "status", 2, create=True)
    board.writer(1).phase("forward")
    _announce(folder, {"pid": os.getpid(), "least": 2, "most": 2, "machine": machine_name()})
    return lines


def _announce(folder: Path, told: Any) -> None:
    (folder / ".state" / "launcher").write_bytes(as_json(told))


def _live() -> JobSnapshot:
    ranks = [RankFigures({"data": 0.1, "forward": 0.2, "backward": 0.3, "update": 0.1}, 8.0, 2**20)] * 2
    return JobSnapshot(5, time.time(), 0.5, ranks, [StragglerStatus(1, "data", 0.1, 0.01, "rank 1 is slow")])


def _watched(folder: Path, made: bytes) -> None:
    picture = draw(Watcher(folder).poll(), 24)
    if not _is_drawn(made):
        return
    console = Console(width=120, file=io.StringIO(), highlight=False, markup=False)
    console.print(picture)
    check_shown(console.file.getvalue())  # type: ignore[attr-defined]


def _reported(path: Path) -> None:
    data = read_all([path])
    check_page(as_page(data))
    check_markdown(as_markdown(data))


def _make_metrics(draw: random.Random, lines: list[dict[str, Any]]) -> bytes:
    changed = change(lines, draw)
    rows = [as_json(row) for row in changed] if isinstance(changed, list) else [as_json(changed)]
    made = b"\n".join([*rows, b""])
    return damage(made, draw) if draw.random() < 0.2 else made


def _read_metrics(folder: Path, made: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(made)
    _refusals(lambda: _watched(folder, made), lambda: _reported(folder), lambda: is_finished(folder, RunConfig()))


def _make_live(draw: random.Random, _: Any) -> bytes:
    made = as_json(change(asdict(_live()), draw))
    return damage(made, draw) if draw.random() < 0.1 else made


def _read_live(folder: Path, made: bytes) -> None:
    snapshot_path(folder).write_bytes(made)
    _watched(folder, made)


def _make_launcher(draw: random.Random, _: Any) -> bytes:
    told = {"pid": os.getpid(), "since": 5, "least": 1, "most": 4, "machine": machine_name()}
    made = as_json(change(told, draw))
    return damage(made, draw) if draw.random() < 0.1 else made


def _read_launcher(folder: Path, made: bytes) -> None:
    (folder / ".state" / "launcher").write_bytes(made)
    (folder / ".state" / "scale").write_bytes(made[:9])
    _watched(folder, made)
    running_launcher(folder / ".state")
    wanted_processes(folder / ".state")


def _make_board(draw: random.Random, _: Any) -> bytes:
    slots = [bytes(64)]
    for _rank in range(draw.randrange(4)):
        step, phase = draw.choice((0, 5, -1, 2**62)), draw.choice((0, 3, 12, 13, -1, -13, 2**31 - 1, -(2**31)))
        pid, changed = draw.choice((0, 1, os.getpid(), -5)), draw.choice((0.0, 1e9, -1e300, float("nan"), float("inf")))
        slots.append(struct.pack("<qiid", step, phase, pid, changed).ljust(64, b"\0"))
    made = b"".join(slots)
    return damage(made, draw) if draw.random() < 0.3 else made


def _read_board(folder: Path, made: bytes) -> None:
    (folder / ".state" / "status").write_bytes(made)
    _watched(folder, made)


# -- comparisons ------------------------------------------------------------------------------------------------------


def _prepare_comparison(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    data = sample()
    rows = [row for row in data["rows"] if row["strategy"] in ("single", "pp2", "tp2")]
    for row in rows:
        row["losses"] = row.get("losses", [])[:6]
    return {**data, "rows": rows, "notes": ["a note"]}


def _make_comparison(draw: random.Random, data: dict[str, Any]) -> bytes:
    changed = change(data, draw)
    if draw.random() < 0.5 and isinstance(changed, dict):
        changed["format"] = data["format"]
    made = as_json(changed)
    return damage(made, draw) if draw.random() < 0.05 else made


def _read_comparison(folder: Path, made: bytes) -> None:
    path = folder / "received.json"
    path.write_bytes(made)

    def beside() -> None:
        data = read_all([path, path])
        check_markdown(as_markdown(data))

    _refusals(lambda: _reported(path), beside)


# -- settings ---------------------------------------------------------------------------------------------------------


def _prepare_settings(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    text = {
        "strategy": "ddp",
        "nproc": "2",
        "precision": "fp32",
        "eval_every": "epoch",
        "shard_by": "size:10M",
        "compress": "powersgd:2",
        "keep_best": "top1:max",
        "profile": "10:13",
        "rdzv": "node1:29500",
        "nnodes": "2",
    }
    counts = {"batch_size": 4, "steps": 8, "seed": 1, "keep": 3, "timeout": 600, "workers": 2, "max_restarts": 1}
    return {**text, **counts, "clip": 1.0, "shuffle": True, "model": {"width": 4}}  # fmt: skip


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    if isinstance(value, str) or value is None:
        return json.dumps(value or "", ensure_ascii=False)
    return repr(value)


def _make_settings(draw: random.Random, settings: dict[str, Any]) -> bytes:
    changed = change(settings, draw)
    items = changed.items() if isinstance(changed, dict) else [("batch_size", hostile_value(draw))]
    try:
        lines = [f"{key if str(key).isidentifier() else json.dumps(str(key))} = {_toml(value)}" for key, value in items]
    except RecursionError:
        lines = ["x = " + "[" * 5000]
    heading = draw.choice(("# rung 0.1.0: babycnn, ddp", "# rung 0.1.0: other\x1b[2J, ddp", "", "\ufeff"))
    made = "\n".join([heading, *lines, ""]).encode("utf-8", errors="surrogatepass")
    return damage(made, draw) if draw.random() < 0.15 else made


class _Tasks:
    """The task that settings are resolved for, made once."""

    task: Task | None = None

    def get(self) -> Task:
        self.task = self.task or babycnn_task()
        return self.task


_TASKS = _Tasks()


def _read_settings(folder: Path, made: bytes) -> None:
    (folder / "config.toml").write_bytes(made)
    task = _TASKS.get()

    def resumed() -> None:
        base = settings_of(find_run(task, str(folder), None), set())
        refuse_differences(task, resolve(task, base=base), base, folder)

    _refusals(resumed, lambda: resolve(task, file=folder / "config.toml"), lambda: read_toml(folder / "config.toml"))


# -- traces -----------------------------------------------------------------------------------------------------------


def _prepare_traces(folder: Path) -> dict[str, Any]:
    (folder / "profile").mkdir(parents=True)
    facts = {"rank": 0, "ranks": 2, "strategy": "ddp", "machine": "a", "clocks_ns": [5, 6, 7]}
    events = [
        {"ph": "X", "name": "forward", "pid": 7, "tid": 7, "ts": 10.5, "dur": 3.0, "args": {"step": 1}},
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"ph": "s", "name": "flow", "id": 3, "pid": 7, "tid": 7, "ts": 11, "cat": "ac2g"},
        {"ph": "X", "name": "memory", "pid": "Spans", "tid": "x", "ts": 1},
    ]
    trace = {"rung": facts, "baseTimeNanoseconds": 1000, "traceEvents": events}
    path = folder / "profile" / "rank-1-steps-1-3.json.gz"
    path.write_bytes(gzip.compress(as_json({**trace, "rung": {**facts, "rank": 1, "machine": "b"}})))
    return trace


def _make_trace(draw: random.Random, trace: dict[str, Any]) -> bytes:
    text = as_json(change(trace, draw))
    if draw.random() < 0.1:
        text = damage(text, draw)
    made = gzip.compress(text, compresslevel=1, mtime=0)
    return damage(made, draw) if draw.random() < 0.1 else made


def _read_trace(folder: Path, made: bytes) -> None:
    (folder / "profile" / "rank-0-steps-1-3.json.gz").write_bytes(made)
    with _captured():
        merge_command(str(folder), steps=None, out=None)


# -- what launchers leave in a store -----------------------------------------------------------------------------------


class _Kept:
    """A store in memory, which says of itself where it would listen."""

    host, port = "127.0.0.1", 1

    def __init__(self, content: bytes) -> None:
        self.content = content

    def get(self, name: str) -> bytes:
        return self.content

    def check(self, names: list[str]) -> bool:
        return True


_KEY = "known to the ranks of a job"
_KINDS: tuple[tuple[Any, str], ...] = (
    (HostOffer, "host/0"),
    (WorldPlan, "plan"),
    (LauncherResult, "result/0"),
    (JobResult, "ending"),
)


def _prepare_store(folder: Path) -> Any:
    folder.mkdir()
    node, other = ["10.0.0.1", 5, 0], ["10.0.0.2", 6, 1]
    state = {
        "round": 2, "complete": True, "closed": False, "deadline": "ab", "participants": [[*node, 0], [*other, 1]],
        "wait_list": [other], "redundancy_list": [], "heartbeats": [[*node, 7], [*other, 9]],
    }  # fmt: skip
    offer = HostOffer(2, False, 4, 0, {"folder": "runs/a"}, "ab", "cd")
    plan = WorldPlan(1, [2, 2], 4, 4, "ddp", "10.0.0.1", 29500, False, None, {"folder": "runs/a"}, ["ab", "cd"])
    ending = JobResult("failed", "why", ["ab"])
    return [state, *map(asdict, (offer, plan, LauncherResult("failed", "10.0.0.1", 5, "why"), ending))]


def _make_store(draw: random.Random, sound: Any) -> bytes:
    made = as_json(change(draw.choice(sound), draw))
    return damage(made, draw) if draw.random() < 0.2 else made


def _read_store(folder: Path, made: bytes) -> None:
    """By strangers it is refused as it is; signed, it may be of a launcher of another version."""
    stranger: Any = _Kept(made)
    with pytest.raises(ForgedMessage):
        SignedStore(stranger, _KEY).get("plan")
    with pytest.raises(ForgedMessage):
        JsonRendezvousBackend(SignedStore(stranger, _KEY), "job", 1.0).get_state()
    with contextlib.suppress(RendezvousStateError):
        codec = StateCodec(1.0)
        codec.encode(codec.decode(made))
    for kind, name in _KINDS:
        with contextlib.suppress(EnvironmentProblem):
            read = read_message(kind, made, name)
            if isinstance(read, WorldPlan):
                Round.of(read, 0)


# To fuzz another kind of file or message, add a line: how sound ones are made, how one is changed, who reads it.
TARGETS: dict[str, Target] = {
    "manifest": Target(_prepare_checkpoint, _make_manifest, _read_manifest),
    "notes": Target(_prepare_notes, _make_notes, _read_notes),
    "safetensors": Target(_prepare_weights, _make_weights, _read_weights),
    "metrics": Target(_prepare_run, _make_metrics, _read_metrics),
    "live": Target(_prepare_run, _make_live, _read_live),
    "launcher": Target(_prepare_run, _make_launcher, _read_launcher),
    "status board": Target(_prepare_run, _make_board, _read_board),
    "comparison": Target(_prepare_comparison, _make_comparison, _read_comparison),
    "settings": Target(_prepare_settings, _make_settings, _read_settings),
    "trace": Target(_prepare_traces, _make_trace, _read_trace),
    "store message": Target(_prepare_store, _make_store, _read_store),
}


def fuzz(name: str, numbers: range, seed: int, guard: Guard, most_findings: int = 20) -> Result:
    """Some inputs of one target."""
    target, result = TARGETS[name], Result()
    started = time.perf_counter()
    with working_directory() as scratch:
        folder = Path(scratch).resolve() / "received"
        sound = target.prepare(folder)
        with contextlib.suppress(Exception):
            target.read(folder, target.make(random.Random(0), sound))  # what is imported late is, now
        for number in numbers:
            made = target.make(random.Random(f"{seed}/{name}/{number}"), sound)
            problem = _one(target, folder, made, guard, result)
            result.inputs += 1
            if problem is not None:
                result.findings.append({"target": name, "seed": seed, "number": number, "problem": problem})
                if len(result.findings) >= most_findings:
                    break
    result.seconds = time.perf_counter() - started
    return result


def _one(target: Target, folder: Path, made: bytes, guard: Guard, result: Result) -> str | None:
    problem = None
    try:
        with guard.armed(folder, SECONDS):
            target.read(folder, made)
        result.accepted += 1
    except RungError as error:
        result.refused += 1
        if len(str(error)) > 100_000:
            problem = f"a refusal of {len(str(error)):,} characters"
    except TooLong:
        problem = f"it took more than {SECONDS:g} s"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error!s:.200} ({Path(place.filename).name}:{place.lineno})"
    return problem or ("; ".join(guard.violations[:3]) or None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="over all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", choices=TARGETS, action="append")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one input of a target")
    parser.add_argument("--out", metavar="FILE.json")
    asked = parser.parse_args()
    names = asked.target or list(TARGETS)
    guard, results = Guard(), {}
    for index, name in enumerate(names):
        count = asked.inputs // len(names) + (index < asked.inputs % len(names))
        numbers = range(count) if asked.only is None else range(asked.only, asked.only + 1)
        result = results[name] = fuzz(name, numbers, asked.seed, guard)
        told = f"{result.inputs:>7,} inputs  {result.accepted:>7,} accepted  {result.refused:>7,} refused"
        sys.stdout.write(f"{name:<13} {told}  {len(result.findings)} findings  {result.seconds:.0f} s\n")
        for problem, often in Counter(one["problem"] for one in result.findings).items():
            first = next(one["number"] for one in result.findings if one["problem"] == problem)
            sys.stdout.write(f"  {often} x {problem} (first: --target '{name}' --only {first})\n")
        sys.stdout.flush()
    findings = [one for result in results.values() for one in result.findings]
    if asked.out is not None:
        told = {name: {k: round(v, 1) if k == "seconds" else v for k, v in asdict(result).items() if k != "findings"}
                for name, result in results.items()}  # fmt: skip
        command = shlex.join(["python", "-m", "tests.security.fuzz", *sys.argv[1:]])
        total = {"command": command, "seed": asked.seed, "inputs": sum(result.inputs for result in results.values())}
        Path(asked.out).write_text(json.dumps({**total, "targets": told, "findings": findings}, indent=1) + "\n")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
