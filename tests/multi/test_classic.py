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

from rung.task import load_task
from tests.tasks import EXAMPLES

CLASSIC = EXAMPLES / "classic"
COMMANDS = {
    script: command.split()
    for command, script in re.findall(r"^    rung (train .*?) +# (.*)$", (CLASSIC / "README.md").read_text(), re.M)
}
FULL_BATCHES, ALL_BATCHES = 22, 23  # 1,437 samples, 64 at a time


def run(command: list[str]) -> str:
    """A command as from an activated environment. Its processes are on the CPU and have a thread each."""
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=EXAMPLES.parent, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("script", "start", "steps"),
    [
        ("run_ddp.sh", [], ALL_BATCHES),
        pytest.param("run_fsdp.sh", [], ALL_BATCHES, marks=pytest.mark.slow),
        ("run_pippy.sh", [], FULL_BATCHES),
        pytest.param("run_rpc.sh", [], ALL_BATCHES, marks=pytest.mark.slow),
        pytest.param("train_dp.py on a CPU", [sys.executable], ALL_BATCHES, marks=pytest.mark.slow),
    ],
)
def test_a_script_and_its_command_end_with_the_same_weights(
    script: str, start: list[str], steps: int, tmp_path: Path
) -> None:
    weights, folder = tmp_path / "weights.pt", tmp_path / "run"
    path = str(CLASSIC / script.split()[0])
    told = run([*start, path, "--epochs", "1", "--float64", "--no-shuffle", "--out", str(weights)])
    assert re.search(r"^epoch 1: loss 1\.8\d\d\d$", told, re.M), told
    assert re.search(r"^accuracy 0\.\d\d\d on 360 held-out digits$", told, re.M), told
    assert ("nothing is parallel" in told) == (start != [])
    flags = ["--steps", str(steps), "--precision", "fp64", "--no-shuffle", "--set", "eval_every=never"]
    run(["rung", *COMMANDS[script], *flags, "--out", str(folder)])
    by_hand, by_rung = torch.load(weights), load_file(folder / "model.safetensors")
    assert by_hand.keys() == by_rung.keys()
    untrained = load_task(EXAMPLES / "babycnn").model()  # another draw: what did not move would be equal to no one's
    for name, value in by_hand.items():
        assert (value.double() - by_rung[name].double()).abs().max() < 1e-9, name
        assert (value.double() - untrained.state_dict()[name].double()).abs().max() > 1e-3, f"{name} was not trained"


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


@pytest.mark.parametrize("script", ["pippy", "rpc"])
@pytest.mark.slow
def test_a_wrong_number_of_processes_is_refused(script: str) -> None:
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(CLASSIC / f"train_{script}.py")]
    with pytest.raises(AssertionError, match="is cut into 4 stages: start as many processes, not 2"):
        run(command)
