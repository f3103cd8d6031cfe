"""The GPT job as a Rung task: a decoder with tied embedding on made-up tokens held in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

blocks = "blocks.*"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_width, self.is_grouped = width // heads, key_heads < heads
        self.sizes = [width, key_heads * self.head_width, key_heads * self.head_width]
        self.project = nn.Linear(width, sum(self.sizes), bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, -1, self.head_width)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.project(x).split(self.sizes, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.is_grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, key_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, key_heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, key_heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pieces(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of one long row of tokens: a piece, and the same piece one token on."""

    def __init__(self, tokens: Tensor, context: int, stride: int) -> None:
        self._tokens, self._context, self._stride = tokens, context, stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._context - 1) // self._stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._stride
        piece = self._tokens[start : start + self._context + 1]
        return piece[:-1], piece[1:]


def model(
    layers: int = 4, width: int = 128, heads: int = 4, context: int = 128, vocabulary: int = 98, key_heads: int = 0
) -> nn.Module:
    return GPT(layers, width, heads, key_heads or heads, context, vocabulary)


def train_data(context: int = 128, vocabulary: int = 98, samples: int = 16384, stride: int = 64) -> Dataset[Any]:
    random = torch.Generator().manual_seed(0)
    uniform = torch.rand((samples - 1) * stride + context + 1, generator=random)
    # Small numbers are far more frequent, so that there is something to learn and the loss tells that learning happens.
    return Pieces((uniform**4 * vocabulary).long(), context, stride)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def optimizer(model: nn.Module, lr: float = 6e-4) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
