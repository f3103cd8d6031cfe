"""A disk that takes nothing more, in the middle of a run: told with its reason, decided alike by all ranks, survived
where that is possible."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rung.checkpoint import Position, StorageTopology, save_weights
from rung.checkpoint.share import Share
from rung.checkpoint.sites import host_group, mirror
from rung.cli.main import main
from rung.distributed.world import open_world
from rung.errors import CheckpointError
from rung.launch import train_command
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_size
from rung.train.checkpointing import Checkpointing
from tests.harness import on_ranks
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.tasks import adamw_task

CONFIG = RunConfig(batch_size=10, steps=4, device="cpu", checkpoint_every=1)
needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")

TASK = """
import contextlib, os, pathlib, shutil, subprocess, time, torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 8, "steps": 12, "device": "cpu", "log_every": 1}
FAULT, RUN = {fault!r}, {run!r}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.last, self.count = nn.Linear(8, 600), nn.Linear(600, 2), 0

    def forward(self, x):
        self.count += self.training
        run = pathlib.Path(RUN)
        if self.count == 1 and FAULT.isdigit() and os.environ.get("RANK") == "0":
            (run / "checkpoints").mkdir()
            disk = ["mount", "-t", "tmpfs", "-o", f"size={FAULT}k", "none", str(run / "checkpoints")]
            subprocess.run(disk, check=True)
        if self.count == 6 and FAULT.isalpha() and os.environ.get("RANK") == "0":
            if FAULT == "removed":
                shutil.rmtree(run)
                raise ValueError("boom in the task")
            with contextlib.suppress(OSError), (run.parent / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        print("a word of the task")
        return self.last(self.wide(x).relu())


model = Model
optimizer = lambda m: torch.optim.AdamW(m.parameters(), 0.01)


def train_data():
    return TensorDataset(torch.randn(200, 8), torch.randint(2, (200,)))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
STATE_KILOBYTES = 120  # of the model, its optimizer and the ranks' generators; the weights alone are 26


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def unmounted(run: Path) -> Iterator[None]:
    """Without the small disk that the task has put under the checkpoints of its run."""
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(run / "checkpoints")], check=True)


def _task(fault: str = "", run: Path | None = None) -> str:
    return TASK.replace("{fault!r}", repr(fault)).replace("{run!r}", repr(str(run)))


def rung(
    launcher: WarmLauncher, folder: Path, *arguments: str, fault: str = "", run: Path | None = None
) -> tuple[int, str]:
    (folder / "task.py").write_text(_task(fault, run))
    # The check would run the first forward twice, and the task has its faults there.
    done = launcher.call(folder, "train", "task.py", "--no-check", *arguments)
    return done.code, " ".join(done.output.split())


# -- ranks decide alike ----------------------------------------------------------------------------------------------


