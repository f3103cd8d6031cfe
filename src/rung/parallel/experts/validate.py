"""Find the modules that hold the experts of a layer, and prove on random numbers that they can be shared out.

Such a module has parameters with a row for each expert, and is called with rows of hidden values and with the numbers
of the experts that each row has chosen, as transformers' experts are. What it does inside is its own affair: the proof
compares it with parts of itself, each with some of the experts and the rows that have chosen one of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed.torch_private import tree_leaves
from rung.errors import ModelError
from rung.parallel.forward_trace import Call

_NUM_ROWS = 24
_MANY = 2**22  # of numbers in a module: more are scaled down for the proof
_SMALL_SIZE = 8  # grouped products want rows of a multiple of 16 bytes
_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-4}

Key = int | str  # the place or the name of an argument


@dataclass(frozen=True)
class ExpertCall:
    """How the module of a layer's experts is called."""

    num_experts: int
    hidden: Key
    index: Key
    weight: Key | None  # by which the results are multiplied; it does so itself
    numbers: tuple[str, ...]  # attributes with the number of experts
    width: int  # of a row of its result
    multiplies: bool = False  # whether a weight of 0 is known to give a result of 0

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rows of hidden values, the experts of each row, and their weights."""
        hidden, index = self.hidden_values(args, kwargs), self._get(self.index, args, kwargs)
        weight = None if self.weight is None else self._get(self.weight, args, kwargs)
        num_chosen = index.shape[-1]
        rows = hidden.reshape(-1, hidden.shape[-1])
        return rows, index.reshape(-1, num_chosen), None if weight is None else weight.reshape(-1, num_chosen)

    def with_rows(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], rows: Tensor, index: Tensor, weight: Tensor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for other rows, each with one expert."""
        hidden = self.hidden_values(args, kwargs)
        own: dict[Key, Any] = {
            self.hidden: rows.reshape(*[1] * (hidden.dim() - 2), *rows.shape),
            self.index: index.unsqueeze(1),
        }
        if weight is not None and self.weight is not None:
            own[self.weight] = weight.unsqueeze(1)
        return tuple(own.get(place, arg) for place, arg in enumerate(args)), {
            name: own.get(name, arg) for name, arg in kwargs.items()
        }

    def hidden_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        found: Tensor = self._get(self.hidden, args, kwargs)
        return found

    @staticmethod
    def _get(key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return args[key] if isinstance(key, int) else kwargs[key]


def num_experts_of(module: nn.Module) -> int | None:
    """The number of experts that a module holds, if it is one that could: all parameters are its own, one row for each
    expert, one of them with matrices."""
    matrices = next((parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 3), None)
    return len(matrices) if matrices is not None and len(matrices) > 1 and not why_unlike(module) else None


def why_unlike(module: nn.Module) -> str:
    """Why a module with parameters holds no experts whose rows could be divided; empty if they could."""
    own = list(module.parameters(recurse=False))
    counts = {parameter.shape[0] if parameter.dim() > 0 else 1 for parameter in own}
    if len(counts) > 1:
        rows = ", ".join(map(str, sorted(counts)))
        return f"its parameters have not all one row for each expert (rows: {rows})"
    if len(own) != len(list(module.parameters())):
        inside = next(name for name, child in module.named_children() if any(True for _ in child.parameters()))
        return f"it has parameters in a module of its own, {inside}, which are no rows for each expert"
    buffers = ", ".join(name for name, _ in module.named_buffers())
    if buffers:
        return f"it has buffers ({buffers}); a constant can be a plain attribute, and what changes be kept outside"
    return ""


def run_part(
    module: nn.Module, parameters: Mapping[str, Tensor], call: ExpertCall, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the module's own forward with the parameters of some experts, without its hooks."""
    part = object.__new__(type(module))
    numbers = dict.fromkeys(call.numbers, len(next(iter(parameters.values()))))
    # Found before the registered parameters, which `part` has in common with the module.
    part.__dict__ = {**module.__dict__, **parameters, **numbers}
    part.__dict__.pop("forward", None)
    return part.forward(*args, **kwargs)


def part_of(num_experts: int, num_ranks: int, rank: int) -> range:
    """The experts of a rank, as `torch.chunk` divides them."""
    each = -(-num_experts // num_ranks)
    return range(min(rank * each, num_experts), min((rank + 1) * each, num_experts))


def prove(call: Call, num_ranks: int) -> ExpertCall | str:
    """How the experts of a call are shared out among `num_ranks`; or why they cannot be."""
    found = arguments_of(call)
    if isinstance(found, str):
        return found
    if len(part_of(found.num_experts, num_ranks, num_ranks - 1)) == 0:
        each = len(part_of(found.num_experts, num_ranks, 0))
        return f"its {found.num_experts} experts, {each} on a rank, leave none for the last of {num_ranks} ranks"
    # A number that equals that of the experts by chance must stay as it is.
    counts = [name for name, value in vars(call.module).items() if type(value) is int and value == found.num_experts]
    named = tuple(name for name in counts if "expert" in name)
    problem = ""
    for numbers in dict.fromkeys([named, tuple(counts), ()]):
        attempt = replace(found, numbers=numbers)
        problem = _why_wrong(attempt, call, num_ranks)
        if not problem:
            return attempt
    return problem


def weight_multiplies(found: ExpertCall, call: Call) -> ExpertCall:
    """The same, with whether a choice of weight 0 adds nothing, on random numbers."""
    if found.weight is None:
        return found
    args, kwargs = call.args, call.kwargs
    width = found.hidden_values(args, kwargs).shape[-1]
    small, divisor = _scaled_down(call.module, found.num_experts, width)
    index = torch.arange(_NUM_ROWS) % found.num_experts
    for dtype in _CLOSE:
        draw = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=dtype)
        shapes = {name: (len(p), *(size // divisor for size in p.shape[1:])) for name, p in small.named_parameters()}
        parameters = {name: draw(shape) for name, shape in shapes.items()}
        rows, weight = draw((_NUM_ROWS, width // divisor)), torch.zeros(_NUM_ROWS, dtype=dtype)
        try:
            result = run_rows(small, parameters, found, args, kwargs, rows, index, weight)
        except (NotImplementedError, RuntimeError):  # no kernel of grouped products for float64
            continue
        return replace(found, multiplies=not bool(result.any()))
    return found


def arguments_of(call: Call) -> ExpertCall | str:
    """What the arguments of a call look like, without a proof; or why they look like nothing that could be shared."""
    num_experts = num_experts_of(call.module)
    assert num_experts is not None
    named: dict[Key, Any] = dict([*enumerate(call.args), *call.kwargs.items()])
    tensors = {key: value for key, value in named.items() if isinstance(value, Tensor)}
    if len(tensors) != len([leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]):
        return "it is called with tensors inside of other arguments"
    indices = [key for key, value in tensors.items() if not value.is_floating_point() and value.dim() >= 2]
    if len(indices) != 1:
        return "it is not called with one tensor that has the numbers of the experts that each row has chosen"
    index = tensors.pop(indices[0])
    weights = [key for key, value in tensors.items() if value.shape == index.shape]
    hidden = [key for key in tensors if key not in weights]
    if len(hidden) != 1 or len(weights) > 1:
        return "it is not called with rows of hidden values, the numbers of their experts and weights for these alone"
    rows = tensors[hidden[0]]
    if rows.dim() < 2 or rows[..., 0].numel() != index[..., 0].numel():
        return "it is called with numbers of experts for other rows than those of the hidden values"
    output = call.output
    if not isinstance(output, Tensor) or output.shape[:-1] != rows.shape[:-1]:
        return "its result is not a tensor with a row for each row of the hidden values"
    return ExpertCall(num_experts, hidden[0], indices[0], weights[0] if weights else None, (), output.shape[-1])


def _why_wrong(found: ExpertCall, call: Call, num_ranks: int) -> str:
    """Why parts with some of the experts do not compute what the whole module does; empty if they do."""
    for dtype in _CLOSE:
        try:
            return _compare(found, call, num_ranks, dtype) or _compare(found, call, num_ranks, dtype, is_central=True)
        except (NotImplementedError, RuntimeError) as error:
            # Grouped products of matrices have no kernel for float64.
            problem = f"it fails on random numbers ({str(error).splitlines()[0]:.120})"
        except Exception as error:
            return f"it fails on random numbers ({type(error).__name__}: {str(error).splitlines()[0]:.120})"
    return problem


def _compare(found: ExpertCall, call: Call, num_ranks: int, dtype: torch.dtype, *, is_central: bool = False) -> str:
    """`is_central`: rows choose among experts in the middle, which are on different ranks; else the last get none."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    fake_rows, fake_index, fake_weight = found.arguments(call.args, call.kwargs)
    num_chosen = fake_index.shape[1]
    if num_chosen > found.num_experts:
        return f"each row chooses {num_chosen} of {found.num_experts} experts"
    small, scale_of = _scaled_down(call.module, found.num_experts, fake_rows.shape[1])
    parameters = {
        name: draw(p.shape[0], *(size // scale_of for size in p.shape[1:])) for name, p in small.named_parameters()
    }
    num_candidates = max(num_chosen, 2, found.num_experts - 2)
    drawn = torch.randn(_NUM_ROWS, num_candidates, generator=generator)
    index = drawn.topk(num_chosen).indices.to(fake_index.dtype)
    index += -(-(found.num_experts - num_candidates) // 2) if is_central else 0
    rows = draw(_NUM_ROWS, fake_rows.shape[1] // scale_of)
    weight = None if fake_weight is None else draw(_NUM_ROWS, num_chosen)
    hidden_dims = found.hidden_values(call.args, call.kwargs).dim()
    whole: dict[Key, Any] = {found.hidden: rows.reshape(*[1] * (hidden_dims - 2), *rows.shape), found.index: index}
    if weight is not None and found.weight is not None:
        whole[found.weight] = weight
    args = tuple(whole.get(place, arg) for place, arg in enumerate(call.args))
    kwargs = {name: whole.get(name, arg) for name, arg in call.kwargs.items()}
    leaves = [rows, *parameters.values(), *([] if weight is None else [weight])]
    with torch.enable_grad():
        for training in (True, False):
            module = copy.copy(small)
            module.__dict__ = {**small.__dict__, "training": training}
            expected = run_part(module, parameters, found, args, kwargs).reshape(_NUM_ROWS, -1)
            total = torch.zeros_like(expected)
            for rank in range(num_ranks):
                own = part_of(found.num_experts, num_ranks, rank)
                places = ((index >= own.start) & (index < own.stop)).nonzero()
                taken, chosen = places.unbind(1)
                local = {name: value[own.start : own.stop] for name, value in parameters.items()}
                total = total.index_add(
                    0, taken, run_rows(module, local, found, args, kwargs, rows[taken],
                                        index[taken, chosen] - own.start,
                                        None if weight is None else weight[taken, chosen]),
                )  # fmt: skip
            direction = torch.randn(expected.shape, generator=generator, dtype=dtype)
            names = ["its result", *(f"the gradient of {name}" for name in ("its rows", *parameters, "its weights"))]
            pairs = zip(
                [expected, *torch.autograd.grad(expected, leaves, direction)],
                [total, *torch.autograd.grad(total, leaves, direction)],
                names,
                strict=False,
            )
            for whole_value, summed, name in pairs:
                scale = whole_value.detach().abs().max().item() or 1.0
                if not (whole_value - summed).detach().abs().max().item() <= _CLOSE[dtype] * scale:
                    return f"{name} is not the sum over parts with some of the experts and their rows"
    return ""


def _scaled_down(module: nn.Module, num_experts: int, width: int) -> tuple[nn.Module, int]:
    """A large module with smaller matrices, and by what their sizes and the numbers that name them are divided.

    Random numbers for all experts of a large model, in float64 and with gradients, may not fit into memory.
    """
    sizes = {width, *(size for parameter in module.parameters() for size in parameter.shape[1:])}
    common = math.gcd(*sizes)
    if common % _SMALL_SIZE or sum(parameter.numel() for parameter in module.parameters()) <= _MANY:
        return module, 1
    divisor = common // _SMALL_SIZE
    small = copy.copy(module)
    named = {
        name: value for name, value in vars(module).items() if type(value) is int and value in sizes - {num_experts}
    }
    small.__dict__ = {**module.__dict__, **{name: value // divisor for name, value in named.items()}}
    return small, divisor


def run_rows(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    call: ExpertCall,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rows: Tensor,
    index: Tensor,
    weight: Tensor | None,
) -> Tensor:
    """The results of rows that have each chosen one of the experts in `parameters`.

    Without rows the module runs on one that counts nothing: it may not take none, and its parameters must get a
    gradient, which is 0.
    """
    num_rows = len(rows)
    if num_rows == 0:  # joined to what came, so that backward reaches it
        rows, index = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), index.new_zeros(1)
        weight = None if weight is None else torch.cat([weight, weight.new_zeros(1)])
    own_args, own_kwargs = call.with_rows(args, kwargs, rows, index, weight)
    result: Tensor = run_part(module, parameters, call, own_args, own_kwargs)
    result = result.reshape(-1, result.shape[-1])
    return result if num_rows else result[:0] + 0 * result.sum()


def refuse(problems: Mapping[str, str]) -> ModelError:
    """The error for a model without a layer whose experts can be shared out."""
    if problems:
        lines = [f"  {name}: {why}" for name, why in problems.items()]
        return ModelError(
            "\n".join(["expert parallelism cannot share out the experts of this model:", *lines, f"  {_WAY_OUT}"])
        )
    return ModelError(
        "expert parallelism shares out the experts of a layer, and finds none in this model: it looks for modules "
        "whose parameters all have a row for each expert, called with rows and the numbers of their experts, and for a "
        f"ModuleList named experts, or beside a router, whose modules are called with rows. {_WAY_OUT}"
    )


_WAY_OUT = "Use a data-parallel strategy, or tp."
