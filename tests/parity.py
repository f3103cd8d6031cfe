"""One process, by hand: the loop that every strategy must agree with. It uses nothing of Rung but the sample order."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import default_collate

from rung.data.permutation import Permutation
from rung.distributed.torch_private import graph_breaks
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches, make_eval_batches


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    graph_breaks: list[str] = field(default_factory=list)


def by_hand(task: Task, config: RunConfig, micro: int | None = None, steps: list[list[Any]] | None = None) -> Outcome:
    """A plain loop in float64. `micro` is the size of a global micro-batch; `steps` are the samples of each step, by
    default those of a shuffled data set."""
    torch.manual_seed(config.seed)
    model = task.model().double()
    made = task.optimizer(model)
    optimizers = list(made.values()) if isinstance(made, dict) else made if isinstance(made, list) else [made]
    steps = shuffled(task, config) if steps is None else steps
    total, size = len(steps), config.batch_size
    schedules = [task.schedule(optimizer, total) for optimizer in optimizers] if task.schedule else []
    outcome = Outcome()
    weigh = task.loss_weight or len
    for samples in steps:
        pieces = [samples[i : i + (micro or size)] for i in range(0, len(samples), micro or size)]
        batches = [_double(default_collate(piece)) for piece in pieces]
        weights = [float(weigh(target)) for _, target in batches]
        model.zero_grad()
        value = 0.0
        if not samples:  # none of the batch counts
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for (inputs, target), weight in zip(batches, weights, strict=True):
            if weight > 0:
                loss = task.loss(model(inputs), target) * (weight / sum(weights))
                loss.backward()
                value += loss.item()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        values = [g.coalesce().values() if g.is_sparse else g for g in grads]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(v) for v in values]))
        if config.clip is not None and norm > config.clip:
            for grad in grads:
                grad.mul_(config.clip / (norm + 1e-6))
        outcome.losses.append(value)
        outcome.norms.append(norm.item())
        outcome.rates.append(optimizers[0].param_groups[0]["lr"])
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    with torch.no_grad():
        data = task.eval_data()
        inputs, target = _double(default_collate([data[i] for i in range(len(data))]))
        output = model(inputs)
        outcome.evaluation["loss"] = task.loss(output, target).item()
        for name, value in task.metrics(output, target).items():
            outcome.evaluation[name] = (
                value[0].double() / value[1] if isinstance(value, tuple) else value.double().mean()
            ).item()
    return outcome


def shuffled(task: Task, config: RunConfig) -> list[list[Any]]:
    """The samples of each step of a map-style data set."""
    dataset = task.train_data()
    count, size = len(dataset), config.batch_size
    per_epoch = -(-count // size)
    order = Permutation(count, config.seed, shuffle=config.shuffle is not False)
    steps = []
    for step in range(config.steps or per_epoch * (config.epochs or 1)):
        epoch, within = divmod(step, per_epoch)
        places = order.samples(epoch, within * size, min((within + 1) * size, count))
        steps.append([dataset[i] for i in places])
    return steps


def with_rung(make_task: Any, strategy: str, config: RunConfig) -> Outcome:
    """The same on this rank under a strategy. Runs inside `on_ranks`, or in one process for `single`."""
    task = make_task()
    outcome = Outcome()
    layout = parse(strategy, environment_size(), servers=config.servers)
    with open_world(layout, device=config.device, backend=config.backend, timeout_seconds=60) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
        for window in runtime.place(batches):
            result = runtime.step(window, want_norm=True)
            loss = sum(row[0] for row in world.gather(world.tensors.read([result.loss_share])))
            outcome.losses.append(loss)
            outcome.norms += world.tensors.read([result.grad_norm])
            outcome.rates.append(result.learning_rate)
        outcome.evaluation = runtime.evaluate(make_eval_batches(task, config, world))
        outcome.bytes = runtime.state_bytes()
        outcome.notes = runtime.notes
        # Through numpy: tensors would travel between processes by file descriptors that die with the rank.
        outcome.state = {name: value.numpy() for name, value in runtime.named_weights()}
    return outcome


def with_rung_traced(make_task: Any, strategy: str, config: RunConfig) -> Outcome:
    """`with_rung`, with all of torch.compile but the generated code, for which a C++ compiler takes half a minute."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # this process is the rank's own
    outcome = with_rung(make_task, strategy, config)
    outcome.graph_breaks = list(graph_breaks())
    return outcome


def largest_difference(one: Outcome, other: Outcome) -> float:
    """Over every parameter, buffer, loss, gradient norm and metric."""
    assert list(one.state) == list(other.state)
    differences = [
        abs(a - b)
        for key in ("losses", "norms", "rates")
        for a, b in zip(getattr(one, key), getattr(other, key), strict=True)
    ]
    for name, value in one.state.items():
        delta = (torch.as_tensor(value).double() - torch.as_tensor(other.state[name]).double()).abs()
        differences.append(delta.max().item() if delta.numel() else 0.0)
    for name, number in one.evaluation.items():
        differences.append(abs(number - other.evaluation[name]))
    return math.inf if any(math.isnan(value) for value in differences) else max(differences)


def _double(batch: Any) -> Any:
    return [t.double() if t.is_floating_point() else t for t in batch]
