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
from rung.parallel.collectives import exchange
from rung.parallel.experts.validate import ExpertCall, num_experts_of, part_of, prove, refuse, run_rows
from rung.parallel.forward_trace import trace_forward
from rung.parallel.forward_tracer import ForwardTracer
from rung.system.units import plural


class ExpertLoads:
    """How unevenly rows choose experts, in the training steps since the last `take`: the rows of the busiest expert of
    this rank, and of the rank, over those of an even choice, in the most uneven call."""

    def __init__(self) -> None:
        self.is_open = False  # while the forward of a step runs: not in evaluations, nor of recomputed activations
        self.counted = True  # the runtime sets it to False while a stand-in sample passes
        self._expert: Tensor | None = None
        self._rank = 0.0

    def add(self, index: Tensor, receives: list[int], num_own: int, totals: list[int], num_experts: int) -> None:
        """Count the choices that came to this rank's experts: `receives` from each rank, of its `totals`, which are 0
        for a stand-in sample."""
        even = sum(totals) / num_experts
        if even == 0:
            return
        counted = [part for part, total in zip(torch.split(index, receives), totals, strict=True) if total]
        choices = torch.cat(counted)
        most = torch.bincount(choices, minlength=num_own).max().to(torch.float64) / even
        self._expert = most if self._expert is None else torch.maximum(self._expert, most)
        self._rank = max(self._rank, len(choices) / (even * num_own))

    def take(self) -> dict[str, Tensor | float]:
        """Figures of which the largest over all ranks counts."""
        if self._expert is None:
            return {}
        found: dict[str, Tensor | float] = {"expert_load_max": self._expert, "expert_rank_load_max": self._rank}
        self._expert, self._rank = None, 0.0
        return found


@dataclass
class ExpertPlan:
    """How the modules that hold experts are called, by name."""

    calls: dict[str, ExpertCall]
    notes: list[str] = field(default_factory=list)
    loads: ExpertLoads = field(default_factory=ExpertLoads)

    def within(self, prefix: str, module: nn.Module) -> list[tuple[nn.Module, ExpertCall]]:
        """The modules with experts that are not yet shared out, at or below `module`, whose name is `prefix`."""
        named = dict(module.named_modules(prefix=prefix))
        found = [(named[name], call) for name, call in self.calls.items() if name in named]
        return [(one, call) for one, call in found if not any(isinstance(p, DTensor) for p in one.parameters())]


def find_experts(tracer: ForwardTracer, num_ranks: int, example: Any) -> dict[str, ExpertCall | str]:
    """The modules that hold experts, and how each is called, or why ranks cannot share its experts."""
    names = {name for name, module in tracer.meta_model.named_modules() if num_experts_of(module) is not None}
    tracer.meta_model.train()
    trace = trace_forward(
        tracer.meta_model,
        tracer.run(example),
        lambda name, _: name in names,
        device=tracer.device,
        mode=tracer.mode,
        parameter_dtype=tracer.parameter_dtype,
        may_decide=lambda name, module: name in names or tracer.is_part(name, module),
    )
    with fake_world.outside_fakes():
        return {call.name: prove(call, num_ranks) for call in trace.calls}


def plan_experts(found: Mapping[str, ExpertCall | str], model: nn.Module, world: World) -> ExpertPlan:
    """Share out all experts that can be."""
    calls = {name: call for name, call in found.items() if isinstance(call, ExpertCall)}
    if not calls:
        raise refuse({fold([name])[0]: why for name, why in found.items() if isinstance(why, str)}, model)
    counts = {call.num_experts for call in calls.values()}
    notes = [
        f"expert parallel: {plural(len(calls), 'layer')} with {' or '.join(map(str, sorted(counts)))} experts shared "
        f"out among {world.layout.ep} ranks: {', '.join(fold(calls))}"
    ]
    left = {fold([name])[0]: why for name, why in found.items() if isinstance(why, str)}
    notes += [f"expert parallel: {name} is left whole: {why}" for name, why in left.items()]
    return ExpertPlan(calls, notes)


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
    sender = _Sender(call.num_experts, group, own, has_values=world.tensors.has_values)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden = call.hidden_values(args, kwargs)
        rows, index, weight = call.arguments(args, kwargs)
        sent = sender.send(rows, index, weight, counted=loads.counted)
        if loads.is_open:
            loads.add(sent.index, sent.receives, len(own), sent.totals, call.num_experts)
        local: dict[str, Tensor] = {
            name: _AveragedGradient.apply(p.to_local(), num_ranks)  # type: ignore[attr-defined, no-untyped-call]
            for name, p in module.named_parameters()
        }
        bare.training = module.training
        result = run_rows(bare, local, call, args, kwargs, sent.rows, sent.index, sent.weight)
        whole = sent.bring_back(result)
        # FSDP wants no view of another tensor, as code that adds to it in place would take its hooks away.
        return whole if hidden.dim() == 2 else whole.reshape(*hidden.shape[:-1], -1).clone()

    module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


class _AveragedGradient(torch.autograd.Function):
    """A parameter whose gradient is divided by a number of ranks. FSDP's own factor is applied twice where it reduces
    over one rank in float64 (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient / ctx.num_ranks, None


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
    def __init__(self, num_experts: int, group: dist.ProcessGroup, own: range, *, has_values: bool) -> None:
        self._num_experts, self._group, self._own, self._has_values = num_experts, group, own, has_values
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
        if not self._has_values:
            numbers = torch.arange(len(numbers), device=numbers.device) % len(self._own)
        return _Sent(came, numbers, weights, source, len(rows), sends, receives, totals, group)

    def _counts(self, chosen: Tensor, *, counted: bool) -> list[list[int]]:
        """How many rows go to each rank, how many come from it, and how many choices it has that count. A dry run,
        without values, takes them to be even."""
        if not self._has_values:
            even = [len(part) for part in torch.empty(len(chosen), device="meta").tensor_split(len(self._ends))]
            return [even, even, [len(chosen)] * len(even)]
        bounds = torch.tensor([*self._ends[:-1]], device=chosen.device)
        to = torch.bucketize(chosen, bounds, right=True)
        sends = torch.bincount(to, minlength=len(self._ends))
        told = torch.stack([sends, torch.full_like(sends, len(chosen) if counted else 0)], dim=1)
        received = torch.empty_like(told)
        dist.all_to_all_single(received, told, group=self._group)
        found: list[list[int]] = torch.cat([sends.unsqueeze(1), received], dim=1).T.tolist()
        return found
