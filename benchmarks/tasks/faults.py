"""The job of benchmarks.faults: a model whose step takes some 30 ms on a core, and a task of Rung around it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

BATCH_SIZE = 64
_WIDTH = 512

defaults = {"batch_size": BATCH_SIZE, "eval_every": "never", "log_every": 1}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, _WIDTH),
        *(layer for _ in range(3) for layer in (nn.ReLU(), nn.Linear(_WIDTH, _WIDTH))),
        nn.ReLU(),
        nn.Linear(_WIDTH, 10),
    )


def make_data() -> TensorDataset:
    x = torch.randn(64 * 1000, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :10].argmax(dim=1))


def model() -> nn.Module:
    return make_model()


def train_data() -> TensorDataset:
    return make_data()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
