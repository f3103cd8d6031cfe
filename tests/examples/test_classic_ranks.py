"""The scripts of examples/classic: each trains for an epoch as its README says, and the README's command that stands
for it ends with the same weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rung.spec.task import load_task
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.tasks import EXAMPLES

CLASSIC = EXAMPLES / "classic"
COMMANDS = {
    script: command.split()
    for command, script in re.findall(r"^    rung (train .*?) +# (.*)$", (CLASSIC / "README.md").read_text(), re.M)
}
FULL_BATCHES, ALL_BATCHES = 22, 23  # 1,437 samples, 64 at a time


def run(command: list[str], gpus: str = "") -> str:
    """A command as from an activated environment. Its processes are on the CPU, if no GPU is given, and have a thread
    each."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": gpus}
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compare(weights: Path, folder: Path) -> None:
    """The weights that a script saved with those that Rung left, and with those that both began with."""
    by_hand, by_rung = torch.load(weights, map_location="cpu"), load_file(folder / "model.safetensors")
    assert by_hand.keys() == by_rung.keys()
    torch.manual_seed(0)
    first = load_task(EXAMPLES / "babycnn").model().state_dict()
    for name, value in by_hand.items():
        assert (value.double() - by_rung[name].double()).abs().max() < 1e-9, name
        assert (value.double() - first[name].double()).abs().max() > 1e-3, f"{name} was not trained"


@pytest.mark.parametrize(
    ("script", "start", "steps"),
    [
        ("run_ddp.sh", [], ALL_BATCHES),
        slow("run_fsdp.sh", [], ALL_BATCHES),
        slow("run_pippy.sh", [], FULL_BATCHES),
        slow("run_rpc.sh", [], ALL_BATCHES),
        slow("train_dp.py on a CPU", [sys.executable], ALL_BATCHES),
    ],
)
def test_a_script_and_its_command_end_with_the_same_weights(
    launcher: WarmLauncher, script: str, start: list[str], steps: int, tmp_path: Path
) -> None:
    weights, folder = tmp_path / "weights.pt", tmp_path / "run"
    path = str(CLASSIC / script.split()[0])
    told = run([*start, path, "--epochs", "1", "--float64", "--no-shuffle", "--out", str(weights)])
    assert re.search(r"^epoch 1: loss 1\.8\d\d\d$", told, re.M), told
    assert re.search(r"^accuracy 0\.\d\d\d on 360 held-out digits$", told, re.M), told
    assert ("nothing is parallel" in told) == (start != [])
    train, task, *asked = COMMANDS[script]
    flags = ["--steps", str(steps), "--precision", "fp64", "--no-shuffle", "--set", "eval_every=never"]
    flags += ["--set", "device=cpu"]  # as the script, which is shown no GPU
    done = launcher.call(tmp_path, train, str(EXAMPLES.parent / task), *asked, *flags, "--out", "run", limit=180)
    assert done.code == 0, done.output
    compare(weights, folder)


def test_every_script_is_started_by_what_its_readme_says() -> None:
    scripts = {path.name for path in CLASSIC.glob("run_*.sh")} | {"train_dp.py on a CPU", "train_dp.py on GPUs"}
    assert set(COMMANDS) == scripts
    for path in CLASSIC.glob("run_*.sh"):
        assert os.access(path, os.X_OK)
        assert (CLASSIC / f"train_{path.stem.removeprefix('run_')}.py").exists()


def test_the_lines_of_each_script_are_counted() -> None:
    """The README shows what a method costs by hand, so the figure must not grow old."""
    counted = re.findall(r"^\| `(train_\w+\.py)` .*\| (\d+) \|$", (CLASSIC / "README.md").read_text(), re.M)
    assert {name: int(lines) for name, lines in counted} == {
        path.name: len(path.read_text().splitlines()) for path in CLASSIC.glob("train_*.py")
    }


@pytest.mark.parametrize("script", ["pippy", slow("rpc")])
def test_a_wrong_number_of_processes_is_refused(script: str) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "1", str(CLASSIC / f"train_{script}.py")]
    with pytest.raises(AssertionError, match="is cut into 4 stages: start as many processes, not 1"):
        run(command)


# nn.DataParallel takes every GPU that it finds. There may be one, which then has two replicas, as dp2 over gloo has.
TWICE = """
import functools, runpy, sys
from torch import nn
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
nn.DataParallel = functools.partial(nn.DataParallel, device_ids=[0, 0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_data_parallel_with_two_replicas_on_a_gpu(tmp_path: Path) -> None:
    weights, folder, path = tmp_path / "weights.pt", tmp_path / "run", str(CLASSIC / "train_dp.py")
    flags = ["--epochs", "1", "--float64", "--no-shuffle", "--out", str(weights)]
    told = run([sys.executable, "-c", TWICE, path, *flags], gpus="0")
    assert "nothing is parallel" not in told
    command = ["dp2" if word == "dp" else word for word in COMMANDS["train_dp.py on GPUs"]]
    flags = ["--epochs", "1", "--precision", "fp64", "--no-shuffle", "--backend", "gloo", "--set", "eval_every=never"]
    run(["rung", *command, *flags, "--out", str(folder)], gpus="0")
    compare(weights, folder)
