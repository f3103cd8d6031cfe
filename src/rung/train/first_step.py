"""The check before the first step of a run with several ranks: loss and gradients against those of one process.

All ranks compute them once on a few samples, without dropout and without an update. The main rank then computes the
same samples alone, with the same weights, through the runtime of one process. If the whole model does not fit on its
device, the blocks stay in host memory and come to the device one at a time.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rung.data.batch_shard import BatchPartition, LocalBatch
from rung.data.batches import Batches
from rung.data.pytree import tensors_in
from rung.data.rng import DeviceGenerators, seed_generators
from rung.distributed.torch_private import TorchDispatchMode
from rung.distributed.world import World
from rung.errors import DataError, ModelError, RungError, TaskError
from rung.parallel.batchnorm import batch_norms
from rung.parallel.gradients import GradientFigures
from rung.runtime import Runtime, build_runtime
from rung.runtime.base import Probe
from rung.spec.abilities import can
from rung.spec.compatibility import fit_settings, micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse
from rung.spec.task import Task
from rung.system.host import free_host_bytes
from rung.system.units import human_bytes

log = logging.getLogger("rung")

_FEW, _MANY = 2, 64  # samples of a rank in a micro-batch of the check; the most of all ranks
# Differences that rounding explains: of the loss, of the gradients' norm, and of one parameter's.
_TOLERANCES = {"fp64": (1e-8, 1e-7, 1e-6), "fp32": (1e-4, 1e-3, 1e-2)}
_HALF_TOLERANCES = (3e-2, 0.1, 0.5)
_MATTERS = 1e-2  # a gradient below this part of the whole may be rounding alone
# What one process needs besides weights and gradients, as a part of these: activations, or those of a block.
_ACTIVATIONS, _A_BLOCK = 2.0, 1.2
_WAY_OUT = "--no-check trains in spite of it."


@dataclass(frozen=True)
class Figures:
    """Of a few samples: the loss, and by name each gradient's squared norm and elements of a few, if ranks have the
    gradients of the global loss."""

    loss: float
    squares: dict[str, float] | None
    elements: dict[str, list[float]]

    @property
    def norm(self) -> float | None:
        return math.sqrt(sum(self.squares.values())) if self.squares is not None else None


def check_first_step(runtime: Runtime, task: Task, config: RunConfig, batches: Batches) -> None:
    """Compare this run's loss and gradients with those of one process, and log the difference. All ranks call it.

    Raises the cause if they differ: the loss is no mean over samples, ranks read other samples, or the strategy
    computes something else.
    """
    world = runtime.world
    if not config.check or not world.has_peers or not can(world.layout, "check"):
        return
    room = _Room.of(runtime, config) if world.is_main else None
    reason = world.gather_objects(room.why_not if room is not None else None)[0]
    if reason is not None:
        log.info("  first step not compared with one process: %s", reason)
        return
    samples = _Samples(task, config, world.layout, batches)
    ours = _over_ranks(world, runtime.probe(next(iter(runtime.place(samples.of_rank(world.role.data_rank))))))
    found = None
    if room is None:
        deque(runtime.named_weights(), maxlen=0)  # to the main rank
    else:
        generators = DeviceGenerators(world.device)
        try:
            reference = _Reference(task, config, world.device, samples, room)
            reference.load(runtime.named_weights())
            found = asdict(_compare(reference, ours))
        finally:
            generators.restore()
    verdict = _Verdict(**world.gather_objects(found)[0])
    if verdict.kind == "model":
        _refuse_other_samples(world.gather_objects(_digest(next(iter(samples.whole())))))
    if verdict.kind:
        raise _ERRORS[verdict.kind](verdict.text)
    log.info("  first step %s", verdict.text)


def draws_random_numbers(task: Task, config: RunConfig) -> bool:
    """Whether forward or loss draws random numbers, dropout aside: whether the loss depends on the seed."""
    layout = parse("single", 1)
    cut = BatchPartition(config.batch_size, 1, 0, config.micro_batch)
    batches = Batches(task.train_data(), cut, seed=config.seed, collate=task.collate)
    reference = _Reference(task, config, torch.device("cpu"), _Samples(task, config, layout, batches))
    try:
        tolerances = _tolerances(reference.config)
        return bool(_differences(reference.figures(seed=1), reference.figures(seed=2), tolerances))
    except Exception:
        return False


def _tolerances(config: RunConfig) -> tuple[float, float, float]:
    return _TOLERANCES.get(config.precision, _HALF_TOLERANCES)


@dataclass(frozen=True)
class _Room:
    """Whether and how the main rank can compute the same step of the whole model alone."""

    why_not: str | None = None
    blocks_on_host: bool = False

    @classmethod
    def of(cls, runtime: Runtime, config: RunConfig) -> _Room:
        world, facts = runtime.world, runtime.facts
        if config.batch_norm == "local" and world.layout.num_data_ranks > 1 and batch_norms(runtime.model):
            return cls("batch_norm=local normalises each rank's samples by themselves")
        width = 8 if config.precision == "fp64" else 4
        needed = width * (2 * facts.num_trainable + facts.num_frozen)  # weights and gradients
        on_host = free_host_bytes()
        on_device = torch.cuda.mem_get_info(world.device)[0] if world.device.type == "cuda" else on_host
        if on_device is None or _ACTIVATIONS * needed < on_device:
            return cls()
        if on_host is None or _A_BLOCK * needed < on_host:
            return cls(blocks_on_host=True)
        return cls(f"one process needs {human_bytes(needed)} for the whole model, and {human_bytes(on_host)} are free")


class _Samples:
    """The first few samples of the data, cut as the run cuts a batch."""

    def __init__(self, task: Task, config: RunConfig, layout: Layout, batches: Batches) -> None:
        self._task, self._config, self._batches = task, config, batches
        self.num_ranks = layout.num_data_ranks
        share = -(-config.batch_size // self.num_ranks)
        own = min(micro_batch_size(config, layout) or share, share)
        count = batches.cut.num_micro_batches
        # A schedule keeps its number of micro-batches, and a compiled model its shapes, if that is not too much.
        self._micro = own if config.compile and own * self.num_ranks <= _MANY else min(own, _FEW)
        self._count = count if layout.num_stages > 1 else min(count, 2)
        self.total = min(config.batch_size, self._count * self._micro * self.num_ranks)

    def of_rank(self, rank: int) -> Batches:
        return self._read(BatchPartition(self.total, self.num_ranks, rank, self._micro))

    def whole(self, cut: str = "") -> Batches:
        """As one process reads them: in the same micro-batches, in "halves" of them, or all in "one"."""
        size = min(self.total, self._micro * self.num_ranks)
        sizes = {"": size, "halves": max(1, size // 2), "one": self.total}
        return self._read(BatchPartition(self.total, 1, 0, sizes[cut]))

    def _read(self, cut: BatchPartition) -> Batches:
        # A stream may be used up by reading it.
        dataset = self._task.train_data() if self._batches.is_stream else self._batches.dataset
        shuffle, collate = self._config.shuffle, self._task.collate
        return Batches(dataset, cut, seed=self._config.seed, shuffle=shuffle, num_steps=1, collate=collate)


class _Reference:
    """One process with the weights of the run."""

    def __init__(
        self, task: Task, config: RunConfig, device: torch.device, samples: _Samples, room: _Room | None = None
    ) -> None:
        self._task = replace(task, schedule=None)  # it may not be made for so few steps
        self._device, self._samples = device, samples
        self._blocks_on_host = room is not None and room.blocks_on_host
        self.config = replace(config, compile=False, activation_checkpointing="none", offload="none")
        self._runtime: Runtime | Exception = self._build(self.config.precision)

    @property
    def num_ranks(self) -> int:
        return self._samples.num_ranks

    @property
    def manner(self) -> str:
        """How it computed, for the user."""
        return ", computed block by block" if self._blocks_on_host else ""

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the weights of the run in place of the seed's."""
        state = {} if isinstance(self._runtime, Exception) else self._runtime.model.state_dict()
        for name, tensor in weights:  # to the end, after an error, too: all ranks take part in gathering them
            if name in state and state[name].shape == tensor.shape:
                state[name].copy_(tensor)
        if not isinstance(self._runtime, Exception):
            self._runtime.model.load_state_dict(state)  # a module may keep its weights in another form

    def is_of_micro_batch(self) -> bool:
        """Whether the loss of a micro-batch is no mean over its samples by design."""
        return self._task.loss_scope == "batch" or bool(batch_norms(self._built().model))

    def figures(self, cut: str = "", *, seed: int | None = None) -> Figures:
        return self._figures(self._built(), cut, seed)

    def figures_at_once(self) -> Figures | None:
        """Of all samples in one micro-batch, which is quick; None where that means something else, or does not fit."""
        if self._blocks_on_host or self.is_of_micro_batch():
            return None
        try:
            return self.figures("one")
        except _CommunicatesError:
            raise
        except Exception:
            return None

    def exact_figures(self) -> Figures:
        """In fp64."""
        runtime = self._make("fp64")
        state = runtime.model.state_dict()  # with the versions of its parts, which some models ask for
        state.update(self._built().model.state_dict())
        runtime.model.load_state_dict(state)
        return self._figures(runtime)

    def _figures(self, runtime: Runtime, cut: str = "", seed: int | None = None) -> Figures:
        generators = DeviceGenerators(self._device)
        if seed is not None:
            seed_generators(seed)
            torch.manual_seed(seed)
        with _NoCollectives():  # type: ignore[no-untyped-call]
            probe = runtime.probe(next(iter(runtime.place(self._samples.whole(cut)))))
        generators.restore()
        assert probe.gradients is not None
        return Figures(float(probe.loss_share), *_numbers(probe.gradients))

    def _built(self) -> Runtime:
        if isinstance(self._runtime, Exception):
            raise self._runtime
        return self._runtime

    def _build(self, precision: str) -> Runtime | Exception:
        """The runtime, or its error: the other ranks wait for this one to take their weights."""
        try:
            return self._make(precision)
        except Exception as error:
            return error

    def _make(self, precision: str) -> Runtime:
        layout = parse("single", 1)
        world = World(layout, 0, 1, 0, self._device, "none", None)
        config = fit_settings(replace(self.config, precision=precision), layout)
        return build_runtime(self._task, world, config, total_steps=1, blocks_on_host=self._blocks_on_host)


