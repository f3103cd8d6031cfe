"""`--precision fp8` under FSDP: weights of float8 layers are gathered in float8, which is half the bytes of bf16.

Each rank casts its shard of the fp32 weight by the scale of the whole weight, so what is gathered is the whole weight's
own cast. The largest elements of all these weights are reduced together, once in each forward of the model. FSDP looks
for two functions on a shard before it gathers it. They are attributes here, and the shard stays a plain tensor: the
optimizer, checkpoints and exports see none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.distributed.torch_private import shard_of
from rung.distributed.world import World
from rung.parallel.float8 import Float8Linear, GatheredWeight
from rung.parallel.float8_cast import FACTOR, cast, scale_for
from rung.spec.abilities import shards_alone
from rung.spec.config import RunConfig


class _Scales:
    """Of all the weights of this rank that are gathered in float8."""

    def __init__(self, shards: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._shards, self._group = shards, group
        # Kept until the next forward: FSDP gathers on a stream of its own, which waits for the others there alone.
        self._found: tuple[Tensor, Tensor] | None = None

    def forget(self, *_: Any) -> None:
        self._found = None

    def of(self, index: int) -> tuple[Tensor, Tensor]:
        """The scale of a weight and its inverse."""
        if self._found is None:
            largest = torch.stack([_largest(shard) for shard in self._shards])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
            scales = scale_for(largest, FACTOR)
            self._found = scales, scales.reciprocal()
        scales, inverse = self._found
        return scales[index], inverse[index]


def _largest(shard: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.vector_norm(shard, float("inf")) if shard.numel() else shard.new_zeros(())
    return largest.float()


def gather_in_float8(model: nn.Module, roots: Sequence[nn.Module], world: World, config: RunConfig) -> str | None:
    """Let FSDP gather weights of float8 layers in float8 where it can. Returns a sentence that says so.

    Not for scales of rows, of which backward needs others than forward; not under tensor parallelism, where a rank's
    part of a weight has a scale of its own; not beside experts that are shared out, which FSDP shards by another
    mesh; not for shards in host memory, which FSDP copies without their attributes.
    """
    layout = world.layout
    if config.fp8_scaling == "row" or config.gather != "auto" or config.offload == "cpu":
        return None
    if not shards_alone(layout):
        return None
    weights = [layer.weight for layer in model.modules() if isinstance(layer, Float8Linear)]
    shards = [shard_of(weight) for weight in dict.fromkeys(weights) if isinstance(weight, DTensor)]
    if not shards:
        return None
    scales = _Scales(shards, world.axis("dp_shard").get_group())
    for index, shard in enumerate(shards):
        extended: Any = shard
        extended.fsdp_pre_all_gather = partial(_before, shard, partial(scales.of, index))
        extended.fsdp_post_all_gather = _after
    for root in roots:
        root.register_forward_pre_hook(scales.forget, prepend=True)
    return f"fp8: FSDP gathers the weights of these {len(shards)} layers in float8"


def _before(
    shard: Tensor,
    scale_of: Callable[[], tuple[Tensor, Tensor]],
    mesh: Any,
    size: torch.Size,
    stride: Any,
    module: Any,
    policy: Any,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, torch.Size]]:
    """What a rank sends, of equal size on every rank."""
    scale, inverse = scale_of()
    each = -(-size[0] // mesh.size())
    part = cast(shard, FACTOR, scale)
    if len(part) < each:
        part = torch.cat([part.view(torch.uint8), part.new_zeros(each - len(part), *size[1:]).view(torch.uint8)])
        part = part.view(FACTOR)
    return (part,), (inverse, size)


def _after(
    gathered: tuple[Tensor, ...], kept: tuple[Tensor, torch.Size], dtype: torch.dtype, *, out: Tensor | None = None
) -> Any:
    inverse_scale, size = kept
    if out is not None:  # its float8 elements have been gathered into place
        assert isinstance(out, GatheredWeight)
        out.inverse_scale.copy_(inverse_scale)
        return None
    return GatheredWeight(gathered[0][: size[0]], inverse_scale.clone(), dtype), ()
