"""One process with the weights of a run, as the first step of that run is compared with it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rung.checkpoint.state import set_extra_state
from rung.data.bad_samples import BadSamples
from rung.data.batch_shard import BatchPartition, LocalBatch, joined
from rung.data.batches import Batches
from rung.data.rng import DeviceGenerators, seed_generators
from rung.distributed.torch_private import TorchDispatchMode
from rung.distributed.world import World
from rung.parallel.batchnorm import batch_norms
from rung.parallel.checksums import bit_sums
from rung.parallel.combined_optimizer import members_of, parameters_of, wants_whole_parameters
from rung.parallel.gradients import GradientFigures
from rung.runtime import Runtime, build_runtime
from rung.spec.compatibility import fit_settings
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse
from rung.spec.task import Task
from rung.system.host import free_host_bytes
from rung.system.units import human_bytes

_FEW, _MANY = 4, 64  # samples of a rank in a micro-batch of the check; the most of all ranks
# Differences that rounding explains: of the loss, of the gradients' norm, and of one parameter's.
_TOLERANCES = {"fp64": (1e-8, 1e-7, 1e-6), "fp32": (1e-4, 1e-3, 1e-2)}
_HALF_TOLERANCES = (3e-2, 0.1, 0.5)
_FP32_ROUNDING = 1e-5
_MATTERS = 1e-2  # a gradient below this part of the whole may be rounding alone
# What one process needs besides weights and gradients, as a part of these: activations, or those of a block.
_ACTIVATIONS, _A_BLOCK = 2.0, 1.2
_MANY_ELEMENTS, _COUPLED = 2**16, 1e-3  # of parameters whose update is tried, and the part of it that matters


@dataclass(frozen=True)
class Figures:
    """Of a few samples: the loss, and by name each gradient's squared norm and elements of a few, if ranks have the
    gradients of the global loss."""

    loss: float
    squares: dict[str, float] | None
    elements: dict[str, list[float]]
    after: dict[str, Tensor] = field(default_factory=dict)  # the parameters that forward changed, as it left them

    @property
    def norm(self) -> float | None:
        return math.sqrt(sum(self.squares.values())) if self.squares is not None else None


def numbers_of(gradients: GradientFigures) -> tuple[dict[str, float], dict[str, list[float]]]:
    squares = {name: float(square) for name, square in gradients.squares.items()}
    return squares, {name: drawn.tolist() for name, drawn in gradients.elements.items()}


def tolerances_of(config: RunConfig) -> tuple[float, float, float]:
    return _TOLERANCES.get(config.precision, _HALF_TOLERANCES)


def differences(ours: Figures, alone: Figures, tolerances: tuple[float, float, float]) -> list[str]:
    """The figures that differ by more than rounding, in words; the largest difference first."""
    norm = alone.norm or 0.0
    words = f"the loss is {ours.loss:.6g}, alone {alone.loss:.6g}"
    found = [(relative(ours.loss, alone.loss, 1e-2 * norm) / tolerances[0], words)]
    if ours.squares is not None and alone.squares is not None:
        assert ours.norm is not None
        words = f"the gradient norm is {ours.norm:.6g}, alone {norm:.6g}"
        found.append((relative(ours.norm, norm) / tolerances[1], words))
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


def relative(ours: float, alone: float, scale: float = 0.0) -> float:
    return abs(ours - alone) / max(abs(alone), scale, 1e-300)


def largest(ours: Figures, alone: Figures) -> float:
    norm = alone.norm or 0.0
    found = [relative(ours.loss, alone.loss, 1e-2 * norm)]
    if ours.norm is not None:
        found.append(relative(ours.norm, norm))
    return max(*found, *_elements_apart(ours, alone).values(), 0.0)


@dataclass(frozen=True)
class Room:
    """Whether and how the main rank can compute the same step of the whole model alone."""

    why_not: str | None = None
    blocks_on_host: bool = False

    @classmethod
    def of(cls, runtime: Runtime, config: RunConfig) -> Room:
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


class Samples:
    """The first few samples of the data, cut as the run cuts a batch."""

    def __init__(self, task: Task, config: RunConfig, layout: Layout, batches: Batches) -> None:
        self._task, self._config, self._batches = task, config, batches
        self.num_ranks = layout.num_data_ranks
        own = -(-batches.cut.global_micro_batch // self.num_ranks)
        count = batches.cut.num_micro_batches
        # A schedule keeps its number of micro-batches, and a compiled model its shapes, if that is not too much.
        self._micro = own if config.compile and own * self.num_ranks <= _MANY else min(own, _FEW)
        self._count = count if layout.num_stages > 1 else min(count, 2)
        self.total = min(batches.cut.batch_size, self._count * self._micro * self.num_ranks)

    def of_rank(self, rank: int, bad_samples: BadSamples | None = None) -> Batches:
        """With `bad_samples` all ranks read theirs together."""
        return self._read(BatchPartition(self.total, self.num_ranks, rank, self._micro), bad_samples)

    def whole(self, cut: str = "") -> Iterable[LocalBatch]:
        """As one process reads them: in the same micro-batches, in "halves" of them, or all in "one"."""
        if self.collate_draws:
            return [self._as_ranks_read()]
        size = min(self.total, self._micro * self.num_ranks)
        sizes = {"": size, "halves": max(1, size // 2), "one": self.total}
        return self._read(BatchPartition(self.total, 1, 0, sizes[cut]))

    @functools.cached_property
    def collate_draws(self) -> bool:
        if self._task.collate is None:
            return False
        (window,) = self.of_rank(0)
        return any(micro.collate_draws for micro in window.micro_batches)

    def _as_ranks_read(self) -> LocalBatch:
        """The ranks' own pieces of each micro-batch: what `collate` draws for them, it draws for no others. They are
        put together again, because a batch norm takes its statistics of all of them, unless they do not fit."""
        windows = [window for rank in range(self.num_ranks) for window in self.of_rank(rank)]
        pieces = zip(*(window.micro_batches for window in windows), strict=True)
        own = [micro for of_ranks in pieces for micro in joined([m for m in of_ranks if m.num_samples])]
        return replace(windows[0], micro_batches=own)

    def _read(self, cut: BatchPartition, bad_samples: BadSamples | None = None) -> Batches:
        # A stream may be used up by reading it.
        dataset = self._task.train_data() if self._batches.is_stream else self._batches.dataset
        shuffle, collate = self._config.shuffle, self._task.collate
        order = self._batches.order
        if bad_samples is None and self._config.skip_bad_samples:
            bad_samples = BadSamples(self._config.skip_bad_samples)
        return Batches(
            dataset,
            cut,
            seed=self._config.seed,
            shuffle=shuffle,
            order=order,
            num_steps=1,
            collate=collate,
            bad_samples=bad_samples,
        )


class Reference:
    """One process with the weights of the run."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        device: torch.device,
        samples: Samples,
        room: Room | None = None,
        *,
        skips_experts: bool = False,
    ) -> None:
        """`skips_experts`: the experts of a list may get no rows in a step."""
        self._task = replace(task, schedule=None)  # it may not be made for so few steps
        self._device, self._samples, self.num_ranks = device, samples, samples.num_ranks
        self._blocks_on_host = room is not None and room.blocks_on_host
        self.manner = ", computed block by block" if self._blocks_on_host else ""  # for the user
        self.config = replace(config, compile=False, activation_checkpointing="none", offload="none")
        if config.unused_parameters == "error" and skips_experts:  # as ranks do that share these out
            self.config = replace(self.config, unused_parameters="allow")
        self._runtime: Runtime | Exception = self._build(self.config.precision)
        self._cached: dict[str, Figures] = {}
        self._before: dict[str, Tensor] = {}  # parameters that forward changes
        self._changes_state = False
        self.draws = False  # whether forward or loss has drawn random numbers, dropout aside

    @property
    def changes_parameters(self) -> bool:
        return bool(self._before)

    def load(self, weights: Iterable[tuple[str, Tensor]], extra: Mapping[str, Any]) -> None:
        """Take the weights of the run in place of the seed's, and the modules' extra state."""
        state = {} if isinstance(self._runtime, Exception) else self._runtime.model.state_dict()
        for name, tensor in weights:  # to the end, after an error, too: all ranks take part in gathering them
            if name in state and state[name].shape == tensor.shape:
                state[name].copy_(tensor)
        if not isinstance(self._runtime, Exception):
            self._runtime.model.load_state_dict(state)  # a module may keep its weights in another form
            set_extra_state(self._runtime.model, extra)
            named = dict(self._runtime.model.named_parameters())
            self._before = {name: named[name].detach().double().clone() for name in self._before}

    def find_changed_parameters(self) -> list[str]:
        """The parameters that forward changes, such as an average of others. They must be loaded again after this."""
        try:
            named = list(self._built().model.named_parameters())
            before = bit_sums([(name, parameter.detach()) for name, parameter in named])
            if self.figures_at_once() is None:
                self.figures()
            after = bit_sums([(name, parameter.detach()) for name, parameter in named])
        except Exception:  # `_compare` tells of it
            return []
        changed = [name for (name, _), one, other in zip(named, before, after, strict=True) if one != other]
        if changed:
            self._cached, self._before = {}, dict.fromkeys(changed, before)
        return changed

    def is_of_micro_batch(self) -> bool:
        """Whether the loss of a micro-batch is no mean over its samples by design."""
        if self._changes_state or self.changes_parameters:  # another number of calls leads elsewhere
            return True
        return self._task.loss_scope == "batch" or bool(batch_norms(self._built().model))

    def figures(self, cut: str = "", *, seed: int | None = None) -> Figures:
        if seed is not None:
            return self._figures(self._built(), cut, seed)
        if cut not in self._cached:
            self._cached[cut] = self._figures(self._built(), cut)
        return self._cached[cut]

    def find_coupled_update(self, *, of_whole_parameters: bool = False) -> str | None:
        """A parameter whose update depends on another one's gradient, as that of an optimizer which clips by itself.

        `of_whole_parameters`: only of optimizers that get these, one at a time.
        """
        if isinstance(self._runtime, Exception):
            return None
        optimizers = members_of(self._runtime.optimizer).values()
        tried = (one for one in optimizers if not of_whole_parameters or wants_whole_parameters(one))
        found = (_coupled_update(self._runtime.model, optimizer) for optimizer in tried)
        return next((name for name in found if name is not None), None)

    def changes_apart(self, ours: Figures) -> dict[str, float]:
        """How far the run's changes of parameters in forward are from those of one process, relative to these."""
        named, found = dict(self._built().model.named_parameters()), {}
        for name, before in self._before.items():
            after = named[name].detach().double()
            size = max(float((after - before).norm()), 1e-300)
            found[name] = float((ours.after[name] - after).norm()) / size if name in ours.after else math.inf
        return found

    def figures_at_once(self) -> Figures | None:
        """Of all samples in one micro-batch, which is quick; None where that means something else, or does not fit."""
        if self._blocks_on_host or self.is_of_micro_batch():
            return None
        try:
            return self.figures("one")
        except CommunicatesError:
            raise
        except Exception:
            return None

    def exact_means(self) -> tuple[float, float] | None:
        """In fp64, the loss of all samples and the mean over smaller micro-batches, if these differ."""
        try:
            whole, halves = self.exact_figures("one"), self.exact_figures("halves")
        except Exception:  # an operation without a kernel for fp64
            return None
        # Not to the last digit: many losses turn logits to fp32.
        is_mean = relative(halves.loss, whole.loss) <= _FP32_ROUNDING
        return None if is_mean else (whole.loss, halves.loss)

    def exact_figures(self, cut: str = "") -> Figures:
        """In fp64."""
        runtime = self._make("fp64")
        state = runtime.model.state_dict()  # with the versions of its parts, which some models ask for
        state.update(self._built().model.state_dict())
        runtime.model.load_state_dict(state)
        return self._figures(runtime, cut)

    def _figures(self, runtime: Runtime, cut: str = "", seed: int | None = None) -> Figures:
        generators = DeviceGenerators(self._device)
        if seed is not None:
            seed_generators(seed)
            torch.manual_seed(seed)
        with _NoCollectives():  # type: ignore[no-untyped-call]
            probe = runtime.probe(next(iter(runtime.place(self._samples.whole(cut)))))
        generators.restore()
        assert probe.gradients is not None
        self._changes_state = self._changes_state or probe.changes_state
        self.draws = self.draws or probe.draws
        return Figures(float(probe.loss_share), *numbers_of(probe.gradients))

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


