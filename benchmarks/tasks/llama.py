"""A decoder of Llama's shape (RMSNorm, rotary positions, grouped queries, SwiGLU) on made-up tokens; 8 billion
parameters by default."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

blocks = "blocks.*"


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.head_width, bias=False)
        self.value = nn.Linear(width, groups * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        steps = torch.arange(0, self.head_width, 2, device=x.device, dtype=torch.float32) / self.head_width
        angles = places[:, None] / 500000.0**steps
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, groups: int, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads, groups, hidden) for _ in range(layers)])
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(
    layers: int = 32, width: int = 4096, heads: int = 32, groups: int = 8, hidden: int = 14336, vocabulary: int = 128256
) -> nn.Module:
    return Llama(layers, width, heads, groups, hidden, vocabulary)


class Tokens(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, vocabulary: int, context: int, samples: int) -> None:
        self.vocabulary, self.context, self.samples = vocabulary, context, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.context + 1,), generator=random)
        return tokens[:-1], tokens[1:]


def train_data(vocabulary: int = 128256, context: int = 4096, samples: int = 1 << 20) -> Dataset[tuple[Tensor, Tensor]]:
    return Tokens(vocabulary, context, samples)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(model: nn.Module, lr: float = 3e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)
