"""What modules are proven on: random weights and inputs, apart from the run that they are for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.distributed.torch_private import tree_map_only
from rung.parallel.forward_trace import Call, tensors_of

_SHORT_BATCH = 2
# Random tensors repeat after this many numbers, because drawing is slow. Odd, so that no two rows are equal.
_PERIOD = 2**20 - 3
_SHIFT = 7  # a larger weight is one strided vector: each row starts this many numbers after the previous one


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Real CPU tensors, gradients on, and the global random state restored afterwards."""
    with fake_world.outside_fakes(), torch.enable_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        yield


def random_state(block: nn.Module, *, besides: Sequence[str] = ()) -> dict[str, Tensor]:
    """Random tensors for a block by name, but not for some parts of it."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, parameter in block.named_parameters():
        if any(name.startswith(f"{part}.") for part in besides):
            continue
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
        if parameter.numel() > _PERIOD and parameter.is_floating_point() and parameter.dim() > 1:
            tensors[name] = _shifted(parameter.shape, fan_in**-0.5, generator)
        else:
            tensors[name] = _random(parameter, parameter.shape, generator, True).div_(max(1, fan_in) ** 0.5)
        if parameter.is_floating_point():
            tensors[name].requires_grad_()
    for name, buffer in block.named_buffers():
        has_data = not buffer.is_meta and type(buffer).__name__ != "FakeTensor"
        real = buffer.detach().cpu() if has_data else _random(buffer, buffer.shape, generator, True)
        # Positive, because the buffer may be a running variance.
        tensors[name] = (real if has_data else real.abs()).float() if real.is_floating_point() else real
    return tensors


def random_inputs(call: Call, length: int, num_ranks: int, flag: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random inputs of the recorded shapes; with `length`, a small batch and a short sequence where both are known."""
    generator = torch.Generator().manual_seed(1)
    given = tensors_of((call.args, call.kwargs))
    sizes = dict.fromkeys((given[0].shape[0],), _SHORT_BATCH) if length and given and given[0].dim() > 1 else {}
    if sizes and given[0].dim() == 3:
        longest = given[0].shape[1]
        sizes[longest] = min(length, longest // num_ranks * num_ranks or longest)

    def shorten(shape: Sequence[int]) -> list[int]:
        # The last dimension is features, except for a square mask (positions x positions).
        is_mask = len(shape) >= 2 and shape[-1] == shape[-2] and len(shape) != 3
        kept = 0 if is_mask or len(shape) == 1 else 1
        head = [min(size, sizes.get(size, size)) for size in shape[: len(shape) - kept]]
        return [*head, *shape[len(shape) - kept :]]

    first = next((t for t in given if t.is_floating_point()), None)

    def real(leaf: Tensor) -> Tensor:
        tensor = _random(leaf, shorten(leaf.shape), generator, flag)
        return tensor.requires_grad_() if leaf.requires_grad or leaf is first else tensor

    def fresh(value: Any) -> Any:
        # A key-value cache would hold fake tensors of the trace; training does not use one.
        return None if type(value).__name__.endswith("Cache") else tree_map_only(Tensor, real, value)

    return tuple(fresh(value) for value in call.args), {key: fresh(value) for key, value in call.kwargs.items()}


def _random(like: Tensor, shape: Sequence[int], generator: torch.Generator, flag: bool) -> Tensor:
    if like.is_complex():
        return torch.randn(tuple(shape), generator=generator, dtype=torch.complex64)
    if like.is_floating_point():
        size = math.prod(shape)
        few = torch.randn(min(size, _PERIOD), generator=generator, dtype=torch.float32)
        return few.repeat(-(-size // _PERIOD) or 1)[:size].reshape(tuple(shape))
    return torch.full(tuple(shape), flag, dtype=like.dtype)  # 1 is a valid index, and masks nothing


def _shifted(shape: Sequence[int], scale: float, generator: torch.Generator) -> Tensor:
    """A large weight whose rows overlap in memory, so that it takes almost none."""
    *head, columns = shape
    strides = [_SHIFT * math.prod(head[place + 1 :]) for place in range(len(head))]
    numbers = torch.randn(_SHIFT * (math.prod(head) - 1) + columns, generator=generator) * scale
    return numbers.as_strided(tuple(shape), (*strides, 1))


def equal(left: Any, right: Any) -> bool:
    ours, theirs = tensors_of(left), tensors_of(right)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return False
    return all(
        torch.equal(a, b) if not a.is_floating_point() else bool((a - b).abs().max() <= 1e-4 * (1 + b.abs().max()))
        for a, b in zip(ours, theirs, strict=True)
        if a.numel()
    )
