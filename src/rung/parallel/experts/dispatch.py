"""Share out the experts of a layer among the ranks of the `ep` axis.

Each rank keeps the rows of its own experts of every parameter. In forward a rank sends each row of hidden values to the
ranks of the experts that the row has chosen, once for each, computes what it was sent, and sends the results back. The
gradients of experts are thereby the sums over the rows of all these ranks. Those of other parameters are averaged over
the data ranks, so they are divided by the number of ranks; along the rest of the data axis FSDP averages them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rung.distributed import fake_world
from rung.distributed.torch_private import assert_async
from rung.distributed.world import World
from rung.parallel.blocks import fold
from rung.parallel.collectives import exchange, scale_gradient
from rung.parallel.experts.lists import callers_of_lists
from rung.parallel.experts.loads import ExpertLoads
from rung.parallel.experts.shared_list import SharedList
from rung.parallel.experts.two_passes import ListCall, TwoPasses
from rung.parallel.experts.validate import ExpertCall, num_experts_of, part_of, prove, refuse, run_rows, why_unlike
from rung.parallel.forward_tracer import ForwardTracer
from rung.parallel.pipeline.partition import lies_in
from rung.system.units import plural


@dataclass
class ExpertPlan:
    """How the modules that hold experts are called, by name, and lists of experts."""

    calls: dict[str, ExpertCall]
    notes: list[str] = field(default_factory=list)
    loads: ExpertLoads = field(default_factory=ExpertLoads)
    lists: list[SharedList] = field(default_factory=list)

    @property
    def foreign(self) -> set[str]:
        """The modules of lists that other ranks of the group hold."""
        return set().union(*(one.foreign for one in self.lists))

    def is_inside(self, name: str) -> bool:
        """Whether a module lies within experts, or within the module that calls those of a list: it is no unit."""
        callers = {one.call.caller for one in self.lists}
        return lies_in(name, set(self.calls)) or any(
            name != one and (not one or lies_in(name, {one})) for one in callers
        )

    def share_of(self, name: str) -> SharedList | None:
        """The list that a parameter belongs to."""
        return next((one for one in self.lists if one.holder_of(name) is not None), None)

    def take_uncalled(self) -> set[str]:
        return set().union(*(one.take_uncalled() for one in self.lists))

    def within(self, prefix: str, module: nn.Module) -> list[tuple[nn.Module, ExpertCall]]:
        """The modules with experts that are not yet shared out, at or below `module`, whose name is `prefix`."""
        named = dict(module.named_modules(prefix=prefix))
        found = [(named[name], call) for name, call in self.calls.items() if name in named]
        return [(one, call) for one, call in found if not any(isinstance(p, DTensor) for p in one.parameters())]


def find_experts(tracer: ForwardTracer, num_ranks: int, example: Any) -> dict[str, ExpertCall | str]:
    """The modules that hold experts, and how each is called, or why ranks cannot share its experts."""
    names = {name for name, module in tracer.meta_model.named_modules() if num_experts_of(module) is not None}
    deciding = {*names, *callers_of_lists(tracer.meta_model).values()}
    trace = tracer.watch(
        example, lambda name, _: name in names, lambda name, module: name in deciding or tracer.is_part(name, module)
    )
    with fake_world.outside_fakes():
        return {call.name: prove(call, num_ranks) for call in trace.calls}


def plan_experts(
    found: Mapping[str, ExpertCall | str],
    lists: Mapping[str, ListCall | str],
    model: nn.Module,
    world: World,
    planned: float,
) -> ExpertPlan:
    """Share out all experts that can be."""
    calls = {name: call for name, call in found.items() if isinstance(call, ExpertCall)}
    called = {name: call for name, call in lists.items() if isinstance(call, ListCall)}
    left = {fold([n])[0]: why for n, why in {**_unlike(model), **found, **lists}.items() if isinstance(why, str)}
    if not calls and not called:
        raise refuse(left)
    counts = {call.num_experts for call in calls.values()} | {call.num_experts for call in called.values()}
    names = [*calls, *called]
    notes = [
        f"expert parallel: {plural(len(names), 'layer')} with {' or '.join(map(str, sorted(counts)))} experts shared "
        f"out among {world.layout.ep} ranks: {', '.join(fold(names))}"
    ]
    notes += [f"expert parallel: {name} is left whole: {why}" for name, why in left.items()]
    plan = ExpertPlan(calls, notes, ExpertLoads(planned))
    passes = {name: TwoPasses(model.get_submodule(name)) for name in {call.caller for call in called.values()}}
    plan.lists = [SharedList(model, call, world, plan.loads, passes[call.caller]) for call in called.values()]
    return plan


def _unlike(model: nn.Module) -> dict[str, str]:
    """Modules that are named as experts and are none that could be shared out, and why."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if "expert" not in name.rpartition(".")[2]:
            continue
        own = list(module.parameters(recurse=False))
        if isinstance(module, nn.ModuleDict):
            found[name] = "it is a ModuleDict; experts in a ModuleList can be shared out"
        elif any(parameter.dim() == 3 for parameter in own) and (why := why_unlike(module)):
            found[name] = why
    return found