@dataclass(frozen=True)
class _Verdict:
    """What the main rank found, for all ranks."""

    text: str
    kind: str = ""  # of the error, if it is one


_ERRORS: dict[str, type[RungError]] = {"task": TaskError, "model": ModelError}


def _compare(reference: _Reference, ours: Figures) -> _Verdict:
    try:
        tolerances = _tolerances(reference.config)
        at_once = reference.figures_at_once()
        # Micro-batches and ranks that give the loss of all samples together also show that it is a mean over them.
        if at_once is not None and not _differences(ours, at_once, tolerances):
            return _Verdict(f"equals one process to {_largest(ours, at_once):.0e}")
        alone = reference.figures()
        if not math.isfinite(alone.loss):
            return _Verdict(f"not compared with one process, whose loss is {alone.loss}")
        if alone.norm is not None and not math.isfinite(alone.norm):
            return _Verdict(f"not compared with one process, whose gradient norm is {alone.norm}")
        different = _differences(ours, alone, tolerances)
        # If the ranks' parts of a micro-batch give its loss, halves would too.
        is_cut = reference.num_ranks > 1 and not different
        halves = alone if is_cut or reference.is_of_micro_batch() else reference.figures("halves")
        is_mean = not _differences(replace(halves, squares=None), alone, tolerances)
        if is_mean and not different:
            return _Verdict(f"equals one process to {_largest(ours, alone):.0e}{reference.manner}")
        if _differences(reference.figures(seed=1), reference.figures(seed=2), tolerances):
            return _Verdict("not compared with one process: forward or loss draws random numbers")
        if not is_mean:
            return _not_a_mean(alone.loss, halves.loss)
        if _is_rounding(reference, ours, alone):
            largest = _largest(ours, alone)
            return _Verdict(f"equals one process to {largest:.0e}, as far as {reference.config.precision} goes")
        return _something_else(different)
    except _CommunicatesError:
        return _Verdict("not compared with one process: the model communicates by itself")
    except Exception as error:
        text = str(error).splitlines()
        return _Verdict(
            f"not compared with one process, which fails: {type(error).__name__}: {text[0] if text else ''}"
        )


