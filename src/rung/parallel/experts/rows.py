"""How many rows each expert of a model gets, and how many choices reach none, counted where the model calls them.

Each rank counts what its own rows choose, before anything is sent, so the sums over all ranks are those of one process
under every strategy. Counts stay on the device until the figures of the step are read, and steps whose figures nobody
reads are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rung.distributed import fake_world
from rung.distributed.torch_private import tree_map_only
from rung.distributed.world import World
from rung.parallel.blocks import describe
from rung.parallel.dropout import NoDropout
from rung.parallel.experts.lists import callers_of_lists
from rung.parallel.experts.validate import ExpertCall, arguments_of, num_experts_of, prove, weight_multiplies
from rung.parallel.forward_trace import Call, tensors_of
from rung.parallel.random_proof import isolated

_FURTHER = 2  # columns of a layer after those of its experts: what is offered to it, and what is lost or empty


@dataclass(frozen=True)
class CountedRows:
    """The counts of a step on this rank: for each layer those of its experts, then `_FURTHER`; at the end whether rows
    were left out because this rank cannot tell which are its own."""

    layers: Mapping[str, tuple[int, bool]]  # the number of experts, and whether they are a list
    counts: Tensor

    def named(self, counts: Sequence[float]) -> dict[str, dict[str, Any]]:
        """What `metrics.jsonl` says of each layer, from the sums of all ranks. Layers that were not counted are left
        out."""
        found: dict[str, dict[str, Any]] = {}
        start = 0
        if counts[-1]:
            return found
        for name, (num_experts, is_list) in self.layers.items():
            rows = [int(count) for count in counts[start : start + num_experts]]
            offered, rest = (int(count) for count in counts[start + num_experts : start + num_experts + _FURTHER])
            start += num_experts + _FURTHER
            if not any(rows) and not offered:
                continue
            if not is_list:  # every choice has a number, which is an expert's or not
                found[name] = {"rows": rows, "choices": offered, "dropped": offered - sum(rows) + rest}
            else:
                found[name] = {"rows": rows, "empty": rest} | ({"rows_in": offered} if offered else {})
        return found


class RowCounter:
    """Counts rows in the calls of a model's experts, while the forward of a step runs whose figures are read."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """`model` before it is cut; its parameters may be on meta."""
        self.is_wanted = False  # the figures of this step are read
        self.is_open = False  # while the forward of a step runs: not in evaluations, nor of recomputed activations
        self.counted = True  # the runtime sets it to False while a stand-in sample passes
        self._device = world.device
        self._found: list[tuple[str, list[tuple[int, Tensor | float]]]] = []
        is_on = world.tensors.has_values and not world.layout.servers  # which take no part in a step
        self._layout, self._rank = world.layout, world.rank
        self._is_even: Callable[[], bool | None] = lambda: None
        self._is_partial = False
        self._lists = callers_of_lists(model) if is_on else {}
        # The modules as they are now: the proof of how one is called needs its whole shapes.
        self._whole: dict[str, nn.Module] = {}
        self._calls: dict[str, ExpertCall | str] = {}
        self._unproven: dict[str, Call] = {}
        self.layers: dict[str, tuple[int, bool]] = {}
        for name, module in model.named_modules():
            if not is_on or type(module).__module__.startswith("torch."):
                continue
            if (num_experts := num_experts_of(module)) is not None:
                self._whole[name] = whole = object.__new__(type(module))
                shapes = {key: nn.Parameter(_shape_of(p)) for key, p in module.named_parameters(recurse=False)}
                whole.__dict__ = {**module.__dict__, "_parameters": shapes}
                self.layers[name] = (num_experts, False)
        # Without a trace only its name tells a list of experts from one of layers.
        self._lists = {name: caller for name, caller in self._lists.items() if "expert" in name.rpartition(".")[2]}
        self.layers |= {name: (len(list(model.get_submodule(name).children())), True) for name in self._lists}

    def install(
        self,
        model: nn.Module,
        is_recording: Mapping[str, Callable[[], bool]],
        is_even: Callable[[], bool | None] | None = None,
    ) -> None:
        """Watch the calls. `is_recording`: of lists whose experts are called several times for each row, whether this
        is the call that counts. `is_even`: whether no rank has a position of a sequence that another has, too; None
        where sequences are whole."""
        if self._layout.coordinates(self._rank)["tp"] > 0:
            return  # ranks of a tensor group have the same rows, and the first counts
        self._is_even = is_even or self._is_even
        for name, (num_experts, is_list) in self.layers.items():
            module = model.get_submodule(name)
            if not is_list:
                self._watch(module, self._count_choices(name))
                continue
            records = is_recording.get(name, lambda: True)
            for number, expert in enumerate(module.children()):
                self._watch(expert, self._count_rows(name, number, num_experts, records))
            self._watch(model.get_submodule(self._lists[name]), self._count_offered(name, num_experts))

    def take(self) -> CountedRows | None:
        """The counts since the last call; None if they were not wanted."""
        self._prove()
        found, self._found = self._found, []
        if not self.is_wanted or not self.layers:
            return None
        starts, width = {}, 0
        for name, (num_experts, _) in self.layers.items():
            starts[name], width = width, width + num_experts + _FURTHER
        total = torch.zeros(width + 1, dtype=torch.float64)
        total[width], self._is_partial = float(self._is_partial), False
        places: list[int] = []
        numbers: list[Tensor] = []
        on_device = torch.zeros_like(total, device=self._device)
        for name, entries in found:
            num_experts, is_list = self.layers[name]
            call = self._calls.get(name)
            for column, number in entries:
                if not is_list and (not isinstance(call, ExpertCall) or (column > num_experts and not call.multiplies)):
                    continue  # the proof has failed
                place = starts[name] + column
                if not isinstance(number, Tensor):
                    total[place] += number
                elif number.dim() == 0:
                    places.append(place)
                    numbers.append(number.to(self._device))
                else:
                    on_device[place : place + len(number)] += number.to(self._device)
        if places:
            on_device.index_add_(0, self._sent(torch.tensor(places)), torch.stack(numbers).to(torch.float64))
        return CountedRows(self.layers, on_device + self._sent(total))

    def _sent(self, tensor: Tensor) -> Tensor:
        """On the device, without waiting for it: from memory that is not pinned the copy would."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    # -- what the calls count --------------------------------------------------------------------------------------

    def _watch(self, module: nn.Module, count: Callable[..., None]) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            is_on = self.is_wanted and self.is_open and self.counted
            if is_on and not any(map(fake_world.is_fake, tensors_of(output))) and self._are_own():
                with torch.no_grad():
                    count(args, kwargs, output)

        module.register_forward_hook(torch.compiler.disable(hook), with_kwargs=True)  # type: ignore[no-untyped-call]

    def _are_own(self) -> bool:
        """Whether the rows of a call are counted on this rank, of those that share samples."""
        is_even = self._is_even()
        if is_even is None:
            return self._layout.is_first_of_samples(self._rank)
        self._is_partial = self._is_partial or not is_even
        return is_even

    def _count_choices(self, name: str) -> Callable[..., None]:
        """Of experts that are one module, called with the numbers that rows have chosen."""

        def count(args: Any, kwargs: Any, output: Any) -> None:
            if name not in self._calls:
                args_, kwargs_, output_ = tree_map_only(Tensor, _shape_of, (args, kwargs, output))
                self._unproven[name] = example = Call(0, name, self._whole[name], args_, kwargs_, output_)
                self._calls[name] = arguments_of(example)
            call = self._calls[name]
            if isinstance(call, str):
                return
            _, index, weight = call.arguments(args, kwargs)
            num_experts = call.num_experts
            chosen = index.detach().flatten().to(torch.int64)
            is_known = (chosen >= 0) & (chosen < num_experts)
            # One place more, for what is no expert's number. A sum into known places: `bincount` waits for the device.
            rows = chosen.new_zeros(num_experts + 1).scatter_add_(
                0, torch.where(is_known, chosen, num_experts), torch.ones_like(chosen)
            )
            entries: list[tuple[int, Tensor | float]] = [(0, rows[:num_experts]), (num_experts, chosen.numel())]
            if weight is not None:
                entries.append((num_experts + 1, ((weight.detach().flatten() == 0) & is_known).sum()))
            self._found.append((name, entries))

        return count

    def _count_rows(
        self, name: str, number: int, num_experts: int, is_recording: Callable[[], bool]
    ) -> Callable[..., None]:
        """Of one expert of a list."""

        def count(args: Any, kwargs: Any, output: Any) -> None:
            rows = _rows_of(args, kwargs)
            if rows is None or not is_recording():
                return
            taken = (rows.detach() != 0).any(-1).sum()  # others are places of a capacity that no row has taken
            self._found.append((name, [(number, taken), (num_experts + 1, _num_rows(rows) - taken)]))

        return count

    def _count_offered(self, name: str, num_experts: int) -> Callable[..., None]:
        """Rows with which the module that calls the experts of a list is called."""

        def count(args: Any, kwargs: Any, output: Any) -> None:
            rows = _rows_of(args, kwargs)
            if rows is not None:
                self._found.append((name, [(num_experts, _num_rows(rows))]))

        return count

    def _prove(self) -> None:
        """Prove what the arguments of calls mean, as for `ep`. Not in the forward pass, where operations of the proof
        could be taken for the model's own."""
        proven: dict[Any, ExpertCall | str] = {}
        for name, call in self._unproven.items():
            found, key = self._calls[name], (describe(call.module), len(call.args), *call.kwargs)
            if not isinstance(found, str) and key not in proven:
                with isolated(), NoDropout():  # the model goes on with the random numbers that it would have drawn
                    found = prove(call, 2)
                    proven[key] = found if isinstance(found, str) else weight_multiplies(found, call)
            self._calls[name] = proven.get(key, found)
        self._unproven = {}


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _rows_of(args: Any, kwargs: Any) -> Tensor | None:
    """The only tensor of rows among arguments."""
    found = [tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point() and tensor.dim() >= 2]
    return found[0] if len(found) == 1 else None


def _num_rows(rows: Tensor) -> int:
    return math.prod(rows.shape[:-1])