def share_out(module: nn.Module, call: ExpertCall, world: World, loads: ExpertLoads) -> None:
    """Keep this rank's experts of a module, and send rows to the ranks of theirs in its forward."""
    with fake_world.outside_fakes():
        mesh = world.axis("ep")
        group, rank = mesh.get_group(), mesh.get_local_rank()
    num_ranks = mesh.size()
    own = part_of(call.num_experts, num_ranks, rank)
    for name, whole in list(module.named_parameters()):
        part = whole.detach()[own.start : own.stop].clone(memory_format=torch.contiguous_format)
        cut = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.contiguous().stride()
        )
        parameter = nn.Parameter(cut, requires_grad=whole.requires_grad)
        parameter.__dict__.update(vars(whole))  # attributes that the task set on its parameter
        module.register_parameter(name, parameter)
    bare = copy.copy(module)  # FSDP changes the module's class
    planned = None if world.tensors.has_values else loads.planned
    sender = _Sender(call.num_experts, group, own, planned)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden = call.hidden_values(args, kwargs)
        rows, index, weight = call.arguments(args, kwargs)
        sent = sender.send(rows, index, weight, counted=loads.counted)
        if loads.is_open:
            parts = torch.split(sent.index, sent.receives)
            choices = torch.cat(
                [part for part, total in zip(parts, sent.totals, strict=True) if total] or [parts[0][:0]]
            )
            loads.add(torch.bincount(choices, minlength=len(own)), len(choices), sum(sent.totals), call.num_experts)
        local: dict[str, Tensor] = {
            name: scale_gradient(p.to_local(), 1 / num_ranks)  # type: ignore[attr-defined]
            for name, p in module.named_parameters()
        }
        bare.training = module.training
        result = run_rows(bare, local, call, args, kwargs, sent.rows, sent.index, sent.weight)
        whole = sent.bring_back(result)
        # FSDP wants no view of another tensor, as code that adds to it in place would take its hooks away.
        return whole if hidden.dim() == 2 else whole.reshape(*hidden.shape[:-1], -1).clone()

    module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Sent:
    """Rows that came to this rank's experts, and how their results go back."""

    rows: Tensor
    index: Tensor  # among this rank's experts
    weight: Tensor | None
    source: Tensor  # this rank's rows in the order in which it sent them
    num_rows: int
    sends: list[int]
    receives: list[int]
    totals: list[int]  # choices of each rank that count
    group: dist.ProcessGroup

    def bring_back(self, result: Tensor) -> Tensor:
        back = exchange(result, self.group, self.receives, self.sends)
        return back.new_zeros(self.num_rows, back.shape[1]).index_add(0, self.source, back)


class _Sender:
    def __init__(self, num_experts: int, group: dist.ProcessGroup, own: range, planned: float | None) -> None:
        """`planned`: how much more rows come than of an even choice, in a dry run, which has no values."""
        self._num_experts, self._group, self._own, self._planned = num_experts, group, own, planned
        size = dist.get_world_size(group)
        self._ends = [part_of(num_experts, size, rank).stop for rank in range(size)]

    def send(self, rows: Tensor, index: Tensor, weight: Tensor | None, *, counted: bool) -> _Sent:
        chosen = index.flatten()
        in_range = ((chosen >= 0) & (chosen < self._num_experts)).all()
        assert_async(in_range, f"the number of an expert is not in [0, {self._num_experts})")
        order = torch.argsort(chosen, stable=True)  # by expert, and so by rank
        source = order // index.shape[1]
        sends, receives, totals = self._counts(chosen, counted=counted)
        group = self._group
        came = exchange(rows[source], group, sends, receives)
        weights = None if weight is None else exchange(weight.flatten()[order], group, sends, receives)
        numbers = exchange(chosen[order], group, sends, receives) - self._own.start
        if self._planned is not None:
            numbers = torch.arange(len(numbers), device=numbers.device) % len(self._own)
        return _Sent(came, numbers, weights, source, len(rows), sends, receives, totals, group)

    def _counts(self, chosen: Tensor, *, counted: bool) -> list[list[int]]:
        """How many rows go to each rank, how many come from it, and how many choices it has that count."""
        if self._planned is not None:
            even = [len(part) for part in torch.empty(len(chosen), device="meta").tensor_split(len(self._ends))]
            come = [min(round(count * self._planned), len(chosen)) for count in even]
            return [even, come, [len(chosen)] * len(even)]
        bounds = torch.tensor([*self._ends[:-1]], device=chosen.device)
        to = torch.bucketize(chosen, bounds, right=True)
        sends = torch.bincount(to, minlength=len(self._ends))
        told = torch.stack([sends, torch.full_like(sends, len(chosen) if counted else 0)], dim=1)
        received = torch.empty_like(told)
        dist.all_to_all_single(received, told, group=self._group)
        found: list[list[int]] = torch.cat([sends.unsqueeze(1), received], dim=1).T.tolist()
        return found
