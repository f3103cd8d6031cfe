"""A weight that changes on one rank alone ends the run, and the last checkpoint is from before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launcher import WarmLauncher
from tests.marks import slow

# After step 3, on the rank `flips`, one bit of one weight is the other way round.
TASK = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 12, "steps": 20, "device": "cpu"}


def model():
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def train_data():
    inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :4])


def loss(output, target):
    return ((output - target) ** 2).mean()


def optimizer(model, flips=-1):
    found = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, steps = dict(model.named_parameters())["1.weight"], []

    def flip(*_):
        steps.append(1)
        if len(steps) == 3 and int(os.environ["RANK"]) == flips:
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.data.view(torch.int32)[0] ^= 1 << 12

    found.register_step_post_hook(flip)
    return found
"""


# The first and the last stage of a pipeline have a copy of the same weight.
TIED = TASK.replace("LayerNorm(16), nn.Linear(16, 4)", "Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)")
TIED = TIED.replace(
    "def train_data",
    """made = model


def model():
    found = made()
    found[3].weight = found[1].weight
    return found


def train_data""",
)


@pytest.mark.parametrize(
    ("strategy", "nproc", "flips", "who"),
    [
        ("ddp", 3, 1, "rank 1 no longer has the weights"),
        ("hsdp2x2", 4, 3, r"ranks 1, 3 should have the same weights"),
        ("tp2", 2, 0, "ranks 0, 1 should have the same weights"),
        ("pp2", 2, 1, "ranks 0, 1 should have the same weights"),
        slow("pp2,ddp2", 4, 3, "ranks .* should have the same weights"),
        slow("rpc-pp2", 2, 1, "ranks 0, 1 should have the same weights"),
    ],
)
def test_a_flipped_bit_is_seen_and_named(
    launcher: WarmLauncher, tmp_path: Path, strategy: str, nproc: int, flips: int, who: str
) -> None:
    (tmp_path / "task.py").write_text(TIED if "pp" in strategy else TASK)
    flags = ["--strategy", strategy, "--set", "check_every=7", "--set", f"optimizer.flips={flips}"]
    flags += ["--set", "split=3"] if "pp" in strategy else []
    outcome = launcher.run(tmp_path, *flags, nproc=nproc)
    assert outcome.code != 0
    assert re.search(rf"after step 7 {who}.*: 1\.weight\.", outcome.output), outcome.output


def test_no_checkpoint_is_written_of_weights_that_differ(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    flags = ["--strategy", "ddp", "--checkpoint-every", "2", "--set", "optimizer.flips=1"]
    outcome = launcher.run(tmp_path, *flags)
    assert outcome.code != 0 and "after step 4 ranks 0, 1" in outcome.output, outcome.output
    assert "the last good checkpoint is out/checkpoints/step-00000002" in outcome.output
    saved = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert saved == ["step-00000002"]


def test_a_run_without_such_a_fault_ends(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    for strategy, nproc in (("ddp", 2), ("hsdp2x2", 4), ("zero2x2,tp2", 4), ("pp2,ddp2", 4)):
        flags = ["--strategy", strategy, "--set", "check_every=1", "--out", strategy.replace(",", "-")]
        assert launcher.run(tmp_path, *flags, nproc=nproc).code == 0
