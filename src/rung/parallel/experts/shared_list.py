"""Share out a list of alike experts among the ranks of the `ep` axis, each of which keeps some whole ones.

The rows of all experts of a call go to the ranks that hold these in one exchange, and the results come back in another.
Parameters keep their names; those of the other ranks' experts are absent here, as those of a pipeline's other stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rung.distributed import fake_world
from rung.distributed.collectives import gather_flat
from rung.distributed.world import World
from rung.errors import ModelError
from rung.parallel.collectives import exchange, scale_gradient
from rung.parallel.experts.loads import ExpertLoads
from rung.parallel.experts.two_passes import ListCall, Recorded, TwoPasses
from rung.parallel.experts.validate import part_of
from rung.spec.abilities import cuts_layers
from rung.spec.strategy import Layout


class SharedList:
    """The experts of one list on this rank."""

    def __init__(self, model: nn.Module, call: ListCall, world: World, loads: ExpertLoads, passes: TwoPasses) -> None:
        """`passes`: of the module that calls the list, which may call others."""
        with fake_world.outside_fakes():
            mesh = world.axis("ep")
            self.group: dist.ProcessGroup = mesh.get_group()
        _refuse_layout(call, world.layout)
        self.call, self._world, self._loads = call, world, loads
        self._parts = [part_of(call.num_experts, mesh.size(), rank) for rank in range(mesh.size())]
        self.own = self._parts[mesh.get_local_rank()]
        found = model.get_submodule(call.name)
        assert isinstance(found, nn.ModuleList)
        self.module = found
        self.is_unit = False  # once FSDP shards it
        self._called: set[int] = set()  # of this rank's experts, by any rank since the last `take_uncalled`
        self._passes = passes
        passes.add(found, call, self._compute)

    def install(self) -> None:
        """Exchange the forward of the experts and of the module that calls them, before anything else wraps it."""
        self._passes.install()
        caller, experts = self._passes.caller, self.module
        self._run = caller.forward
        caller.forward = torch.compiler.disable(lambda *args, **kwargs: experts(*args, **kwargs))  # type: ignore[no-untyped-call]

    def shard(self, apply: Callable[[nn.Module], None]) -> None:
        """Make the list a unit of FSDP, with the forward of the module that calls the experts: so FSDP gathers them
        before backward enters that module, and not within a recomputation of it."""
        run, experts = self._run, cast(nn.Module, self.module)

        class Unit(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return run(*args, **kwargs)

        class FSDPExpertList(FSDPModule, nn.ModuleList):
            forward = Unit.forward

        experts.__class__ = Unit  # not a list: torch 2.11 takes none as a unit, even one with a forward
        apply(experts)
        experts.__class__ = FSDPExpertList
        self.is_unit = True

    def is_recording(self) -> bool:
        """Whether an expert is now called with this rank's own rows, and for the first time."""
        return self._passes.is_recording

    @property
    def foreign(self) -> set[str]:
        """The names of the experts on other ranks."""
        return {f"{self.call.name}.{n}" for n in range(self.call.num_experts) if n not in self.own}

    def holder_of(self, name: str) -> int | None:
        """The rank in the group that holds a parameter, if it is one of these experts'."""
        if not name.startswith(f"{self.call.name}."):
            return None
        number = int(name.removeprefix(f"{self.call.name}.").partition(".")[0])
        return next(rank for rank, part in enumerate(self._parts) if number in part)

    def alike(self, name: str) -> str:
        """The same parameter of this rank's first expert."""
        rest = name.removeprefix(f"{self.call.name}.").partition(".")[2]
        return f"{self.call.name}.{self.own.start}.{rest}"

    def take_uncalled(self) -> set[str]:
        """The names of this rank's parameters that no rank has used in the step: an expert that is not called gets no
        gradient in one process, while here it always runs."""
        found = {
            f"{self.call.name}.{number}.{key}"
            for number in self.own
            if number not in self._called
            for key, _ in self.module[number].named_parameters()
        }
        self._called = set()
        return found

    def _compute(self, recorded: list[Recorded]) -> tuple[list[Tensor], Tensor]:
        """The results of the rows of all calls, and the tensor that has all of them."""
        call, order = self.call, sorted(range(len(recorded)), key=lambda place: recorded[place].number)
        # Also a rank without rows sends some that require a gradient, because all ranks run the exchanges of backward.
        none = torch.empty(0, call.widths[0], dtype=call.dtypes[0], device=self._world.device)
        none.requires_grad_(torch.is_grad_enabled())
        rows = torch.cat([*(recorded[place].rows.reshape(-1, call.widths[0]) for place in order), none])
        counts, counted = self._counts(recorded)
        sends = [sum(counts[self._rank][number] for number in part) for part in self._parts]
        own = [[of_rank[number] for number in self.own] for of_rank in counts]
        if not self._world.tensors.has_values:
            own = [[round(count * self._loads.planned) for count in of_rank] for of_rank in own]
        receives = [sum(of_rank) for of_rank in own]
        if self._loads.is_open:
            totals = [sum(of_rank) if is_counted else 0 for of_rank, is_counted in zip(counts, counted, strict=True)]
            mine = [
                sum(of_rank[place] for of_rank, total in zip(own, totals, strict=True) if total)
                for place in range(len(self.own))
            ]
            of_each = torch.tensor(mine, device=self._world.device)
            self._loads.add(of_each, sum(mine), sum(totals), call.num_experts)
        result = self._run_own(exchange(rows, self.group, sends, receives), own)
        back = exchange(result, self.group, receives, sends)
        results: dict[int, Tensor] = {}
        start = 0
        for place in order:
            length = recorded[place].rows[..., 0].numel()
            results[place] = back.narrow(0, start, length)
            start += length
        return [results[place] for place in range(len(recorded))], back

    @property
    def _rank(self) -> int:
        return self._parts.index(self.own)

    def _counts(self, recorded: list[Recorded]) -> tuple[list[list[int]], list[bool]]:
        """How many rows each rank has for each expert, and whether they count. A dry run takes the other ranks to have
        as many as this one."""
        numbers = [0] * self.call.num_experts  # 1 more than the rows of an expert that is called
        for one in recorded:
            numbers[one.number] = max(numbers[one.number], 1) + one.rows[..., 0].numel()
        everyone = [[*numbers, int(self._loads.counted)]] * len(self._parts)
        if self._world.tensors.has_values:
            told = torch.tensor(everyone[0], device=self._world.device)
            everyone = gather_flat(told, self.group).view(len(self._parts), -1).tolist()
        if torch.is_grad_enabled():  # a stand-in sample, whose last number is 0, calls nothing
            self._called |= {number for number in self.own if any(row[number] and row[-1] for row in everyone)}
        return [[max(number - 1, 0) for number in row[:-1]] for row in everyone], [bool(row[-1]) for row in everyone]

    def _run_own(self, rows: Tensor, counts: list[list[int]]) -> Tensor:
        """The results of rows that came from each rank for each of this rank's experts, `counts` of them."""
        call, num_own, num_ranks = self.call, len(self.own), len(self._parts)
        pieces = torch.split(rows, [count for of_rank in counts for count in of_rank])
        found: list[tuple[Tensor, ...]] = []
        for place, number in enumerate(self.own):
            lengths = [of_rank[place] for of_rank in counts]
            given = [pieces[rank * num_own + place] for rank in range(num_ranks)]
            if not any(lengths):  # all ranks that hold an expert run it, and its parameters must get a gradient, of 0
                given.append(torch.linspace(-1, 1, rows.shape[1], dtype=rows.dtype, device=rows.device).unsqueeze(0))
            with self._passes.computing():
                result = call.compute(self.module[number], scale_gradient(torch.cat(given), float(num_ranks)))
            # So that the gradients of its parameters are divided by the ranks over whose rows they are sums.
            result = scale_gradient(result, 1 / num_ranks)[: sum(lengths)]
            found.append(torch.split(result, lengths))
        return torch.cat([found[place][rank] for rank in range(num_ranks) for place in range(num_own)])


def _refuse_layout(call: ListCall, layout: Layout) -> None:
    if not call.caller and cuts_layers(layout):
        raise ModelError(
            f"the model's own forward calls the experts of {call.name}, and under {layout.name} what calls them stays "
            "whole on the ranks of a tensor group. Call them in the forward of a module of their own."
        )
    if not call.caller and layout.num_stages > 1:
        raise ModelError(
            f"the model's own forward calls the experts of {call.name}, and stages run parts of it. Call them in the "
            "forward of a module of their own."
        )
