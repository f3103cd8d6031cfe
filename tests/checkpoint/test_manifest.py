"""What a checkpoint says of itself: damage is found before anything is loaded, and named."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.checkpoint.manifest import (
    MANIFEST,
    find_damage,
    folder_of,
    newest,
    newest_good,
    prune,
    read_checkpoint,
    steps_in,
    write_manifest,
)
from rung.checkpoint.plan import read_into, read_whole
from rung.checkpoint.survey import find_newest, inspect_checkpoint, locate, newest_whole, survey
from rung.cli.main import main
from rung.errors import CheckpointError
from tests.harness import SEED
from tests.made_checkpoints import make_checkpoint, rewrite

RANKS = ("rank-00000.safetensors", "rank-00001.safetensors")


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    folder, whole = make_checkpoint(tmp_path, 4)
    checkpoint = read_checkpoint(folder)
    assert checkpoint.step == 4
    assert find_damage(checkpoint) is None
    for name, value in whole.items():
        assert torch.equal(read_whole(checkpoint, name), value)
    targets = {name: torch.zeros_like(value) for name, value in whole.items()}
    read_into(targets, checkpoint)
    assert all(torch.equal(targets[name], value) for name, value in whole.items())


@pytest.mark.parametrize("number", range(40))
def test_a_flipped_bit_anywhere_is_found_and_the_older_one_used(tmp_path: Path, number: int) -> None:
    generator = random.Random(SEED + number)
    make_checkpoint(tmp_path, 2)
    folder, _ = make_checkpoint(tmp_path, 4)
    before = read_checkpoint(folder)
    path = folder / generator.choice([*RANKS, MANIFEST])
    content = bytearray(path.read_bytes())
    place, bit = generator.randrange(len(content)), generator.randrange(8)
    print(f"seed {SEED + number}: bit {bit} of byte {place} of {path.name}")
    content[place] ^= 1 << bit
    path.write_bytes(content)
    found, problems = newest(tmp_path)
    if path.name == MANIFEST and found is not None and found.step == 4:
        assert found.manifest == before.manifest  # 1e-05 and 1E-05 are the same
        return
    assert found is not None and found.step == 2
    assert len(problems) == 1 and str(path) in problems[0]


@pytest.mark.parametrize("name", [*RANKS, MANIFEST])
@pytest.mark.parametrize("how", ["cut", "missing", "empty", "longer", "a folder"])
def test_a_file_cut_short_or_missing_is_found_and_named(tmp_path: Path, name: str, how: str) -> None:
    make_checkpoint(tmp_path, 2)
    folder, _ = make_checkpoint(tmp_path, 4)
    path = folder / name
    content = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how != "missing":
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "longer": content + b"x"}[how])
    found, problems = newest(tmp_path)
    assert found is not None and found.step == 2
    assert len(problems) == 1 and str(path) in problems[0]
    # One look at the sizes is enough for all of these.
    seen = survey(locate(tmp_path), thorough=False)
    assert [one.state for one in seen] == ["whole", "unfinished" if (name, how) == (MANIFEST, "missing") else "damaged"]


def test_the_newest_is_found_without_a_look_at_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(2, 12, 2):
        make_checkpoint(tmp_path, step)
    (folder_of(tmp_path, 10) / RANKS[0]).unlink()
    read: list[Path] = []
    monkeypatch.setattr(
        "rung.checkpoint.survey.read_checkpoint", lambda path: read.append(path) or read_checkpoint(path)
    )
    found = find_newest(locate(tmp_path), thorough=False)
    assert found is not None and found.step == 8
    assert read == [folder_of(tmp_path, 10), folder_of(tmp_path, 8)]


def test_a_list_of_checkpoints_does_not_hold_what_each_says_of_its_tensors(tmp_path: Path) -> None:
    """A thousand checkpoints of a model of ten thousand parameters would take gigabytes."""
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    for place in (tmp_path, folder_of(tmp_path, 4)):
        for found in survey(locate(place)):
            assert found.checkpoint is not None and found.checkpoint.num_bytes > 0
            whole = read_checkpoint(found.path).manifest
            left_out = {"tensors", "state_dict", "optimizer", "computed"}
            assert {**found.checkpoint.manifest} == {key: whole[key] for key in whole if key not in left_out}


def test_other_formats_are_refused(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    rewrite(folder, format=2)
    with pytest.raises(CheckpointError, match=r"has format 2; this version of Rung reads format 1"):
        read_checkpoint(folder)


FOREIGN = [
    "../rank-00000.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "..",
    "model.pt",
    ".metadata",
    "x\n.safetensors",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_manifest_names_no_file_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    manifest = dict(read_checkpoint(folder).manifest)
    rewrite(folder, files={**manifest["files"], name: {"bytes": 1, "sha256": "0" * 64}})
    with pytest.raises(CheckpointError, match="names a file that is not part of a checkpoint"):
        read_checkpoint(folder)
    rewrite(folder, files=manifest["files"])
    tensor = manifest["tensors"]["model/table"]
    chunk = {**tensor["chunks"][0], "file": name}
    rewrite(folder, tensors={**manifest["tensors"], "model/table": {**tensor, "chunks": [chunk]}})
    with pytest.raises(CheckpointError, match="is in a file that the checkpoint does not have"):
        read_checkpoint(folder)


def _nonsense(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Manifests that no save writes, with digests that fit."""
    tensors, table = manifest["tensors"], manifest["tensors"]["model/table"]
    chunk = table["chunks"][0]

    def with_table(**changes: Any) -> dict[str, Any]:
        return {"tensors": {**tensors, "model/table": {**table, **changes}}}

    def with_chunk(**changes: Any) -> dict[str, Any]:
        return with_table(chunks=[{**chunk, **changes}])

    return {
        "negative step": {"step": -1},
        "step as text": {"step": "4"},
        "step true": {"step": True},
        "another step": {"step": 5},
        "no files": {"files": None},
        "files as list": {"files": ["a"]},
        "size as text": {"files": {RANKS[0]: {"bytes": "1", "sha256": "0" * 64}}},
        "digest of a kind": {"files": {RANKS[0]: {"bytes": 1, "sha256": "none"}}},
        "tensors as list": {"tensors": []},
        "huge shape": with_table(shape=[2**60]),
        "negative shape": with_table(shape=[-3]),
        "shape as float": with_table(shape=[3.0]),
        "many dims": with_table(shape=[1] * 100),
        "a hole": with_table(chunks=[]),
        "beyond the end": with_chunk(offsets=[1]),
        "negative offset": with_chunk(offsets=[-1]),
        "twice": with_table(chunks=[chunk, chunk]),
        "larger than its file": with_table(shape=[2**40], chunks=[{**chunk, "shape": [2**40]}]),
        "dims differ": with_chunk(shape=[3, 1], offsets=[0, 0]),
        "key as number": with_chunk(key=3),
        "type as number": with_table(dtype=3),
        "unknown name": {"state_dict": {"tied": "nowhere"}},
        "names as list": {"state_dict": []},
        "no optimizer": {"optimizer": None},
        "computed": {"computed": [1]},
        "finite as text": {"finite": "yes"},
        "a stream without lanes": {"stream": {"epoch": 0, "batch": 1}},
        "a lane with a negative place": {
            "stream": {
                "epoch": 0,
                "batch": 1,
                "lanes": {"0": {"shard": 0, "index": -1, "state_index": 0, "state": None}},
            }
        },
        "computed as dict": {"computed": {"a": 1}},
    }