def _differences(ours: Figures, alone: Figures, tolerances: tuple[float, float, float]) -> list[str]:
    """The figures that differ by more than rounding, in words; the largest difference first."""
    norm = alone.norm or 0.0
    words = f"the loss is {ours.loss:.6g}, alone {alone.loss:.6g}"
    found = [(_relative(ours.loss, alone.loss, 1e-2 * norm) / tolerances[0], words)]
    if ours.squares is not None and alone.squares is not None:
        assert ours.norm is not None
        words = f"the gradient norm is {ours.norm:.6g}, alone {norm:.6g}"
        found.append((_relative(ours.norm, norm) / tolerances[1], words))
        for name, square in alone.squares.items():
            mine, here = math.sqrt(ours.squares.get(name, 0.0)), math.sqrt(square)
            ratio = abs(mine - here) / max(here, _MATTERS * norm, 1e-300) / tolerances[2]
            found.append((ratio, f"that of {name} is {mine:.6g}, alone {here:.6g}"))
        for name, apart in _elements_apart(ours, alone).items():
            found.append(
                (apart / tolerances[2], f"elements of the gradient of {name} are off by {apart:.2g} of its norm")
            )
    # What is compared with is finite, so a ratio that is nan is a difference.
    found = [(math.inf if math.isnan(ratio) else ratio, words) for ratio, words in found]
    return [words for ratio, words in sorted(found, key=lambda pair: -pair[0]) if ratio > 1]


