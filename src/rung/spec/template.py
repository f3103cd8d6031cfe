"""`rung new NAME`: a commented task file that runs as it is."""

from __future__ import annotations

from pathlib import Path

from rung.errors import TaskError
from rung.system.disk import writing

TEMPLATE = '''"""A task for Rung: plain PyTorch, found by the names of its functions.

    rung train {path}                            one process
    rung train {path} --strategy fsdp --nproc 2  the same numbers on two processes
    rung verify {path}                           proof of that
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

# Defaults for any setting of the run; flags override them. docs/settings.md lists them.
defaults = {{"batch_size": 64, "epochs": 5, "clip": 1.0}}


# A plain module with plain initialisation. Arguments with defaults can be set from outside: --set model.width=128
def model(width=64, depth=3):
    layers = [nn.Linear(2, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


# Two interleaved half circles; replace this by your own data. A map-style data set gives (input, target) pairs; Rung
# shuffles it, partitions it over processes, and reads every sample exactly once an epoch.
def two_moons(count, seed, noise=0.15):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(2, (count,), generator=generator)
    angle = torch.pi * torch.rand(count, generator=generator)
    sign = 1 - 2 * target
    points = torch.stack([angle.cos() * sign + target, angle.sin() * sign + target / 2], dim=1)
    return TensorDataset(points + noise * torch.randn(count, 2, generator=generator), target)


def train_data(count=4000):
    return two_moons(count, seed=1)


# Returns the mean over what it counts, here samples. If some targets do not count (padding), also define
#     def loss_weight(target): return (target != -100).sum()
def loss(output, target):
    return F.cross_entropy(output, target)


# Ordinary torch code; parameter groups are welcome.
def optimizer(model, lr=3e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


# ---- optional from here ----


def schedule(optimizer, total_steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


def eval_data(count=1000):
    return two_moons(count, seed=2)


# One number per sample (averaged over all samples), or a pair (sum, count).
def metrics(output, target):
    return {{"accuracy": (output.argmax(dim=1) == target).float()}}
'''


def write_template(folder: Path) -> Path:
    path = folder if folder.suffix == ".py" else folder / "task.py"
    if folder.is_file() or path.exists():
        raise TaskError(f"{folder if folder.is_file() else path} exists already; choose another name.")
    with writing(path, "the task"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEMPLATE.format(path=path))
    return path
