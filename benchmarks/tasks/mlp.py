"""A model so small that a step is mostly what surrounds the arithmetic: it shows the cost of the loop itself."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def model(features: int = 64, width: int = 128, layers: int = 2, classes: int = 10) -> nn.Module:
    sizes = [features, *[width] * (layers - 1)]
    hidden = [part for before, after in pairwise(sizes) for part in (nn.Linear(before, after), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def train_data(features: int = 64, classes: int = 10, samples: int = 16384) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=random)
    directions = torch.randn(features, classes, generator=random)
    return TensorDataset(inputs, (inputs @ directions).argmax(dim=1))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def optimizer(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
