"""Measure kernels other than matrix products and simple memory traffic, one by one, for `rung calibrate`.

The FLOPs and bytes of each come from the tracer that dry runs use, so that a measured rate fits a traced operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World
from rung.planner.trace import Work
from rung.planner.tracer import Tracer

Point = tuple[float, float]
_NARROW = 64  # a row of a norm that leaves most threads of its block idle
# What a device calls, and what a dry run without it traces.
_SAME = {
    "cudnn_batch_norm": "native_batch_norm",
    "product_cudnn_attention": "product_flash_attention",
    "scatter_add_": "scatter_add",
}


@dataclass(frozen=True)
class Kernel:
    """A call whose forward, and backward if it has one, are one large operation each."""

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    limit: str = ""  # what it is recorded by: "moves" if memory limits it although it computes, or "pieces"


@dataclass(frozen=True)
class Sizes:
    rows: tuple[int, ...]
    width: int
    lengths: tuple[int, ...]  # of sequences
    images: tuple[tuple[int, int, int], ...]  # samples, channels, pixels of a side


SIZES = {
    "cpu": Sizes((16, 256, 4096), 256, (32, 128, 512), ((8, 16, 8), (16, 32, 16), (32, 64, 28))),
    "cuda": Sizes(
        (64, 1024, 16384, 65536), 1024, (128, 512, 2048), ((8, 32, 14), (32, 64, 28), (32, 128, 56), (64, 256, 56))
    ),
}


_LONG = (16384, 65536)  # of sequences whose attention is quicker for each operation than that of short ones


def kernels(where: torch.device, dtype: torch.dtype = torch.float32) -> Iterator[Kernel]:
    """Common kernels of models in a few sizes."""
    sizes = SIZES[where.type]
    width = sizes.width

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=where, dtype=dtype, requires_grad=True)

    for rows in sizes.rows:
        for function in (F.gelu, F.silu, F.relu, torch.tanh, torch.sigmoid, torch.exp):
            yield Kernel(function, (random(rows, width),))
        yield Kernel(partial(F.softmax, dim=-1), (random(rows, width),))
        yield Kernel(partial(F.log_softmax, dim=-1), (random(rows, width),))
        normalise = partial(_layer_norm, width)
        yield Kernel(normalise, (random(rows, width), random(width), random(width)))
        # On a CPU dropout is three operations, and drawing its mask takes by far the longest of them.
        drop = partial(F.dropout, p=0.1) if where.type == "cuda" else _draw
        yield Kernel(drop, (random(rows, width),))
        yield Kernel(partial(torch.sum, dim=0), (random(rows, width),))
        if where.type == "cuda":
            yield Kernel(torch.mul, (random(rows, width), random(width).detach()), "pieces")
            yield Kernel(
                partial(_layer_norm, _NARROW), (random(4 * rows, _NARROW), *random(2, _NARROW).unbind()), "pieces"
            )
        places = torch.randint(0, 512, (rows,), device=where)
        yield Kernel(lambda w, p=places: F.embedding(p, w), (random(512, width),))
        # Its gradient is added up by places, as messages between the nodes of a graph are.
        wide_places = places.remainder(128).view(2, -1, 1).expand(2, rows // 2, width)
        yield Kernel(lambda x, p=wide_places: x.gather(1, p), (random(2, 128, width),))
    for length in sizes.lengths:
        attend = F.scaled_dot_product_attention
        yield Kernel(partial(attend, is_causal=True), tuple(random(4, 4, length, 64) for _ in range(3)))
        mask = torch.zeros(4, 1, length, length, device=where, dtype=dtype)
        masked = partial(attend, attn_mask=mask)
        yield Kernel(partial(attend, dropout_p=0.1), tuple(random(4, 4, length, 64) for _ in range(3)))
        yield Kernel(masked, tuple(random(4, 4, length, 64) for _ in range(3)))
        yield Kernel(torch.bmm, (random(16, length, 64), random(16, 64, length)))
    if where.type == "cuda" and dtype != torch.float32:  # for long sequences, with what flash kernels reach there
        for length in _LONG:
            attend = partial(F.scaled_dot_product_attention, is_causal=True)
            yield Kernel(attend, tuple(random(1, 4, length, 64) for _ in range(3)))
    for batch, channels, pixels in sizes.images:
        image = random(batch, channels, pixels, pixels)
        yield Kernel(partial(F.conv2d, padding=1), (image, random(channels, channels, 3, 3)))
        yield Kernel(F.conv2d, (image, random(2 * channels, channels, 1, 1)))
        # As many pixels of few channels: cuDNN moves a picture several times, since it wants channels last.
        wide = random(batch, 16, 2 * pixels, 2 * pixels)
        yield Kernel(partial(F.conv2d, padding=1), (wide, random(16, 16, 3, 3)), "moves")
        alone = partial(F.conv2d, padding=1, groups=channels)
        yield Kernel(alone, (image, random(channels, 1, 3, 3)))
        yield Kernel(partial(F.max_pool2d, kernel_size=2), (image,))
        yield Kernel(partial(F.group_norm, num_groups=8), (image,))
        # Autocast leaves the weights of a batch norm in fp32, as its statistics are.
        weight = torch.ones(channels, device=where, requires_grad=True)
        statistics = _statistics(channels, where)
        yield Kernel(partial(F.batch_norm, training=True), (image, *statistics, weight))
        # Ranks compute these first, to combine them with those of others.
        yield Kernel(_statistics_of_batch, (image.detach(), *statistics))


def _layer_norm(width: int, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (width,), weight, bias)


def _draw(like: Tensor) -> Tensor:
    return torch.empty_like(like, requires_grad=False).bernoulli_(0.9)


def _statistics_of_batch(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return torch.batch_norm_update_stats(x, mean, variance, 0.0)[0]


def _statistics(width: int, where: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(width, device=where), torch.ones(width, device=where)


def measure_kernels(
    world: World, time: Callable[[Callable[[], Any]], float], types: Sequence[torch.dtype] = (torch.float32,)
) -> dict[str, list[Point]]:
    """For each operation, points of (amount in a call, amount per second), in FLOPs, or in bytes if it has none; for
    pointwise ones whose operands lie differently in memory, together and in elements."""
    found: dict[str, list[Point]] = {}
    for kernel in itertools.chain.from_iterable(kernels(world.device, dtype) for dtype in types):
        tracer = Tracer(world, StatusWriter())
        with tracer:
            output = kernel.call(*kernel.inputs)
        measured: list[tuple[Work | None, Callable[[], Any]]] = [
            (_main(tracer.trace.works()), partial(kernel.call, *kernel.inputs))
        ]
        if output.requires_grad:
            wanted = [tensor for tensor in kernel.inputs if tensor.requires_grad]
            back = partial(torch.autograd.grad, output, wanted, torch.ones_like(output), retain_graph=True)
            tracer = Tracer(world, StatusWriter())
            with tracer:
                back()
            measured.append((_main(tracer.trace.works()), back))
        for work, call in measured:
            if work is not None:
                name, amount = _recorded(work, kernel.limit)
                seconds = time(call)
                if seconds > 0:
                    found.setdefault(name, []).append((amount, amount / seconds))
    return {name: _fastest_points(points) for name, points in found.items()}


def _recorded(work: Work, limit: str) -> tuple[str, float]:
    if limit == "moves":
        return moving_name(work), float(work.num_bytes)
    if limit == "pieces":
        return pieces_name(work), float(work.pieces)
    return name_of(work), float(work.flops or work.num_bytes)


def name_of(work: Work) -> str:
    """The name under which a kernel is recorded: with its type, unless that is fp32."""
    name = work.name
    for own, other in _SAME.items():
        name = name.replace(own, other)
    return name if work.dtype == "float32" else f"{name}:{work.dtype}"


def moving_name(work: Work) -> str:
    """The name under which the rate is recorded at which a kernel that computes little moves bytes."""
    return f"moving {name_of(work)}"


def pieces_name(work: Work) -> str:
    """The name under which the rate is recorded at which a kernel computes its pieces: one for all pointwise ones."""
    return f"{work.name} rows" if work.name.startswith("native_layer_norm") else "scattered"


def _main(works: list[Work]) -> Work | None:
    return max(works, key=lambda work: (work.flops, work.num_bytes), default=None)


def _fastest_points(points: list[Point]) -> list[Point]:
    """Sort by amount and keep the fastest point of each."""
    ordered = sorted(points)
    return [max(group) for _, group in itertools.groupby(ordered, key=lambda point: point[0])]