def _elements_apart(ours: Figures, alone: Figures) -> dict[str, float]:
    """How far drawn elements of a few gradients are apart, relative to their norm."""
    found = {}
    for name in ours.elements.keys() & alone.elements.keys():
        size = max(math.hypot(*alone.elements[name]), _MATTERS * (alone.norm or 0.0), 1e-300)
        found[name] = math.dist(ours.elements[name], alone.elements[name]) / size
    return found


def _relative(ours: float, alone: float, scale: float = 0.0) -> float:
    return abs(ours - alone) / max(abs(alone), scale, 1e-300)


def _largest(ours: Figures, alone: Figures) -> float:
    norm = alone.norm or 0.0
    found = [_relative(ours.loss, alone.loss, 1e-2 * norm)]
    if ours.norm is not None:
        found.append(_relative(ours.norm, norm))
    return max(*found, *_elements_apart(ours, alone).values(), 0.0)


def _is_rounding(reference: _Reference, ours: Figures, alone: Figures) -> bool:
    """Whether one process is as far from its own result in fp64."""
    try:
        exact = reference.exact_figures()
    except Exception:  # an operation without a kernel for fp64
        return False
    return _largest(ours, exact) <= 10 * _largest(alone, exact)


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


def _something_else(different: list[str]) -> _Verdict:
    text = (
        "the first step is not that of one process: " + "; ".join(different[:4]) + ". This run would train something "
        "else. `rung verify` tries other strategies on this task; one process (--nproc 1) and ddp demand least of a "
        f"model. {_WAY_OUT}"
    )
    return _Verdict(text, "model")


def _over_ranks(world: World, probe: Probe) -> Figures:
    own = None if probe.gradients is None else _numbers(probe.gradients)
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


def _numbers(gradients: GradientFigures) -> tuple[dict[str, float], dict[str, list[float]]]:
    squares = {name: float(square) for name, square in gradients.squares.items()}
    return squares, {name: drawn.tolist() for name, drawn in gradients.elements.items()}


def _digest(window: LocalBatch) -> list[float]:
    """Figures by which two ranks see whether they read the same samples."""
    found = []
    for micro in window.micro_batches:
        for tensor in tensors_in(micro.data):
            values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64).flatten()
            places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
            found += [float(values.nan_to_num().sum()), float((values.nan_to_num() * places).sum())]
    return found


class _CommunicatesError(Exception):
    """A model that calls collectives would wait for ranks that take no part."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise _CommunicatesError
        return func(*args, **(kwargs or {}))
