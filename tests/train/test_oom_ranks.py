"""Out of memory in a step: the run goes on from the state before it with half the micro-batch, and the same numbers."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rung
from tests.launcher import Outcome, WarmLauncher
from tests.marks import slow
from tests.metrics_file import committed

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


def _train(launcher: WarmLauncher, folder: Path, *settings: str, strategy: str = "single", nproc: int = 1) -> Outcome:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(textwrap.dedent(TASK))
    return launcher.run(folder, "--strategy", strategy, *(f"--set={setting}" for setting in settings), nproc=nproc)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("whole")
    (folder / "task.py").write_text(textwrap.dedent(TASK))
    with rung.open_session(folder / "task.py", strategy="single", device="cpu") as session:
        for window in itertools.islice(session.batches(), 8):
            session.step(window)
        session.save(folder / "model.safetensors")
    return dict(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "first", "limit", "lost"),
    [("single", 1, 1, 5, 0), slow("single", 1, 4, 8, 3), slow("ddp", 2, 4, 4, 3), ("zero3", 2, 3, 2, 2)],
)
def test_goes_on_with_less(
    launcher: WarmLauncher,
    tmp_path: Path,
    whole: dict[str, torch.Tensor],
    strategy: str,
    num_ranks: int,
    first: int,
    limit: int,
    lost: int,
) -> None:
    settings = [f"model.limit={limit}", f"model.first={first}", f"model.rank={num_ranks - 1}"]
    done = _train(launcher, tmp_path, *settings, strategy=strategy, nproc=num_ranks)
    assert done.code == 0, done.output
    assert "now in micro-batches of" in done.output
    assert "parameters" in done.output.partition("now in micro-batches")[0]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert max(float((weights[name] - value).abs().max()) for name, value in whole.items()) < 1e-9
    rows = committed(tmp_path / "out" / "metrics.jsonl")
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 9))
    resumed = [row["step"] for row in rows if row["event"] == "resume"]
    assert (resumed[0] if resumed else 0) == lost  # the steps before the one that failed are not done again


def test_can_be_turned_off_and_ends_where_nothing_is_left_to_halve(launcher: WarmLauncher, tmp_path: Path) -> None:
    off = _train(launcher, tmp_path / "off", "model.limit=5", "oom_retry=false")
    assert off.code == 1
    assert "memory of rank 0" in off.output and "activations" in off.output
    never = _train(launcher, tmp_path / "never", "model.limit=0")
    assert never.code == 1
    assert "micro-batches of 1 sample" in never.output
    assert "memory of rank 0" in never.output
