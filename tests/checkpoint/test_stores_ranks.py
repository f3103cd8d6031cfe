"""Runs in a store of objects: a real S3 server on loopback, on a machine whose disk is emptied, and with faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rung.system.store import Store, local_folder
from tests.launcher import Outcome, WarmLauncher
from tests.marks import slow
from tests.stores import BUCKET, FaultyS3, s3_server

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 10, "steps": 8, "device": "cpu", "precision": "fp64", "eval_every": "never"}

def model(): return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1))
def train_data():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(103, 8, generator=g, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))
def loss(output, target): return ((output - target) ** 2).mean()
def optimizer(model, lr=0.1): return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
"""
SAVES = ("--checkpoint-every", "2", "--set", "store_timeout=1")


class Machine:
    """A launcher in a folder of its own, whose disk may be emptied."""

    def __init__(self, launcher: WarmLauncher, folder: Path, server: FaultyS3, url: str) -> None:
        self.launcher, self.folder, self.server, self.url = launcher, folder, server, url
        (folder / "task.py").write_text(TASK)

    def rung(self, *arguments: str, code: int = 0, before: str = "") -> str:
        done: Outcome = self.launcher.call(self.folder, *arguments, before=before, limit=180)
        assert done.code == code, done.output
        assert "verysecretvalue" not in done.output
        return done.output

    def train(self, *arguments: str, code: int = 0, before: str = "") -> str:
        return self.rung("train", "task.py", *arguments, code=code, before=before)

    @property
    def run(self) -> Path:
        return self.folder / local_folder(self.url)

    @property
    def store(self) -> Store:
        return Store(self.url, patience=5)

    def empty_disk(self) -> None:
        shutil.rmtree(self.folder / "runs")

    def weights(self, tmp: Path) -> dict[str, torch.Tensor]:
        self.store.get_file("model.safetensors", tmp / "model.safetensors")
        return load_file(tmp / "model.safetensors")

    def steps(self) -> list[int]:
        """The finished checkpoints in the store."""
        names = [name for name in self.store.sizes("checkpoints") if name.endswith("manifest.json")]
        return sorted(int(name.split("/")[1].removeprefix("step-")) for name in names)


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyS3]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def launcher(server: FaultyS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmLauncher]:
    launcher = WarmLauncher.start(tmp_path_factory.mktemp("warm"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="module")
def whole(launcher: WarmLauncher, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "task.py").write_text(TASK)
    done = launcher.call(folder, "train", "task.py", "--strategy", "single", "--out", "whole", limit=180)
    assert done.code == 0, done.output
    return load_file(folder / "whole" / "model.safetensors")


@pytest.fixture
def machine(
    launcher: WarmLauncher, tmp_path: Path, server: FaultyS3, request: pytest.FixtureRequest
) -> Iterator[Machine]:
    server.puts.clear()
    server.refused.clear()
    url = f"s3://{BUCKET}/{zlib.crc32(request.node.name.encode())}/run"
    yield Machine(launcher, tmp_path, server, url)
    server.fault = lambda method, path: None


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-9


@pytest.mark.parametrize(("first", "second"), [("ddp2", "fsdp2"), slow("fsdp2", "tp2"), slow("ddp2", "single")])
def test_a_run_goes_on_from_the_store_alone(
    machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path, first: str, second: str
) -> None:
    said = machine.train("--strategy", first, "--out", machine.url, "--steps", "4", *SAVES)
    assert f"all of it is in {machine.url}/" in said
    assert machine.steps() == [2, 4]
    machine.empty_disk()
    said = machine.train("--strategy", second, "--resume", machine.url, "--steps", "8")
    assert "going on after step 4" in said
    assert_same(machine.weights(tmp_path), whole)
    assert machine.steps() == [4, 6, 8]  # --keep 3, of what another disk has had, too
    names = set(machine.store.sizes())
    assert {"config.toml", "metrics.jsonl", "model.safetensors", "logs/rank-1.log"} <= names or second == "single"
    assert not {name for name in names if name.startswith((".", "rescue"))}
    rows = [json.loads(line) for line in machine.store.get("metrics.jsonl", 10**6).splitlines()]
    assert {row["step"] for row in rows if row["event"] == "step"} == set(range(1, 9))
    # A checkpoint's manifest comes after its files, always.
    for step in (2, 4, 6, 8):
        written = [name.rpartition("/")[2] for name in machine.server.puts if f"step-{step:08d}/" in name]
        assert written[-1] == "manifest.json" and written.count("manifest.json") == 1
    for name in names:
        if not name.endswith(".safetensors"):
            assert b"verysecretvalue" not in machine.store.get(name, 10**7), name


PAUSING = TASK.replace(
    "def loss(output, target): return",
    "def loss(output, target, pause=0.0):\n    import time; time.sleep(pause)\n    return",
)


def torchrun(machine: Machine, *arguments: str) -> subprocess.Popen[str]:
    """`rung train` as two ranks of torchrun, in a process group of their own."""
    words = ["--standalone", "--nproc-per-node", "2", "-m", "rung", "train", "task.py", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=machine.folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said_by(process: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = process.communicate(timeout=120)
    assert process.returncode == code, said
    assert "verysecretvalue" not in said
    return said


@pytest.mark.parametrize("is_killed", [False, slow(True)], ids=["finished", "killed"])
def test_ranks_of_torchrun_keep_a_run_in_a_store(
    machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path, is_killed: bool
) -> None:
    (machine.folder / "task.py").write_text(PAUSING)
    flags = ("--strategy", "ddp", "--out", machine.url, *SAVES)
    if is_killed:
        first = torchrun(machine, *flags, "--steps", "8", "--set", "loss.pause=0.4")
        while 4 not in machine.steps():
            assert first.poll() is None, said_by(first)
            time.sleep(0.1)
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()
        machine.empty_disk()
        said = said_by(torchrun(machine, "--strategy", "fsdp", "--resume", machine.url, "--steps", "6"))
        assert "going on after step 4" in said
        assert "is finished" in said_by(torchrun(machine, "--resume", machine.url, "--steps", "6"))
    else:
        said = said_by(torchrun(machine, *flags, "--steps", "4"))
    assert f"all of it is in {machine.url}/" in said
    names = set(machine.store.sizes())
    assert {"run", "config.toml", "metrics.jsonl", "model.safetensors", "logs/rank-0.log", "logs/rank-1.log"} <= names
    machine.empty_disk()
    machine.train("--strategy", "ddp2", "--resume", machine.url, "--steps", "8")
    assert_same(machine.weights(tmp_path), whole)
    rows = [json.loads(line) for line in machine.store.get("metrics.jsonl", 10**6).splitlines()]
    assert {row["step"] for row in rows if row["event"] == "step"} == set(range(1, 9))


def test_what_passes_is_tried_again(machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """500s for a while, a connection that is cut in the middle of an upload, and a store that is slow."""
    faults = {"step-00000002/rank": ["refuse", "refuse"], "step-00000004/rank-00001": ["cut", "cut"]}
    faults |= {"step-00000006/": ["slow"] * 3}

    def fault(method: str, path: str) -> str | None:
        left = next((left for part, left in faults.items() if part in path and method == "PUT"), [])
        return left.pop() if left else None

    machine.server.fault = fault
    said = machine.train(
        "--strategy", "ddp2", "--out", machine.url, "--checkpoint-every", "2", "--set", "store_timeout=20"
    )
    assert not any(faults.values()) and len(machine.server.refused) == 4
    assert "warning" not in said
    assert machine.steps() == [4, 6, 8]
    assert_same(machine.weights(tmp_path), whole)


def test_a_checkpoint_that_cannot_be_sent_is_said_and_not_counted(machine: Machine) -> None:
    machine.server.fault = lambda method, path: (
        "refuse" if method == "PUT" and "step-00000004/rank-00001" in path else None
    )
    said = machine.train("--strategy", "ddp2", "--out", machine.url, *SAVES)
    what = f"the checkpoint of step 4 is on the disk here alone, and could not be sent to {machine.url}: rank 1 could"
    assert what in " ".join(said.split())
    assert f"The newest whole checkpoint is {machine.url}/checkpoints/step-00000002" in said
    assert machine.steps() == [2, 6, 8]
    rows = [json.loads(line) for line in (machine.run / "metrics.jsonl").read_text().splitlines()]
    errors = {row["step"]: row["error"] for row in rows if row["event"] == "checkpoint"}
    assert [step for step, error in errors.items() if error is not None] == [4]
    # `rung watch` says so while that is the last one.
    kept = [row for row in rows if row["event"] != "checkpoint" or row["step"] == 4]
    (machine.run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert "step 4 is not saved: the checkpoint of step 4 is on the disk here alone" in " ".join(
        machine.rung("watch", machine.url).split()
    )


def test_a_store_that_dies_for_good_is_a_failure_and_nothing_is_lost(
    machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    def fault(method: str, path: str) -> str | None:
        return "cut" if any("step-00000004/manifest" in name for name in machine.server.puts) else None

    machine.server.fault = fault
    said = machine.train("--strategy", "ddp2", "--out", machine.url, *SAVES, code=1)
    assert "the checkpoint of step 8 is on the disk here alone" in said
    assert f"The newest whole checkpoint is {machine.url}/checkpoints/step-00000004" in said
    assert f"--resume {machine.url}" in said
    hasty = "from rung.system.store import Store; Store.__init__.__kwdefaults__['patience'] = 1"  # instead of a minute
    said = machine.train("--strategy", "ddp2", "--resume", machine.url, code=2, before=hasty)
    assert f"--resume: {machine.url} could not be listed" in said  # it is still dead
    machine.server.fault = lambda method, path: None
    assert machine.steps() == [2, 4]
    machine.train("--strategy", "ddp2", "--resume", machine.url)
    assert machine.steps()[-1] == 8
    assert_same(machine.weights(tmp_path), whole)
    # What only the end could not send is sent by the same command, too.
    machine.store.remove(["model.safetensors"])
    assert "is finished" in machine.train("--strategy", "ddp2", "--resume", machine.url)
    assert_same(machine.weights(tmp_path), whole)


def test_half_a_checkpoint_and_a_damaged_one_are_passed_by(
    machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    machine.train("--strategy", "ddp2", "--out", machine.url, "--steps", "6", *SAVES)
    machine.store.remove(["checkpoints/step-00000006/manifest.json"])
    name = "checkpoints/step-00000004/rank-00001.safetensors"
    machine.store.put(name, machine.store.get(name, 10**7)[:-8])
    machine.store.remove(["model.safetensors"])
    machine.empty_disk()
    listed = json.loads(machine.rung("checkpoints", machine.url, "--json", code=1))
    assert [(row["step"], row["state"]) for row in listed["checkpoints"]] == [
        (2, "whole"), (4, "damaged"), (6, "unfinished"),
    ]  # fmt: skip
    assert listed["resume"] == f"{machine.url}/checkpoints/step-00000002"
    assert f"{machine.url}/{name} is damaged: it has" in machine.rung("checkpoints", machine.url, "--quick", code=1)
    assert "the checkpoint of step 2" in machine.rung("export", machine.url, "--output", "two.safetensors")
    said = machine.train("--strategy", "fsdp2", "--resume", machine.url, "--steps", "8")
    assert f"{machine.url}/{name} is damaged" in " ".join(said.split())
    assert "going on after step 2" in said
    assert_same(machine.weights(tmp_path), whole)
    machine.rung("export", machine.url, "--output", f"{machine.url}-out/all.safetensors")
    Store(f"{machine.url}-out").get_file("all.safetensors", tmp_path / "all.safetensors")
    assert_same(load_file(tmp_path / "all.safetensors"), whole)
    assert "exists" in machine.rung("export", machine.url, "--output", f"{machine.url}-out/all.safetensors", code=2)


def test_nothing_whole_in_the_store_is_refused(machine: Machine) -> None:
    machine.train("--strategy", "ddp2", "--out", machine.url, "--steps", "2", *SAVES)
    machine.store.put("checkpoints/step-00000002/rank-00000.safetensors", b"")
    machine.empty_disk()
    said = machine.train("--resume", machine.url, "--steps", "4", code=2)
    assert f"no checkpoint in {machine.url} is whole" in said


def test_a_restarted_command_goes_on_and_another_run_is_not_mixed_in(
    machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    words = ("--strategy", "ddp2", "--out", machine.url, "--resume-if-there", *SAVES)
    machine.train(*words, "--steps", "4")
    machine.empty_disk()
    assert "going on after step 4" in machine.train(*words, "--steps", "8")
    assert_same(machine.weights(tmp_path), whole)
    assert "holds a run already" in machine.train("--out", machine.url, code=2)
    # The run in the store is removed, and its part on this machine is not: a new run must not take it up.
    machine.store.remove(machine.store.sizes())
    said = machine.train(*words, "--steps", "2")
    assert "going on" not in said and machine.steps() == [2]
    part = machine.run.relative_to(machine.folder)
    assert f"Resume that: --resume {machine.url}" in machine.train("--resume", str(part), code=2)


def test_a_run_begins_with_weights_in_a_store(machine: Machine, whole: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(whole, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    begin = Store(f"{machine.url}-begin")
    for name in ("model.safetensors", "config.json"):
        begin.put_file(tmp_path / name, name)
    words = ("--strategy", "fsdp2", "--steps", "1", "--set", "optimizer.lr=0", "--init", begin.url)
    said = machine.train(*words, "--out", machine.url)
    assert f"begin as in --init {(machine.folder / local_folder(begin.url, 'weights'))}" in said
    assert_same(machine.weights(tmp_path), whole)
    # Replaced by others of the same size, they are fetched again.
    doubled = {name: 2 * tensor for name, tensor in whole.items()}
    save_file(doubled, tmp_path / "model.safetensors")
    begin.put_file(tmp_path / "model.safetensors", "model.safetensors")
    machine.train(*words, "--out", "here")
    assert_same(load_file(tmp_path / "here" / "model.safetensors"), doubled)
    machine.rung("export", machine.url, "--format", "hf", "--output", f"{machine.url}-hf")
    assert {"config.json", "model.safetensors"} <= set(Store(f"{machine.url}-hf").sizes())
    begin.remove(["model.safetensors"])
    begin.put("pytorch_model.bin", b"a pickle")
    assert "Other formats are pickles" in machine.train(*words, "--out", "there", code=2)
