"""Out of memory in a step: the run goes on from the state before it with half the micro-batch, and the same numbers."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rung.metrics import committed

TASK = """
import os
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 16, "steps": 8, "precision": "fp64", "log_every": 1}
seen = {"steps": 0}


class Hungry(nn.Module):
    def __init__(self, limit, rank, first):
        super().__init__()
        self.limit, self.rank, self.first = limit, rank, first
        self.layers = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        if self.training and x.device.type != "meta" and not isinstance(x, torch._subclasses.FakeTensor):
            seen["steps"] += 1
            if len(x) > self.limit and seen["steps"] >= self.first and os.environ.get("RANK", "0") == str(self.rank):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.layers(x)


def model(limit=100, rank=0, first=1):
    return Hungry(limit, rank, first)


def train_data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(103, 5, generator=g), torch.randint(3, (103,), generator=g))


def loss(output, target):
    return F.cross_entropy(output, target)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


def _train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(textwrap.dedent(TASK))
    command = [sys.executable, "-m", "rung.cli", "train", str(folder / "task.py"), "--out", str(folder / "run")]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    assert _train(folder).returncode == 0
    return dict(load_file(folder / "run" / "model.safetensors"))


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "first", "limit", "lost"),
    [("single", 1, 1, 5, 0), ("single", 1, 4, 8, 3), ("ddp", 2, 4, 4, 3), ("zero3", 2, 3, 2, 2)],
)
def test_goes_on_with_less(
    tmp_path: Path, whole: dict[str, torch.Tensor], strategy: str, num_ranks: int, first: int, limit: int, lost: int
) -> None:
    settings = [f"model.limit={limit}", f"model.first={first}", f"model.rank={num_ranks - 1}"]
    done = _train(
        tmp_path, "--strategy", strategy, "--nproc", str(num_ranks), *(f"--set={setting}" for setting in settings)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "now in micro-batches of" in done.stdout
    assert "parameters" in done.stdout.partition("now in micro-batches")[0]
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert max(float((weights[name] - value).abs().max()) for name, value in whole.items()) < 1e-9
    rows = committed(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 9))
    resumed = [row["step"] for row in rows if row["event"] == "resume"]
    assert (resumed[0] if resumed else 0) == lost  # the steps before the one that failed are not done again


def test_can_be_turned_off_and_ends_where_nothing_is_left_to_halve(tmp_path: Path) -> None:
    off = _train(tmp_path / "off", "--set=model.limit=5", "--set=oom_retry=false")
    assert off.returncode == 1
    assert "memory of rank 0" in off.stderr and "activations" in off.stderr
    never = _train(tmp_path / "never", "--set=model.limit=0")
    assert never.returncode == 1
    assert "micro-batches of 1 sample" in never.stdout
    assert "memory of rank 0" in never.stderr