def finish_after_failure(folder: str) -> list[str]:
    """The save of the last step fails, which rank 1's thread learns late; the run ends meanwhile."""
    run_dir = Path(folder)
    with open_world(parse("ddp", environment_size()), device="cpu", timeout_seconds=20) as world:
        runtime = build_runtime(adamw_task(), world, CONFIG, total_steps=4)
        checkpointing = Checkpointing(
            run_dir, runtime, StorageTopology(world, run_dir), CONFIG, {"num_samples": 10}, Position(0, 0, 0, 0)
        )
        write = Share.write

        def fail(share: Share, *args: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        from rung.checkpoint import save

        gather = save.gather_in

        def late(*args: Any) -> Any:
            told = gather(*args)
            time.sleep(1.0 if world.rank == 1 else 0.0)
            return told

        with mock.patch.object(save, "gather_in", late):
            with mock.patch.object(Share, "write", fail):
                checkpointing.save(Position(4, 0, 40, 40))
                time.sleep(1.5)  # both have tried; rank 1 has not heard of it yet
            assert Share.write is write
            checkpointing.finish(Position(4, 0, 40, 40))
            told = [str(record.error) for record in checkpointing.finished()]
        world.barrier()
        checkpointing.refuse_lost_end()
    return told


def test_ranks_agree_whether_the_last_save_is_done_again(tmp_path: Path) -> None:
    for told in on_ranks(finish_after_failure, 2, str(tmp_path / "run"), timeout=60):
        assert [text == "None" for text in told] == [False, True]
        assert "could not write its part: no space left on device; " in told[0]
        assert "are needed" in told[0] and "were free" in told[0]
    assert (tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").exists()


def weights_below_a_file(strategy: str, folder: str) -> str:
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=20) as world:
        runtime = build_runtime(adamw_task(), world, CONFIG, total_steps=4)
        told = ""
        try:
            save_weights(runtime, Path(folder) / "file" / "model.safetensors")
        except CheckpointError as error:
            told = str(error)
        world.barrier()
        save_weights(runtime, Path(folder) / "model.safetensors")
    return told


@pytest.mark.parametrize("strategy", ["zero3", slow("pp2")])
def test_all_ranks_hear_why_the_weights_cannot_be_written(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "file").touch()
    first, second = on_ranks(weights_below_a_file, 2, strategy, str(tmp_path), timeout=60)
    assert first == second and "model.safetensors could not be written: not a directory" in first
    assert (tmp_path / "model.safetensors").exists()


def mirror_to_a_bad_disk(folder: str) -> str:
    with open_world(parse("ddp", environment_size()), device="cpu", timeout_seconds=20) as world:
        own = Path(folder) / str(world.rank)
        sites, group = StorageTopology(world, own), host_group(world)
        assert not sites.is_shared
        (own / f"rank-{world.rank}").write_bytes(b"1" * 100)
        if world.rank == 1:
            (own / ".rank-0.partial").mkdir()  # where the other's file is to go
        told = ""
        try:
            mirror(sites, group, own, [f"rank-{world.rank}"])
        except OSError as error:
            told = os.strerror(error.errno or 0)
        world.barrier()
    return told


def test_a_bad_disk_of_one_machine_does_not_hold_up_the_others(tmp_path: Path) -> None:
    assert on_ranks(mirror_to_a_bad_disk, 2, str(tmp_path), timeout=60) == ["", "Is a directory"]
    assert (tmp_path / "0" / "rank-1").read_bytes() == b"1" * 100


# -- whole runs ------------------------------------------------------------------------------------------------------


@needs_mount
def test_checkpoints_on_a_full_disk_do_not_keep_a_run_from_its_end(launcher: WarmLauncher, tmp_path: Path) -> None:
    arguments = ("--nproc", "2", "--checkpoint-every", "3", "--out", "run")
    with unmounted(run := tmp_path / "run"):
        code, told = rung(launcher, tmp_path, *arguments, fault=str(2 * STATE_KILOBYTES), run=run)
    assert code == 0, told
    assert "the checkpoint of step 12 could not be written" in told
    assert "no space left on device" in told and "are needed" in told and "were free. Training goes on." in told
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 26_000


@needs_mount
def test_a_full_disk_at_the_end_is_named_and_the_run_goes_on_when_there_is_room(
    launcher: WarmLauncher, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "small", 4096) as disk:
        # Each save is waited for, so that the one of step 4 is there before the disk is filled.
        saving = ("--checkpoint-every", "4", "--set", "async_save=false")
        arguments = ("--nproc", "2", *saving, "--out", "small/run")
        code, told = rung(launcher, tmp_path, *arguments, fault="full", run=disk / "run")
        assert code == 1, told
        # Not a byte is left for a log, and it is said all the same.
        assert "failed in step 12, phase saving: CheckpointError: small/run/model.safetensors" in told
        assert "could not be written: no space left on device" in told
        assert "The newest whole checkpoint is small/run/checkpoints/step-00000004." in told
        assert "different operations" not in told
        (disk / "filler").unlink()
        code, told = rung(launcher, tmp_path, "--resume", "small/run", run=disk / "run")
        assert code == 0 and "going on after step 4" in told, told
        assert (disk / "run" / "model.safetensors").exists()
        rows = [json.loads(line) for line in (disk / "run" / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["event"] == "end"


@needs_mount
def test_a_run_without_weights_fails_if_its_last_checkpoint_is_not_written(
    launcher: WarmLauncher, tmp_path: Path
) -> None:
    arguments = ("--checkpoint-every", "6", "--set", "save_weights=false", "--out", "run")
    with unmounted(run := tmp_path / "run"):
        code, told = rung(launcher, tmp_path, *arguments, fault=str(STATE_KILOBYTES // 2), run=run)
    assert code == 1, told
    assert "CheckpointError: the checkpoint of step 12 could not be written" in told
    assert "There is no whole checkpoint." in told


def test_a_run_directory_that_is_removed_does_not_hide_the_failure(launcher: WarmLauncher, tmp_path: Path) -> None:
    code, told = rung(
        launcher, tmp_path, "--nproc", "2", "--no-check", "--out", "run", fault="removed", run=tmp_path / "run"
    )
    assert code == 1, told
    assert "rank 0 failed in step 6" in told and "ValueError: boom in the task" in told


def test_a_run_whose_weights_are_gone_at_its_end_has_not_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launched_and_removed(*args: Any, **kwargs: Any) -> Any:
        found = launch(*args, **kwargs)
        (tmp_path / "run" / "model.safetensors").unlink()
        return found

    launch = train_command.launch
    monkeypatch.setattr(train_command, "launch", launched_and_removed)
    monkeypatch.setattr(train_command, "start_fork_server", lambda: None)  # the tests have a fork server of their own
    (tmp_path / "task.py").write_text(_task())
    assert main(["train", str(tmp_path / "task.py"), "--steps", "3", "--out", str(tmp_path / "run")]) == 1
    told = capsys.readouterr()
    assert "all 3 steps are done, but" in told.err and "it was removed" in told.err
    assert "results:" not in told.out


def test_a_run_with_damaged_checkpoints_alone_is_refused(launcher: WarmLauncher, tmp_path: Path) -> None:
    code, told = rung(launcher, tmp_path, "--nproc", "2", "--checkpoint-every", "3", "--steps", "6", "--out", "run")
    assert code == 0, told
    for path in (tmp_path / "run" / "checkpoints").glob("*/rank-00001.safetensors"):
        path.write_bytes(b"")
    code, told = rung(launcher, tmp_path, "--steps", "12", "--resume", "run")
    assert code == 2, told
    assert "all 2 checkpoints are damaged: run/checkpoints/step-00000006/rank-00001.safetensors is damaged: it" in told
    assert "step-00000003/rank-00001.safetensors is damaged" in told
    assert "or move run/checkpoints away to start at the first step." in told
    # The same command is not taken for one that has done its work already, though the settings are the new ones.
    code, again = rung(launcher, tmp_path, "--steps", "12", "--resume", "run")
    assert code == 2 and "checkpoints are damaged" in again, again
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    code, told = rung(launcher, tmp_path, "--steps", "12", "--resume", "run")
    assert code == 0 and "there is no checkpoint yet: from the first step" in told
