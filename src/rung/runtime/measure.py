"""Figures of a set over all ranks: means of losses and metrics, and metrics of the whole set. Also each micro-batch's
share of a step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rung.data.batch_shard import LocalBatch, MicroBatch
from rung.data.pytree import map_tensors
from rung.data.sample_reader import example_batch
from rung.distributed.world import World
from rung.errors import TaskError
from rung.parallel.tensor.apply import whole_output
from rung.runtime.batch_loss import BatchGather
from rung.runtime.forward import call_model
from rung.runtime.set_metrics import computed, is_set_metric, merged, state_of, with_state
from rung.spec.task import Task, split_batch
from rung.spec.turns import turns_of

# Of the loss and each metric: (sum, count), or an object that has seen the samples and can `merge` and `compute`.
Measured = dict[str, Any]


def loss_weight(task: Task, micro: MicroBatch) -> Any:
    """How many units the loss of a micro-batch averages over, by the task's own count."""
    assert task.loss_weight is not None
    return 0 if micro.num_samples == 0 else task.loss_weight(split_batch(micro.data)[1])


def measure(
    task: Task,
    output: Any,
    target: Any,
    micro: MicroBatch,
    world: World,
    batch_gather: BatchGather | None = None,
    *,
    with_metrics: bool = True,
) -> Measured:
    """The loss and each metric over this rank's samples."""
    output, device = whole_output(output), world.device
    real = micro.num_samples > 0
    count = torch.tensor(float(micro.num_samples), dtype=torch.float64, device=device)
    weight = count
    if task.loss_weight is not None:
        weight = torch.as_tensor(loss_weight(task, micro), device=device).to(torch.float64).reshape(())
    if batch_gather is not None:  # all data ranks compute the same loss, and one counts it
        whole, targets = batch_gather((output, target), micro.num_global_samples)
        loss = task.loss(whole, targets).to(torch.float64)
        weight = torch.full_like(count, micro.num_global_samples if world.role.data_rank == 0 else 0)
    else:
        loss = task.loss(output, target).to(torch.float64)
    measured: Measured = {"loss": (torch.where(weight > 0, loss * weight, torch.zeros_like(loss)), weight)}
    if task.metrics is None or not with_metrics:
        return measured
    num_rows = max(micro.num_samples, 1)  # a stand-in has one row
    turns = turns_of(task.loss)
    own_names = {"loss", *(f"{turn} loss" for turn in (turns.losses if turns is not None else ()))}
    for name, value in task.metrics(output, target).items():
        if name in own_names:
            raise TaskError(f"{task.name}: metrics() may not return {name!r}, which is measured anyway. Rename it.")
        if is_set_metric(value):
            if real:
                measured[name] = value
            continue
        if isinstance(value, tuple) and len(value) == 2:
            total, units = (torch.as_tensor(v, device=device).to(torch.float64).reshape(()) for v in value)
        elif isinstance(value, Tensor) and value.dim() == 1 and value.shape[0] == num_rows:
            total, units = value.to(torch.float64).sum(), count
        else:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TaskError(
                f"{task.name}: metrics()[{name!r}] is {got} for a batch of {num_rows}. Return one number per "
                f"sample (a tensor of length {num_rows}), a pair (sum, count), or an object with merge(other) and "
                "compute() that has seen the batch."
            )
        if not real:  # a stand-in counts for nothing
            total, units = torch.zeros_like(total), torch.zeros_like(units)
        measured[name] = (total, units)
    return measured


def with_turn(earlier: Measured, turn: str | None, measured: Measured) -> Measured:
    """What a turn has measured, with the losses of earlier ones. The loss is their sum, metrics are the last turn's."""
    if turn is None:
        return measured
    total, weight = measured["loss"]
    known = {name: value for name, value in earlier.items() if name.endswith(" loss")}
    before = earlier["loss"][0] if earlier else 0
    return {**measured, **known, f"{turn} loss": (total, weight), "loss": (before + total, weight)}


def metric_names(task: Task) -> list[str] | None:
    """The names of an evaluation's figures, from a forward on the meta device; None where that fails."""
    turns = turns_of(task.loss)
    losses = ["loss"] if turns is None else ["loss", *(f"{turn} loss" for turn in turns.losses)]
    if task.eval_data is None or task.metrics is None:
        return losses
    try:
        if turns is not None:
            turns.current = losses[-1].removesuffix(" loss")  # whose output metrics get
        batch = example_batch(task.eval_data(), task.eval_collate or task.collate)
        batch = map_tensors(batch, lambda tensor: tensor.to("meta"))
        with torch.device("meta"), torch.no_grad():
            output, target = call_model(task, task.model().eval(), batch)
            return [*losses, *task.metrics(output, target)]
    except Exception:
        return None


def weighted(loss: Tensor, share: float | Tensor) -> Tensor:
    if isinstance(share, Tensor):
        # A micro-batch without a counted unit may have a mean of 0/0, and 0 * nan is nan.
        return torch.where(share > 0, loss * share.to(loss.dtype), torch.zeros_like(loss))
    return loss if share == 1.0 else loss * share


def add_measured(known: Measured, measured: Mapping[str, Any]) -> None:
    """Add what a micro-batch measured to what is known of the set."""
    for name, value in measured.items():
        if name not in known:
            known[name] = value
        elif isinstance(value, tuple):
            known[name] = known[name][0] + value[0], known[name][1] + value[1]
        else:
            known[name] = merged(name, known[name], value)


def figures_of_set(world: World, pairs: Mapping[str, tuple[float, float]], known: Measured) -> dict[str, float]:
    """The figures of the set, on every rank: from the pairs of each, as numbers, and the objects among `known`."""
    own = {name: value for name, value in known.items() if is_set_metric(value)}
    states = {name: state_of(name, value) for name, value in own.items()} if world.has_peers else {}
    rows = world.gather_objects({"pairs": pairs, "states": states})
    sums: Measured = {}
    for row in rows:
        add_measured(sums, {name: tuple(pair) for name, pair in row["pairs"].items()})
    found = {name: total / max(count, 1e-300) for name, (total, count) in sums.items()}
    for name, value in own.items():
        # In the order of the ranks on each of them: the same numbers.
        found_states = [row["states"][name] for row in rows if name in row["states"]]
        parts = [with_state(value, state, world.device) for state in found_states] or [value]
        found.update(computed(name, functools.reduce(partial(merged, name), parts)))
    names = {name for row in rows for name in row["states"]}
    if any(names - row["states"].keys() for row in rows):  # a rank without samples has no object
        for other in world.gather_objects(found):
            found.update({name: value for name, value in other.items() if name not in found})
    return dict(sorted(found.items()))


def shares_of(task: Task, world: World, window: LocalBatch) -> list[float | Tensor]:
    """Each of this rank's micro-batches' part of the global mean. Communicates if the task counts weights."""
    num_samples = max(1, window.num_global_samples)  # 0 if none of the batch could be read
    if task.loss_scope == "batch":  # each rank has the loss of the whole micro-batch, and a gradient for its own rows
        return [micro.num_global_samples / num_samples for micro in window.micro_batches]
    if task.loss_weight is None:
        return [micro.num_samples / num_samples for micro in window.micro_batches]
    weights = [loss_weight(task, micro) for micro in window.micro_batches]
    stacked = torch.stack([torch.as_tensor(w, device=world.device).to(torch.float64).reshape(()) for w in weights])
    total = stacked.sum()
    if world.layout.num_data_ranks > 1:
        dist.all_reduce(total, group=world.data_group)
    return list((stacked / total.clamp(min=torch.finfo(torch.float64).tiny)).unbind())
