"""A task that can be hit: small, quick, with dropout, augmentation and a count of how often each sample was trained on.

The harness writes an order for a rank (see `obey`); the rank fails at the place that the order names.
"""

import json
import os
import resource
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

NUM_SAMPLES, NUM_FEATURES, WIDTH, NUM_CLASSES = 103, 6, 16, 4
defaults = {"batch_size": 10, "epochs": 4, "eval_every": "epoch"}
remote = ["seen"]  # what ddp+ps keeps on its server


class Samples(Dataset):
    def __init__(self, count, phase):
        self.count, self.phase = count, phase

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        obey(self.phase)
        own = torch.Generator().manual_seed(index)
        features = torch.randn(NUM_FEATURES, generator=own) + 0.1 * torch.randn(NUM_FEATURES)  # augmented
        return torch.cat([features, torch.tensor([float(index)])]), index % NUM_CLASSES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        # What fails while Rung traces the model on fake tensors is reported as a mistake in the task.
        is_traced = type(x).__name__ == "FakeTensor"
        obey("tracing" if is_traced else "step" if self.training else "evaluation")
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
        wait_while_held()
        logits = self.head(self.blocks(self.first(x[:, :-1])))
        return torch.cat([logits, self.seen(x[:, -1].long())], dim=1)


class Updates(torch.optim.SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        obey("update")  # parameters are of the next step already, and nobody has counted it
        return loss


def wait_while_held():
    folder = os.environ.get("FAULTS")
    while folder and Path(folder, "hold").exists():
        time.sleep(0.02)


def obey(phase):
    """Do what the harness has ordered for this rank in this phase, once."""
    folder = os.environ.get("FAULTS")
    order = Path(folder, f"rank-{os.environ.get('RANK', '0')}") if folder else None
    if order is None or not order.exists():
        return
    try:
        told = json.loads(order.read_text())
        if told["phase"] not in (phase, "any"):
            return
        order.rename(order.with_name(f"taken-{told['number']}"))  # of several processes of a rank, one gets it
    except FileNotFoundError:
        return
    partial = order.with_name(f".struck-{told['number']}")
    partial.write_text(str(time.monotonic()))
    partial.rename(order.with_name(f"struck-{told['number']}"))
    if told["kind"] == "exception":
        raise RuntimeError("a fault, as ordered")
    if told["kind"] == "exit":
        os._exit(0)
    if told["kind"] == "oom":
        raise torch.OutOfMemoryError("a fault, as ordered: out of memory")
    if told["kind"] == "rlimit":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.ones(2**28)


def model(pause: float = 0.02):
    obey("building")
    return Model(pause)


def train_data():
    return Samples(NUM_SAMPLES, "data")


def eval_data():
    return Samples(23, "evaluation data")


def loss(output, target):
    # The second part moves a sample's entry of `seen` by its share of the batch, whenever it is trained on.
    return F.cross_entropy(output[:, :-1], target) + output[:, -1].mean()


def optimizer(model):
    rest = [p for name, p in model.named_parameters() if name != "seen.weight"]
    groups = [{"params": rest, "momentum": 0.9}, {"params": [model.seen.weight], "lr": 1.0, "momentum": 0.0}]
    return Updates(groups, lr=0.05)


def schedule(optimizer, total_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.99**step, lambda step: 1.0])
