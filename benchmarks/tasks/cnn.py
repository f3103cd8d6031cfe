"""Three stages of convolution, batch norm and ReLU: it shows what batch norms cost that see the batch of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def model(width: int = 32, classes: int = 10) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for outputs in (width, 2 * width, 4 * width):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def train_data(size: int = 32, classes: int = 10, samples: int = 2048) -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    targets = torch.randint(classes, (samples,), generator=random)
    patterns = torch.randn(classes, 3, size, size, generator=random)
    noise = torch.randn(samples, 3, size, size, generator=random)
    return TensorDataset(0.5 * patterns[targets] + noise, targets)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def optimizer(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