KINDS = list(_nonsense({"tensors": {"model/table": {"chunks": [{}]}}}))


@pytest.mark.parametrize("kind", KINDS)
def test_nonsense_in_a_manifest_is_refused_before_it_is_used(tmp_path: Path, kind: str) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    rewrite(folder, **_nonsense(dict(read_checkpoint(folder).manifest))[kind])
    with pytest.raises(CheckpointError, match=str(folder / MANIFEST)):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    "key", ["step", "files", "tensors", "state_dict", "optimizer", "topology", "ranks", "computed"]
)
def test_a_manifest_without_a_part_is_refused(tmp_path: Path, key: str) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    content = dict(read_checkpoint(folder).manifest)
    del content[key]
    write_manifest(folder, content)
    with pytest.raises(CheckpointError, match="is not the manifest of a checkpoint"):
        read_checkpoint(folder)


def test_json_that_is_too_deep_is_no_crash(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    for text in ("[" * 10**5, '{"format": ' * 10**5, "9" * 5000, "null", "[]", '"x"', "\xff"):
        (folder / MANIFEST).write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=r"not JSON|not UTF-8|too deeply|not the manifest"):
            read_checkpoint(folder)


def test_pruning_keeps_the_newest_and_every_so_many(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-00000003").mkdir()  # cut short
    (tmp_path / ".step-00000012.partial").mkdir()  # cut short, too
    assert prune(tmp_path, keep=2, keep_every=4, newest=10) == [2, 3, 6]
    assert sorted(steps_in(tmp_path)) == [4, 8, 10]
    assert not list(tmp_path.glob(".step-*"))


def test_pruning_counts_nothing_beyond_the_one_just_written(tmp_path: Path) -> None:
    """A later one may be damaged, which is why the run went back."""
    for step in (8, 12, 14, 15):
        make_checkpoint(tmp_path, step)
    assert prune(tmp_path, keep=1, keep_every=None, newest=14) == [8, 12]
    assert sorted(steps_in(tmp_path)) == [14, 15]


def test_pruning_keeps_the_newest_of_a_finite_state(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8, 10):
        rewrite(make_checkpoint(tmp_path, step)[0], finite={2: True, 4: None}.get(step, False))
    assert prune(tmp_path, keep=2, keep_every=None, newest=10) == [2, 6]
    assert newest_good(tmp_path) == tmp_path / "step-00000004"
    (tmp_path / "step-00000004" / MANIFEST).write_text("{")
    assert newest_good(tmp_path) is None
    for path in tmp_path.iterdir():
        (path / "manifest.json").write_text("[" * 200_000)
    assert newest_good(tmp_path) is None


def test_the_list_marks_what_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4):
        rewrite(make_checkpoint(tmp_path / "checkpoints", step)[0], finite=step == 2)
    assert main(["checkpoints", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("whole, not finite") == 1 and "--resume goes on after step 2" in shown
    for path in (tmp_path / "checkpoints").iterdir():
        rewrite(path, finite=False)
    main(["checkpoints", str(tmp_path)])
    assert "--resume goes on after step 4" in capsys.readouterr().out  # there is no other
    main(["export", str(tmp_path), "--output", str(tmp_path / "out.safetensors")])
    assert "the loss or the gradient norm of step 4 was not finite." in capsys.readouterr().out


def test_the_list_tells_whole_damaged_and_unfinished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (2, 4, 6):
        make_checkpoint(checkpoints, step)
    (checkpoints / "step-00000008").mkdir()
    assert main(["checkpoints", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "zero3" in shown and "2026-01-02 03:04:05" in shown and "unfinished" in shown
    assert "--resume goes on after step 6" in shown

    file = checkpoints / "step-00000006" / RANKS[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["checkpoints", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f"{file} is damaged: its content does not match its digest." in shown.replace("\n", " ")
    assert "--resume goes on after step 4" in shown
    assert main(["checkpoints", str(tmp_path), "--quick"]) == 0  # sizes alone do not tell
    capsys.readouterr()
    assert main(["checkpoints", str(tmp_path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in told["checkpoints"]] == ["whole", "whole", "damaged", "unfinished"]
    assert told["checkpoints"][2]["problem"].startswith(str(file))
    assert told["resume"] == str(checkpoints / "step-00000004")
    assert told["checkpoints"][0]["samples"] == 20 and told["checkpoints"][0]["bytes"] > 0


def test_the_list_takes_a_folder_of_checkpoints_or_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_checkpoint(tmp_path, 2)
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert main(["checkpoints", str(folder)]) == 0
    kept = folder.rename(tmp_path / "the best one")  # whatever it is called
    assert inspect_checkpoint(kept, 2).state == "whole"
    assert newest_whole(survey(locate(kept))) is not None


def test_what_is_no_run_is_said_kindly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "metrics.jsonl").touch()
    (tmp_path / "a file").touch()
    for given, told in {
        "nowhere": "there is no directory",
        "a file": "is a file",
        "runs": f"Did you mean {tmp_path / 'runs' / 'mine'}?",
    }.items():
        assert main(["checkpoints", str(tmp_path / given)]) == 2
        assert told in capsys.readouterr().err
    assert main(["checkpoints", str(tmp_path / "runs" / "mine")]) == 0
    assert "--checkpoint-every N writes them" in capsys.readouterr().out.replace("\n", " ")


def test_a_launcher_finds_what_ranks_saved_on_their_own_without_torch(tmp_path: Path) -> None:
    """It does so while a job stands still after a failure, and importing what ranks compute with takes seconds."""
    folder = folder_of(tmp_path / "rescue", 3)
    folder.mkdir(parents=True)
    (folder / "rank-00000.json").write_text('{"rank": 0}')
    code = (
        "import sys; from pathlib import Path; from rung.checkpoint.survey import locate, find_newest\n"
        "assert find_newest(locate(Path(sys.argv[1]))) is None\n"
        "assert 'rung.checkpoint.notes' in sys.modules\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    (tmp_path / "checkpoints").mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
