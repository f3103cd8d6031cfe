"""A task that can be hit: small, quick, with dropout, augmentation and a count of how often each sample was seen."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

NUM_SAMPLES, NUM_FEATURES, WIDTH, NUM_CLASSES = 103, 6, 16, 4
defaults = {"batch_size": 10, "epochs": 4, "eval_every": "epoch"}


class Samples(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        features = torch.randn(NUM_FEATURES, generator=own) + 0.1 * torch.randn(NUM_FEATURES)  # augmented
        return torch.cat([features, torch.tensor([float(index)])]), index % NUM_CLASSES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, pause):
        super().__init__()
        self.pause = pause
        self.first = nn.Linear(NUM_FEATURES, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.seen = nn.Embedding(NUM_SAMPLES, 1)
        nn.init.zeros_(self.seen.weight)

    def forward(self, x):
        time.sleep(self.pause)
        suffer()
        logits = self.head(self.blocks(self.first(x[:, :-1])))
        return torch.cat([logits, self.seen(x[:, -1].long())], dim=1)


def suffer():
    """What the harness has in mind for this rank."""
    folder = os.environ.get("FAULTS")
    while folder and Path(folder, "hold").exists():
        time.sleep(0.02)
    order = Path(folder, f"rank-{os.environ.get('RANK', '0')}") if folder else None
    if order is None or not order.exists():
        return
    kind = order.read_text()
    order.unlink(missing_ok=True)
    if kind == "exception":
        raise RuntimeError("a fault, as ordered")
    if kind == "exit":
        os._exit(0)


def model(pause: float = 0.02):
    return Model(pause)


def train_data():
    return Samples(NUM_SAMPLES)


def eval_data():
    return Samples(23)


def loss(output, target):
    # The second part moves a sample's entry of `seen` by its share of the batch, whenever it is trained on.
    return F.cross_entropy(output[:, :-1], target) + output[:, -1].mean()


def optimizer(model):
    rest = [p for name, p in model.named_parameters() if name != "seen.weight"]
    groups = [{"params": rest, "momentum": 0.9}, {"params": [model.seen.weight], "lr": 1.0, "momentum": 0.0}]
    return torch.optim.SGD(groups, lr=0.05)


def schedule(optimizer, total_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.99**step, lambda step: 1.0])
