"""Damaged checkpoints, as ranks that resume meet them: found before loading, named, passed by. No code is run."""

from __future__ import annotations

import logging
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from rung.checkpoint import StorageTopology, restore
from rung.cli.main import main
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_size
from rung.train.checkpointing import find_state
from tests.checkpoints import legs
from tests.cli.test_commands_ranks import TASK
from tests.harness import SEED, RankFailed, on_ranks
from tests.launcher import WarmLauncher
from tests.made_checkpoints import evil_bytes, replace_file
from tests.marks import slow_if
from tests.tasks import adamw_task

CONFIG = RunConfig(batch_size=10, steps=4, device="cpu", eval_every="never")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two steps, each of two ranks."""
    folder = tmp_path_factory.mktemp("run")
    legs(adamw_task, CONFIG, folder, [("zero3", 2, 2), ("ddp", 2, 4)])
    assert len(list((folder / "checkpoints").iterdir())) == 2
    return folder


def take_up(strategy: str, folder: str, watch: bool = False) -> tuple[int | None, list[str], list[str]]:
    """Choose a checkpoint and restore it: its step, what was said, and what was unpickled meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rung").addHandler(handler)
    unpickled: list[str] = []
    watching = [watch]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching[0] and event == "pickle.find_class":
            unpickled.append(".".join(arguments))

    sys.addaudithook(hook)
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        found = find_state(Path(folder), StorageTopology(world, Path(folder)), resume=True)
        if found is not None:
            restore(build_runtime(adamw_task(), world, CONFIG, total_steps=4, seeded=False), found, seed=0)
    watching[0] = False
    return found.step if found is not None else None, said, unpickled


@pytest.mark.parametrize(
    ("how", "name"),
    [
        slow_if(how in ("pickle", "torch.save") or (how != "bit" and name != "rank-00000.safetensors"), how, name)
        for how in ("bit", "cut", "missing", "pickle", "torch.save")
        for name in ("rank-00000.safetensors", "rank-00001.safetensors", "manifest.json")
    ],
)
def test_ranks_pass_by_a_damaged_checkpoint_and_say_so(run_dir: Path, tmp_path: Path, name: str, how: str) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    path = copy / "checkpoints" / "step-00000004" / name
    content = bytearray(path.read_bytes())
    if how == "bit":
        generator = random.Random(SEED)
        place = generator.randrange(len(content))
        print(f"seed {SEED}: byte {place} of {name}")
        content[place] ^= 0x10  # no letter becomes the same one in the other case
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: len(content) // 3])
    elif how == "missing":
        path.unlink()
    else:
        path.write_bytes(evil_bytes(tmp_path / "mark", how))
    results = on_ranks(take_up, 2, "zero3", str(copy))
    assert [step for step, _, _ in results] == [2, 2]
    (told,) = results[0][1]
    assert str(path) in told and "The state of step 2 is used instead." in told
    assert results[1][1] == []  # said once
    assert not (tmp_path / "mark").exists()


def test_a_pickle_behind_a_fitting_digest_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    folder = copy / "checkpoints" / "step-00000004"
    evil = evil_bytes(tmp_path / "mark", "pickle")
    replace_file(folder, "rank-00000.safetensors", evil.ljust(10**6, b"\0"))  # as large as the tensors it is to hold
    with pytest.raises(AssertionError, match=r"rank-00000\.safetensors is damaged: it has no header"):
        on_ranks(take_up, 1, "single", str(copy))
    assert not (tmp_path / "mark").exists()


def test_nothing_is_unpickled_on_the_way(run_dir: Path) -> None:
    ((step, _, unpickled),) = on_ranks(take_up, 1, "single", str(run_dir), True)
    assert step == 4
    assert unpickled == []


def test_nothing_whole_is_refused_and_nothing_at_all_is_a_new_start(run_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run_dir, tmp_path / "copy")
    for path in (copy / "checkpoints").glob("*/rank-00001.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(RankFailed, match=r"CheckpointError: all 2 checkpoints are damaged: .*step-00000004.*0002"):
        on_ranks(take_up, 2, "ddp", str(copy))
    shutil.rmtree(copy / "checkpoints")
    assert [step for step, _, _ in on_ranks(take_up, 2, "ddp", str(copy))] == [None, None]


def test_a_run_resumes_from_the_older_one(
    launcher: WarmLauncher,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    for folder in (run, whole):
        folder.mkdir()
        (folder / "task.py").write_text(TASK)

    def train(folder: Path, *flags: str) -> str:
        done = launcher.run(folder, *flags)
        assert done.code == 0, done.output
        return " ".join(done.output.split())

    def rung(*arguments: str, code: int = 0) -> str:
        assert main(list(arguments)) == code
        told = capsys.readouterr()
        return " ".join((told.out + told.err).split())

    train(run, "--checkpoint-every", "5", "--steps", "10")
    train(whole, "--steps", "12")
    file = run / "out" / "checkpoints" / "step-00000010" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert "--resume goes on after step 5" in rung("checkpoints", str(run / "out"), code=1)
    told = train(run, "--steps", "12", "--resume")
    assert "step-00000010/rank-00001.safetensors is damaged" in told
    assert "going on after step 5" in told
    assert "--resume goes on after step 12" in rung("checkpoints", str(run / "out"))
    for folder in (run, whole):
        rung("export", str(folder / "out"), "--output", str(folder / "exported.safetensors"))
    assert (run / "exported.safetensors").read_bytes() == (whole / "exported.safetensors").read_bytes()
