"""Models for tensor parallelism: each has something that a plan can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.tasks import TinyCNN, TinyGPT, gpt_task


class MLP(nn.Module):
    """Features that neither 2 nor 4 divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 23), nn.Linear(23, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(x))))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Attention(nn.Module):
    """Grouped queries; heads found by `-1`, or fixed. `norms`: queries and keys are normed head by head."""

    def __init__(self, width: int, heads: int, groups: int, *, fixed: bool = False, norms: bool = False) -> None:
        super().__init__()
        self.size = width // heads
        self.heads, self.groups = (heads, groups) if fixed else (-1, -1)
        self.norm = nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, groups * self.size)
        self.value, self.out = nn.Linear(width, groups * self.size), nn.Linear(width, width)
        self.query_norm = nn.RMSNorm(self.size) if norms else nn.Identity()
        self.key_norm = nn.RMSNorm(self.size) if norms else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.query_norm(self.query(y).view(*y.shape[:2], self.heads, self.size))
        k = self.key_norm(self.key(y).view(*y.shape[:2], self.groups, self.size))
        v = self.value(y).view(*y.shape[:2], self.groups, self.size)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Blocks of attention and a gated MLP, embedding with a padding row, an untied head."""

    def __init__(self, heads: int = 4, groups: int = 4, width: int = 16, hidden: int = 24, **options: Any) -> None:
        super().__init__()
        self.token = nn.Embedding(23, width, padding_idx=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(Attention(width, heads, groups, **options), SwiGLU(width, hidden)) for _ in range(2)
        )
        self.head = nn.Linear(width, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class PreNorm(nn.Module):
    """The kind of block between which activations can be cut along the sequence. Conv1D in its second half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = BareAttention(width)
        self.mlp = nn.Sequential(Conv1D(3 * width, width), nn.GELU(), nn.Dropout(0.0), Conv1D(width, 3 * width))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x = x + self.attention(scale=scale, hidden=self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class BareAttention(nn.Module):
    """Looks at the length of what it is given, which must be the whole. Takes it by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.query_norm = nn.RMSNorm(4)

    def forward(self, scale: Tensor, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        q, k, v = (p(hidden).view(batch, length, -1, 4) for p in (self.query, self.key, self.value))
        q = self.query_norm(q) * scale[:length, None, None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class PreNormGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__(width=16, length=8)
        self.blocks = nn.ModuleList([PreNorm(16) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class Gated(TinyGPT):
    """Blocks that are pairs themselves: each layer gathers for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SwiGLU(12, 20) for _ in range(2)])


class Conv1D(nn.Module):
    """As Hugging Face's: a linear layer with its weight the other way round."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.1), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mixed = Conv1D(3 * width, width)
        self.up, self.down = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ConvGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(12) for _ in range(2)])


class Encoder(nn.Module):
    """torch's own layers, whose attention keeps its weights to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(16, 23)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class DirectlyTied(nn.Module):
    """The embedding's weight is used by hand: nobody can cut it unseen."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        return F.linear(x + self.down(F.relu(self.up(x))), self.token.weight)


class Leaking(nn.Module):
    """What goes into `down` is right in parts, but something else also looks at it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        if self.kind == "forward":
            return self.down(hidden) + hidden.mean(dim=-1, keepdim=True)
        return self.down(hidden * self.scale(x).sigmoid())  # right forward; backward goes around `up`


@dataclass
class Case:
    make: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Tensor]
    num_classes: int = 23


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(23, (5, 6), generator=generator)


def _eight_tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(23, (3, 8), generator=generator)


def _features(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator, dtype=torch.float64)


def _half_frozen() -> nn.Module:
    model = Decoder()
    model.blocks[0].requires_grad_(False)
    model.token.requires_grad_(False)
    return model


def _example_gpt() -> nn.Module:
    return gpt_task().model()


CASES = {
    "mlp": Case(MLP, _features(5, 6), 5),
    "tiny gpt": Case(TinyGPT, _tokens),
    "example gpt": Case(_example_gpt, _tokens),
    "decoder": Case(Decoder, _eight_tokens),
    "fixed heads": Case(lambda: Decoder(fixed=True), _tokens),
    "six heads": Case(lambda: Decoder(6, 6, width=12), _tokens),
    "grouped": Case(lambda: Decoder(4, 2), _eight_tokens),
    "normed heads": Case(lambda: Decoder(norms=True), _eight_tokens),
    "pre-norm": Case(PreNormGPT, _eight_tokens),
    "gated": Case(Gated, lambda generator: torch.randint(23, (4, 4), generator=generator)),
    "conv1d": Case(ConvGPT, _tokens),
    "encoder": Case(Encoder, _features(3, 4, 16)),
    "cnn": Case(TinyCNN, _features(8, 1, 6, 6), 5),
    "frozen": Case(_half_frozen, _tokens),
    "directly tied": Case(DirectlyTied, _tokens),
    "leaking backward": Case(lambda: Leaking("backward"), _features(5, 8), 8),
}
