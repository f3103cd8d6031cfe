"""ResNet-18 and ResNet-50 on images of noise, for measurements of memory."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


class Residual(nn.Module):
    def __init__(self, inputs, width, stride, narrow):
        super().__init__()
        outputs = 4 * width if narrow else width
        sizes = (
            [(inputs, width, 1), (width, width, 3), (width, outputs, 1)]
            if narrow
            else [(inputs, width, 3), (width, width, 3)]
        )
        strided = 1 if narrow else 0
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, k, stride if n == strided else 1, k // 2, bias=False) for n, (a, b, k) in enumerate(sizes)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)
        self.shortcut = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        kept = self.shortcut(x)
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=False)):
            x = norm(conv(x))
            x = F.relu(x) if number < len(self.convs) - 1 else x
        return F.relu(x + kept)


class ResNet(nn.Module):
    def __init__(self, depth, classes):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        blocks, inputs = [], 64
        for stage, count in enumerate(DEPTHS[depth]):
            for number in range(count):
                width = 64 * 2**stage
                blocks.append(Residual(inputs, width, 2 if stage and not number else 1, depth == 50))
                inputs = 4 * width if depth == 50 else width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


class Noise(Dataset):
    def __init__(self, size, count):
        self.size, self.count = size, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((3, self.size, self.size), index / self.count), index % 1000


blocks = "blocks.*"
defaults = {"batch_size": 32}


def model(depth=50, classes=1000):
    return ResNet(depth, classes)


def train_data(size=224, count=20_000):
    return Noise(size, count)


def loss(output, target):
    return F.cross_entropy(output, target)


def optimizer(model, lr=0.1, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
