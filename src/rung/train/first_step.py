"""The check before the first step of a run with several ranks: loss and gradients against those of one process.

The main rank computes a few samples alone, with the weights of the run, through the runtime of one process
(`one_process.py`); then all ranks compute them together, without dropout and without an update. If the whole model does
not fit on the main rank's device, the blocks stay in host memory and come to the device one at a time.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rung.checkpoint.state import extra_state
from rung.data.bad_samples import BadSamples
from rung.data.batch_shard import BatchPartition, LocalBatch
from rung.data.batches import Batches
from rung.data.pytree import tensors_in
from rung.data.rng import DeviceGenerators
from rung.distributed.world import World
from rung.errors import DataError, ModelError, RungError, TaskError
from rung.parallel.checksums import own_part
from rung.parallel.combined_optimizer import steps_one_at_a_time
from rung.parallel.materialize import is_absent
from rung.runtime import Runtime
from rung.runtime.base import Probe
from rung.spec.abilities import can
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.one_process import (
    CommunicatesError,
    Figures,
    Reference,
    Room,
    Samples,
    differences,
    largest,
    numbers_of,
    relative,
    tolerances_of,
)
from rung.train.same_windows import bad_samples_of

log = logging.getLogger("rung")

_SUSPECT = 2**-8  # a difference of the loss that asks for a closer look; of the gradients, four times that
_WAY_OUT = "--no-check trains in spite of it."


def check_first_step(runtime: Runtime, task: Task, config: RunConfig, batches: Batches) -> None:
    """Compare this run's loss and gradients with those of one process, and log the difference. All ranks call it.

    Raises the cause if they differ: the loss is no mean over samples, ranks read other samples, or the strategy
    computes something else.
    """
    world = runtime.world
    if not config.check or not world.has_peers or not can(world.layout, "check"):
        return
    room = Room.of(runtime, config) if world.is_main else None
    reason = world.gather_objects(room.why_not if room is not None else None)[0]
    if reason is not None:
        log.info("  first step not compared with one process: %s", reason)
        return
    samples = Samples(task, config, world.layout, batches)
    reference = None
    with _kept_generators(world.device):
        if room is not None:
            experts = runtime.parallel.experts
            skips = experts is not None and bool(experts.lists)
            reference = Reference(task, config, world.device, samples, room, skips_experts=skips)
        _send_weights(runtime, reference)
        changed = world.gather_objects(reference.find_changed_parameters() if reference is not None else [])[0]
        if changed:
            _send_weights(runtime, reference)  # as they were
    ours = _probe(runtime, samples, changed, bad_samples_of(config, world))
    found = None
    if reference is not None:
        with _kept_generators(world.device):
            judged = _compare(reference, ours)
            divides = runtime.parallel.divides_updates
            if not judged.kind and (divides or steps_one_at_a_time(runtime.optimizer)):
                name = reference.find_coupled_update(of_whole_parameters=not divides)
                judged = judged if name is None else _coupled(name, world.layout.name, divides=divides)
            found = asdict(judged)
    verdict = _Verdict(**world.gather_objects(found)[0])
    if verdict.kind == "model":
        _refuse_other_samples(world.gather_objects(_digest(next(iter(samples.whole())))))
    if verdict.kind:
        raise _ERRORS[verdict.kind](verdict.text)
    log.info("  first step %s", verdict.text)


def _send_weights(runtime: Runtime, reference: Reference | None) -> None:
    """Give the reference, on the main rank, the weights of the run and what modules keep beside them."""
    try:
        own = extra_state(runtime)
    except RungError:  # it cannot be saved, either, which is told where it matters
        own = {}
    extra: dict[str, Any] = {}
    for found in reversed(runtime.world.gather_objects(own)):
        extra |= found
    if reference is None:
        deque(runtime.named_weights(), maxlen=0)
    else:
        reference.load(runtime.named_weights(), extra)


def _probe(runtime: Runtime, samples: Samples, changed: list[str], bad_samples: BadSamples | None) -> Figures:
    """The figures of this run. Parameters that forward changes are put back."""
    world = runtime.world
    named = dict(runtime.model.named_parameters())
    own = [named[name] for name in changed if name in named and not is_absent(named[name])]
    kept = [own_part(parameter).clone() for parameter in own]
    window = next(iter(runtime.place(samples.of_rank(world.role.data_rank, bad_samples))))
    figures = _over_ranks(world, runtime.probe(window))
    if changed:
        weights = ((name, value) for name, value in runtime.named_weights() if name in changed and world.is_main)
        after = {name: value.double().clone() for name, value in weights}
        figures = replace(figures, after=after)
        for parameter, value in zip(own, kept, strict=True):
            own_part(parameter).copy_(value)
    return figures


@contextlib.contextmanager
def _kept_generators(device: torch.device) -> Iterator[None]:
    generators = DeviceGenerators(device)
    try:
        yield
    finally:
        generators.restore()


def collate_draws(task: Task, config: RunConfig) -> bool:
    return _first_samples(task, config).collate_draws


def draws_random_numbers(task: Task, config: RunConfig, *, of_any_use: bool = False) -> bool:
    """Whether forward or loss draws random numbers, dropout aside: whether the first step depends on the seed, or, with
    `of_any_use`, whether they draw at all, as a router does whose noise seldom changes a choice."""
    reference = Reference(task, config, torch.device("cpu"), _first_samples(task, config))
    try:
        tolerances = tolerances_of(reference.config)
        first = reference.figures(seed=1)
        return reference.draws if of_any_use else bool(differences(first, reference.figures(seed=2), tolerances))
    except Exception:
        return False


def _first_samples(task: Task, config: RunConfig) -> Samples:
    cut = BatchPartition(config.batch_size, 1, 0, config.micro_batch)
    batches = Batches(task.train_data(), cut, seed=config.seed, collate=task.collate)
    return Samples(task, config, parse("single", 1), batches)


@dataclass(frozen=True)
class _Verdict:
    """What the main rank found, for all ranks."""

    text: str
    kind: str = ""  # of the error, if it is one


_ERRORS: dict[str, type[RungError]] = {"task": TaskError, "model": ModelError}


def _compare(reference: Reference, ours: Figures) -> _Verdict:
    try:
        tolerances = tolerances_of(reference.config)
        at_once = reference.figures_at_once()
        # Micro-batches and ranks that give the loss of all samples together also show that it is a mean over them.
        if at_once is not None and not differences(ours, at_once, tolerances):
            # What rounding in half precision could explain may be a mean over something else as well.
            is_suspect = relative(ours.loss, at_once.loss) > _SUSPECT or largest(ours, at_once) > 4 * _SUSPECT
            if is_suspect and (found := reference.exact_means()) is not None:
                return _not_a_mean(*found)
            return _Verdict(f"equals one process to {largest(ours, at_once):.0e}")
        alone = reference.figures()
        apart = {name: off for name, off in reference.changes_apart(ours).items() if not off <= tolerances[2]}
        if apart:
            return _changed_otherwise(apart)
        if not math.isfinite(alone.loss):
            return _Verdict(f"not compared with one process, whose loss is {alone.loss}")
        if alone.norm is not None and not math.isfinite(alone.norm):
            return _Verdict(f"not compared with one process, whose gradient norm is {alone.norm}")
        different = differences(ours, alone, tolerances)
        # If the ranks' parts of a micro-batch give its loss, halves would too.
        is_cut = reference.num_ranks > 1 and not different
        halves = alone if is_cut or reference.is_of_micro_batch() else reference.figures("halves")
        is_mean = not differences(replace(halves, squares=None), alone, tolerances)
        if is_mean and not different:
            return _Verdict(f"equals one process to {largest(ours, alone):.0e}{reference.manner}")
        # Parameters that forward changes go on changing, with any seed.
        is_repeatable = reference.changes_parameters or not differences(
            reference.figures(seed=1), reference.figures(seed=2), tolerances
        )
        if not is_repeatable:
            return _Verdict("not compared with one process: forward or loss draws random numbers")
        if not is_mean:
            return _not_a_mean(alone.loss, halves.loss)
        if _is_rounding(reference, ours, alone):
            worst = largest(ours, alone)
            return _Verdict(f"equals one process to {worst:.0e}, as far as {reference.config.precision} goes")
        return _something_else(different, draws=reference.draws)
    except CommunicatesError:
        return _Verdict("not compared with one process: the model communicates by itself")
    except Exception as error:
        text = str(error).splitlines()
        return _Verdict(
            f"not compared with one process, which fails: {type(error).__name__}: {text[0] if text else ''}"
        )


def _is_rounding(reference: Reference, ours: Figures, alone: Figures) -> bool:
    """Whether one process is as far from its own result in fp64."""
    try:
        exact = reference.exact_figures()
    except Exception:  # an operation without a kernel for fp64
        return False
    return largest(ours, exact) <= 10 * largest(alone, exact)


def _not_a_mean(whole: float, halves: float) -> _Verdict:
    text = (
        f"the loss is no mean over samples: of the first samples it is {whole:.6g}, and the mean over their halves is "
        f"{halves:.6g}. Ranks and micro-batches compute it on parts of the batch, so this run would train something "
        "else than one process. Return the mean over the samples; with a mean over other units (tokens, say), define "
        f"loss_weight(target), their number. {_WAY_OUT}"
    )
    return _Verdict(text, "task")


def _refuse_other_samples(digests: list[list[float]]) -> None:
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise DataError(
            f"ranks 0 and {other} read different data where they should read the same. Rung divides the samples among "
            "the ranks: let the data set give all of them on every rank, in the same order, and not divide them by "
            f"RANK or WORLD_SIZE itself. {_WAY_OUT}"
        )


def _changed_otherwise(apart: Mapping[str, float]) -> _Verdict:
    name = max(apart, key=lambda name: apart[name])
    text = (
        f"forward changes the parameter {name}, and not as one process does (off by {apart[name]:.2g} of the change). "
        "Each rank changes its own copy, from its own samples, and a change of gathered weights or of a server's is "
        "lost. Keep such values in a buffer, or change them in a hook of the optimizer (register_step_post_hook). "
        f"{_WAY_OUT}"
    )
    return _Verdict(text, "model")


def _coupled(name: str, strategy: str, *, divides: bool) -> _Verdict:
    why = "several ranks update different parameters, and each optimizer sees its own alone"
    other = "whose ranks update all parameters, such as ddp or zero3"
    if not divides:
        why, other = "it gets whole parameters, one at a time", "that leaves parameters whole, such as ddp"
    text = (
        f"the optimizer's update of {name} depends on gradients of other parameters. Under {strategy} {why}, so this "
        "run would train something else. Clip by the setting `clip`, which takes the norm over all ranks, or use a "
        f"strategy {other}. {_WAY_OUT}"
    )
    return _Verdict(text, "task")


def _something_else(different: list[str], *, draws: bool) -> _Verdict:
    noise = (
        " Forward or loss draws random numbers, and each rank draws its own: they may be the reason, although two "
        "seeds gave the same."
    )
    text = (
        "the first step is not that of one process: " + "; ".join(different[:4]) + ". This run would train something "
        f"else.{noise if draws else ''} `rung verify` tries other strategies on this task; one process (--nproc 1) and "
        f"ddp demand least of a model. {_WAY_OUT}"
    )
    return _Verdict(text, "model")


def _over_ranks(world: World, probe: Probe) -> Figures:
    own = None if probe.gradients is None else numbers_of(probe.gradients)
    rows = world.gather_objects([float(probe.loss_share), own])
    loss = sum(share for share, _ in rows)
    squares: dict[str, float] = {}
    elements: dict[str, list[float]] = {}
    for _, found in rows:
        if found is None:
            return Figures(loss, None, {})
        squares |= found[0]
        elements |= found[1]
    return Figures(loss, squares, elements)


def _digest(window: LocalBatch) -> list[float]:
    """Figures by which two ranks see whether they read the same samples."""
    found = []
    for micro in window.micro_batches:
        for tensor in tensors_in(micro.data):
            values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64).flatten()
            places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
            found += [float(values.nan_to_num().sum()), float((values.nan_to_num() * places).sum())]
    return found