def _coupled_update(model: nn.Module, optimizer: Optimizer) -> str | None:
    """The first of an optimizer's parameters, if its update depends on the gradient of the last."""
    own = {id(parameter) for parameter in parameters_of(optimizer) if parameter.requires_grad}
    named = [(n, p) for n, p in model.named_parameters() if id(p) in own and 0 < p.numel() <= _MANY_ELEMENTS]
    if len(named) < 2:
        return None
    (name, one), (_, other) = named[0], named[-1]
    kept = [(p, p.detach().clone(), torch.randn(p.shape, dtype=p.dtype, device=p.device)) for p in (one, other)]
    updates = []
    try:
        for given in (kept[:1], kept):
            optimizer.zero_grad(set_to_none=True)
            for parameter, _, gradient in given:
                parameter.grad = gradient.clone()
            optimizer.step()
            updates.append(one.detach() - kept[0][1])
            optimizer.state.clear()
            for parameter, value, _ in kept:
                parameter.detach().copy_(value)
    except Exception:  # an optimizer that wants all gradients
        return None
    apart, size = (float(values.abs().sum()) for values in (updates[0] - updates[1], updates[0]))
    return name if apart > _COUPLED * size else None


class CommunicatesError(Exception):
    """A model that calls collectives would wait for ranks that take no part."""


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CommunicatesError
        return func(*args, **(kwargs or {}))
