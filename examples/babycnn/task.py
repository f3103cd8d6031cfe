"""BabyCNN: a small convolutional network with batch norm, on handwritten digits.

Without an argument it trains on the 8x8 digits that come with scikit-learn. Point it at a directory of MNIST files
(`train-images-idx3-ubyte`, optionally .gz) or CIFAR-10 files in their binary version (`data_batch_1.bin`, ...):

    rung train examples/babycnn/task.py --set train_data.root=DIR --set eval_data.root=DIR [--set model.channels=3]
"""

import gzip
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 64, "epochs": 12, "clip": 1.0}


class BabyCNN(nn.Module):
    def __init__(self, channels, width, classes):
        super().__init__()
        self.stem = self.stage(channels, width)
        self.middle = self.stage(width, 2 * width)
        self.top = self.stage(2 * width, 2 * width)
        self.head = nn.Linear(2 * width, classes)

    def stage(self, inputs, outputs):
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())

    def forward(self, images):
        x = F.max_pool2d(self.middle(self.stem(images)), 2)
        return self.head(self.top(x).mean(dim=(2, 3)))


def model(channels=1, width=24, classes=10):
    return BabyCNN(channels, width, classes)


def train_data(root=""):
    return images(root, train=True)


def eval_data(root=""):
    return images(root, train=False)


def loss(output, target):
    return F.cross_entropy(output, target)


def metrics(output, target):
    return {"accuracy": (output.argmax(dim=1) == target).float()}


def optimizer(model, lr=2e-3, weight_decay=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def schedule(optimizer, total_steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)


def images(root, train):
    if not root:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        held_out = torch.arange(len(labels)) % 5 == 0
        chosen = ~held_out if train else held_out
        return TensorDataset(pixels[chosen] - 0.5, labels[chosen])
    folder = Path(root)
    if list(folder.glob("*.bin")):
        names = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
        rows = torch.cat([read_bytes(folder / name).view(-1, 3073) for name in names])
        return TensorDataset(rows[:, 1:].view(-1, 3, 32, 32).float() / 255 - 0.5, rows[:, 0].long())
    part = "train" if train else "t10k"
    pixels = read_bytes(folder / f"{part}-images-idx3-ubyte")[16:].view(-1, 1, 28, 28)
    labels = read_bytes(folder / f"{part}-labels-idx1-ubyte")[8:]
    return TensorDataset(pixels.float() / 255 - 0.5, labels.long())


def read_bytes(path):
    packed = path.with_name(path.name + ".gz")
    content = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
