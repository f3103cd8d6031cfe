"""Runs in legs: each goes on from the checkpoint of the one before, under whatever strategy it likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rung.checkpoint import StorageTopology, restore
from rung.checkpoint.stream_place import place_of
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import open_world
from rung.errors import NonFiniteError
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.checkpointing import Checkpointing, find_state
from rung.train.loop import Outputs, Persistence, run
from rung.train.worker import dropout_seed, make_batches, make_eval_batches, position_of
from tests.harness import on_ranks


@dataclass
class Leg:
    """What a rank saw of its part of a run."""

    losses: list[float] = field(default_factory=list)
    start: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)


class Recorder:
    """Keeps what an observer is told."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.saves: list[Any] = []

    def on_start(self, facts: Any, step: int) -> None: ...
    def on_steps(self, records: Any) -> None:
        self.losses += [record.loss for record in records]

    def on_evaluation(self, record: Any) -> None:
        self.evaluations.append((record.step, record.metrics))

    def on_checkpoint(self, record: Any) -> None:
        self.saves.append(record)

    def on_ranks(self, live: Any) -> None: ...
    def on_end(self, facts: Any) -> None: ...
    def close(self) -> None: ...


def one_leg(
    make_task: Callable[[], Task],
    strategy: str,
    config: RunConfig,
    folder: str,
    until: int,
    status: StatusWriter | None = None,
) -> Leg:
    """This rank's part of a leg: from the newest checkpoint in `folder` to step `until`, which is saved there, or to
    where `status` asks it to stop. What fails in a step or an evaluation is rescued, as a rank of a run does."""
    task = make_task()
    layout = parse(strategy, environment_size(), servers=config.servers)
    with open_world(layout, device=config.device, backend=config.backend, timeout_seconds=60) as world:
        run_dir = Path(folder)
        run_dir.mkdir(parents=True, exist_ok=True)
        sites = StorageTopology(world, run_dir)
        checkpoint = find_state(run_dir, sites, resume=True)
        start = position_of(checkpoint)
        batches = make_batches(task, config, world, start_step=start.step)
        total = batches.total_steps
        runtime = build_runtime(task, world, config, total_steps=total, seeded=checkpoint is None)
        torch.manual_seed(dropout_seed(config.seed, world))
        if checkpoint is not None:
            restore(runtime, checkpoint, seed=config.seed)
        leg = replace(config, steps=until)
        place, skipped = place_of(checkpoint), start.skipped
        windows = make_batches(task, leg, world, start_step=start.step, start_place=place, skipped=skipped)
        leg = replace(leg, log_every=1, checkpoint_every=config.checkpoint_every or 10**9)
        checkpointing = Checkpointing(run_dir, runtime, sites, leg, {}, start)
        seen = Recorder()
        try:
            run(
                runtime,
                windows,
                world=world,
                config=leg,
                evaluation=(lambda: make_eval_batches(task, config, world)) if config.eval_every != "never" else None,
                outputs=Outputs([seen], status=status or StatusWriter()),
                persistence=Persistence(start, checkpointing),
            )
        except Exception as error:
            if not isinstance(error, NonFiniteError):  # `worker` does not save such a state either
                checkpointing.rescue()
            raise
        checkpointing.close()
        state = {name: value.numpy() for name, value in runtime.named_weights()}
        assert not [record.error for record in seen.saves if record.error]
        return Leg(seen.losses, start.step, state, runtime.notes, seen.evaluations)


def legs(
    make_task: Callable[[], Task], config: RunConfig, folder: Path, plan: list[tuple[str, int, int]]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run (strategy, ranks, until) after each other; the losses of all steps, and the weights in the end."""
    losses: list[float] = []
    state: dict[str, Any] = {}
    for strategy, num_ranks, until in plan:
        results = on_ranks(one_leg, num_ranks, make_task, strategy, config, str(folder), until)
        assert results[0].start == len(losses)
        losses += results[0].losses
        state = results[0].state
    return losses, {name: torch.as_tensor(value) for name, value in state.items()}
