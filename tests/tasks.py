"""Tasks small enough for many ranks on two cores, with the awkward parts that real models have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.spec.task import Task, load_task

EXAMPLES = Path(__file__).parent.parent / "examples"


class TinyCNN(nn.Module):
    """Convolutions, batch norm, a frozen layer and parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 7, 3, stride=2), nn.BatchNorm2d(7), nn.ReLU())
        self.frozen = nn.Linear(7, 7)
        self.head = nn.Linear(7, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.second(self.first(x)).mean(dim=(2, 3))))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (p(y).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(F.gelu(self.up(x)))


class TinyGPT(nn.Module):
    """Tied embedding and head, a vocabulary that no number of ranks divides."""

    def __init__(self, vocabulary: int = 23, width: int = 12, layers: int = 2, length: int = 6) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("mask", torch.ones(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) * self.mask[: tokens.shape[1], None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def image_data(num_samples: int = 103) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num_samples, 1, 6, 6, generator=g), torch.randint(5, (num_samples,), generator=g))


def text_data(num_samples: int = 103, *, padded: bool = False) -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(23, (num_samples, 7), generator=g)
    targets = tokens[:, 1:].clone()
    if padded:
        lengths = torch.randint(0, 7, (num_samples,), generator=g)
        targets[torch.arange(6)[None] >= lengths[:, None]] = -100
    return TensorDataset(tokens[:, :-1], targets)


def image_task(**changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": TinyCNN,
        "train_data": image_data,
        "eval_data": lambda: image_data(37),
        "loss": lambda output, target: F.cross_entropy(output, target),
        "metrics": lambda output, target: {"accuracy": (output.argmax(1) == target).float()},
        "optimizer": grouped_sgd,
        "schedule": halving,
        "name": "images",
    }
    return Task(**{**parts, **changes})


def text_task(*, padded: bool = False, **changes: Any) -> Task:
    parts: dict[str, Any] = {
        "model": TinyGPT,
        "train_data": lambda: text_data(padded=padded),
        "eval_data": lambda: text_data(37, padded=padded),
        "loss": lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        "metrics": lambda output, target: {
            "accuracy": ((output.argmax(-1) == target).sum(), (target != -100).sum()),
        },
        "optimizer": grouped_sgd,
        "name": "text",
    }
    if padded:
        parts["loss_weight"] = lambda target: (target != -100).sum()
    return Task(**{**parts, **changes})


def halving(optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def grouped_sgd(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def babycnn_task() -> Task:
    """The example's own model and loss, on few and small images."""
    task = load_task(EXAMPLES / "babycnn").bind({"model.width": 4})
    parts: dict[str, Any] = {"optimizer": grouped_sgd, "schedule": halving, "remote": ["head"]}
    return replace(task, train_data=image_data, eval_data=lambda: image_data(37), **parts)


def gpt_task() -> Task:
    task = load_task(EXAMPLES / "gpt").bind(
        {"model.layers": 2, "model.width": 16, "model.heads": 2, "model.context": 6, "model.vocabulary": 23}
    )
    parts: dict[str, Any] = {"optimizer": grouped_sgd, "schedule": halving, "remote": ["blocks.1"]}
    return replace(task, train_data=text_data, eval_data=lambda: text_data(37), **parts)


def padded_task(**changes: Any) -> Task:
    return text_task(padded=True, **changes)


def adamw_task() -> Task:
    return text_task(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


class TinyGRU(nn.Module):
    """A recurrent layer, which keeps its parameters in a list of its own beside their names."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 10)
        self.layers = nn.GRU(10, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, 23)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.token(tokens))[0])


class Skipping(TinyGRU):
    """A layer that no sample passes."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(12, 12)


def skipping_task() -> Task:
    return text_task(model=Skipping)


def recurrent_task() -> Task:
    return text_task(model=TinyGRU)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(36, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.Dropout(0.2))
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x.flatten(1)))


class Noisy(torch.utils.data.Dataset[Any]):
    """Augments: each read draws random numbers."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> Any:
        g = torch.Generator().manual_seed(index)
        return torch.randn(1, 6, 6, generator=g) + 0.1 * torch.randn(1, 6, 6), index % 5


def dropping_task() -> Task:
    return image_task(model=Dropping, train_data=Noisy, optimizer=lambda m: torch.optim.AdamW(m.parameters(), 0.01))


class Experts(nn.Module):
    """A row of each parameter for each expert; rows of hidden values are computed in any order."""

    def __init__(self, num_experts: int, hidden: int = 10, has_bias: bool = False) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, 12, hidden) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, 12) * 0.3)
        if has_bias:
            self.bias = nn.Parameter(torch.randn(num_experts, 12) * 0.3)

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("rd,rkdh->rkh", rows, self.up[chosen])
        found = torch.einsum("rkh,rkhd->rkd", F.gelu(inner), self.down[chosen])
        if hasattr(self, "bias"):
            found = found + self.bias[chosen]
        return (found * weights.unsqueeze(-1)).sum(1)


class ExpertLayer(nn.Module):
    def __init__(self, num_experts: int, favoured: int | None = None, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.router = nn.Linear(12, num_experts, bias=False)
        self.experts = Experts(num_experts, **options)
        favours = torch.zeros(num_experts)
        if favoured is not None:  # rows choose among the first experts alone
            favours[:favoured] = 30.0
        self.register_buffer("favours", favours)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = (self.router(rows) + self.favours).softmax(-1).topk(2, dim=-1)
        return x + self.experts(rows, chosen, weights).view_as(x)


class Mixture(nn.Module):
    """Two layers, of which the experts of the first have a bias; a tied head."""

    def __init__(self, num_experts: int = 8, favoured: int | None = None) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 12)
        self.blocks = nn.ModuleList(
            [ExpertLayer(num_experts, favoured, has_bias=True), ExpertLayer(num_experts, favoured)]
        )
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        x = x + 0.5 * x.cumsum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixture_task() -> Task:
    return text_task(model=Mixture)


TASKS = {
    "experts": mixture_task,
    "dropping": dropping_task,
    "recurrent": recurrent_task,
    "skipping": skipping_task,
    "images": image_task,
    "text": text_task,
    "padded": padded_task,
    "adamw": adamw_task,
    "babycnn": babycnn_task,
    "gpt": gpt_task,
}
