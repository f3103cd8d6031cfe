"""Measure kernels other than matrix products and simple memory traffic, one by one, for `rung calibrate`.

The FLOPs and bytes of each come from the tracer that dry runs use, so that a measured rate fits a traced operation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True)
class Kernel:
    """A call whose forward and backward are one large operation each."""

    call: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]


def kernels(where: torch.device) -> Iterator[Kernel]:
    """Common kernels of models in a few sizes."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=where, requires_grad=True)

    for rows in (16, 256, 4096):
        for function in (F.gelu, F.silu, F.relu, torch.tanh, torch.sigmoid, torch.exp):
            yield Kernel(function, (random(rows, 256),))
        yield Kernel(partial(F.softmax, dim=-1), (random(rows, 256),))
        yield Kernel(partial(F.log_softmax, dim=-1), (random(rows, 256),))
        yield Kernel(lambda x, w, b: F.layer_norm(x, (256,), w, b), (random(rows, 256), random(256), random(256)))
        yield Kernel(partial(F.dropout, p=0.1), (random(rows, 256),))
        places = torch.randint(0, 512, (rows,), device=where)
        yield Kernel(lambda w, p=places: F.embedding(p, w), (random(512, 256),))
    for length in (32, 128, 512):
        attend = partial(F.scaled_dot_product_attention, is_causal=True)
        yield Kernel(attend, tuple(random(4, 4, length, 64) for _ in range(3)))
    for batch, width, pixels in ((8, 16, 8), (16, 32, 16), (32, 64, 28)):
        image = random(batch, width, pixels, pixels)
        yield Kernel(partial(F.conv2d, padding=1), (image, random(width, width, 3, 3)))
        yield Kernel(partial(F.max_pool2d, kernel_size=2), (image,))
        yield Kernel(partial(F.batch_norm, training=True), (image, *_statistics(width, where), random(width)))


def _statistics(width: int, where: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(width, device=where), torch.ones(width, device=where)


def measure_kernels(world: World, time: Callable[[Callable[[], Any]], float]) -> dict[str, list[Point]]:
    """For each operation, points of (amount in a call, amount per second), in FLOPs, or in bytes if it has none."""
    found: dict[str, list[Point]] = {}
    for kernel in kernels(world.device):
        tracer = Tracer(world, StatusWriter())
        with tracer:
            output = kernel.call(*kernel.inputs)
        wanted = [tensor for tensor in kernel.inputs if tensor.requires_grad]
        seed = torch.ones_like(output)
        back = partial(torch.autograd.grad, output, wanted, seed, retain_graph=True)
        forward = _main(tracer.trace.works())
        tracer = Tracer(world, StatusWriter())
        with tracer:
            back()
        for work, call in ((forward, partial(kernel.call, *kernel.inputs)), (_main(tracer.trace.works()), back)):
            if work is not None:
                amount = float(work.flops or work.num_bytes)
                found.setdefault(work.name, []).append((amount, amount / time(call)))
    return {name: _fastest_points(points) for name, points in found.items()}


def _main(works: list[Work]) -> Work | None:
    return max(works, key=lambda work: (work.flops, work.num_bytes), default=None)


def _fastest_points(points: list[Point]) -> list[Point]:
    """Sort by amount and keep the fastest point of each."""
    ordered = sorted(points)
    return [max(group) for _, group in itertools.groupby(ordered, key=lambda point: point[0])]
