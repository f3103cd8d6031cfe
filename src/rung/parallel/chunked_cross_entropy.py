"""Loss and gradients of an output layer with a cross entropy, over chunks of rows.

Under tensor parallelism each rank has a `VocabularyPart` of the layer. The ranks of a group compute the same chunks,
and exchange a few figures of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from rung.distributed.torch_private import assert_async, version
from rung.errors import ModelError
from rung.parallel.collectives import gather_parts
from rung.parallel.softmax_kernel import add_product_, softmax_gradient_

HALF_TYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's classes of an output layer that a group has cut along them, as `torch.chunk` does."""

    group: dist.ProcessGroup
    num_classes: int  # of all ranks

    @property
    def most(self) -> int:
        """Classes of the first ranks. Only the last may have fewer."""
        return -(-self.num_classes // dist.get_world_size(self.group))

    @property
    def first(self) -> int:
        return dist.get_rank(self.group) * self.most

    def find(self, index: Tensor, num_own: int) -> tuple[Tensor, Tensor]:
        """Where this rank has each class, and whether it has it."""
        local = index - self.first
        is_here = (local >= 0) & (local < num_own)
        return torch.where(is_here, local, 0), is_here


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Types are chosen by the caller."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _loss_and_gradient(
    logits: Tensor,
    target: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    *,
    part: VocabularyPart | None,
    has_kernel: bool,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """The cross entropies of some rows, and the gradient of their sum times a scale (one, or one for each row).

    As `F.cross_entropy` and its backward in `dtype`, with fewer passes over the logits, which may become the gradient.
    """
    counted = target != ignore_index
    index = torch.where(counted, target, 0).long()  # an ignored target may be no class at all
    share = counted.to(dtype) if weight is None else counted * weight[index].to(dtype)
    factor = share * scale
    if part is None:
        at_target = logits.gather(1, index.unsqueeze(1)).squeeze(1).to(dtype)
        mean = logits.mean(1, dtype=dtype) if label_smoothing else None

    if part is not None:
        log_sum, at_target, mean, gradient = _softmax_gradient_over_ranks(part, logits, index, factor, label_smoothing)
    elif has_kernel and dtype == torch.float32 and logits.dtype in (torch.float32, torch.bfloat16):
        log_sum, gradient = softmax_gradient_(logits, index, factor, label_smoothing), logits
    else:
        log_sum, gradient = _softmax_gradient(logits, index, factor, label_smoothing)

    each = log_sum - at_target
    if mean is not None:
        each = (1 - label_smoothing) * each + label_smoothing * (log_sum - mean)
    return torch.where(counted, each * share, 0), gradient


def _softmax_gradient(logits: Tensor, index: Tensor, factor: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """What the kernel computes, by operations of torch, in the type of the factor. Probabilities become the gradient in
    place."""
    best, place = logits.max(1, keepdim=True)
    probability = torch.softmax(logits, 1, dtype=factor.dtype)
    log_sum = (best.to(factor.dtype) - probability.gather(1, place).log()).squeeze(1)  # the best one is never tiny
    if smoothing:
        probability -= smoothing / logits.shape[1]
    hit = torch.full_like(log_sum, smoothing - 1).unsqueeze(1)
    probability.scatter_add_(1, index.unsqueeze(1), hit)
    gradient = torch.empty_like(logits)
    torch.mul(probability, factor.unsqueeze(1), out=gradient)
    return log_sum, gradient


def _softmax_gradient_over_ranks(
    part: VocabularyPart, logits: Tensor, index: Tensor, factor: Tensor, smoothing: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The same of logits whose classes are shared out: with each row's logit at the target, and the mean of its logits
    if it is needed. The gradient is of this rank's classes."""
    largest = logits.amax(1).to(factor.dtype)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=part.group)
    local, is_here = part.find(index, logits.shape[1])
    at_target = logits.gather(1, local.unsqueeze(1)).squeeze(1).to(factor.dtype)
    figures = [torch.where(is_here, at_target, 0)]
    if smoothing:
        figures.append(logits.sum(1, dtype=factor.dtype))
    powers = torch.sub(logits, largest.unsqueeze(1)).exp_()  # in the wider of both types
    sums = torch.stack([powers.sum(1), *figures])
    dist.all_reduce(sums, group=part.group)
    powers /= sums[0].unsqueeze(1)
    if smoothing:
        powers -= smoothing / part.num_classes
    hit = is_here.to(powers.dtype) * (smoothing - 1)
    powers.scatter_add_(1, local.unsqueeze(1), hit.unsqueeze(1))
    gradient = torch.empty_like(logits)
    torch.mul(powers, factor.unsqueeze(1), out=gradient)
    return largest + sums[0].log(), sums[1], sums[2] / part.num_classes if smoothing else None, gradient


@dataclass(eq=False)
class HeadSums:
    """Gradients of an output layer's input, weight and bias."""

    x: Tensor | None  # a row for each row of the call
    weight: Tensor | None
    bias: Tensor | None

    def times(self, factor: Tensor) -> HeadSums:
        # The factor keeps its own precision: it has no dimension, so the result has the tensor's type.
        return HeadSums(*(None if t is None else t * factor for t in (self.x, self.weight, self.bias)))


@dataclass(eq=False)
class HeadCall:
    """One call of an output layer: what its logits are computed from."""

    x: Tensor  # rows x inputs
    weight: Tensor
    bias: Tensor | None
    chunk: int  # rows
    has_kernel: bool
    part: VocabularyPart | None = None  # if weight and bias are a rank's
    needs: tuple[bool, bool, bool] = (False, False, False)  # gradients of these three
    is_chunked: bool = False  # a loss was computed from it in chunks
    is_whole: bool = False  # its logits were computed
    viewed: list[Tensor] = field(
        default_factory=list
    )  # logits with views: kept, because their version tells of a write to a view
    # With the version that was read or made: what the logits are computed from, and tensors that stand for them.
    _sources: list[tuple[Tensor, int]] = field(default_factory=list)
    _computed: list[tuple[ReferenceType[Tensor], int]] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        return len(self.weight) if self.part is None else self.part.num_classes

    def logits(self, rows: Tensor | None) -> Tensor:
        """Those of some rows."""
        self.is_whole = True
        with _no_autocast(self.x.device):
            own = F.linear(self.x if rows is None else self.x[rows], self.weight, self.bias)
        return own if self.part is None else gather_parts(own, 1, self.part.num_classes, self.part.group)

    def reads(self, tensors: Sequence[Tensor]) -> None:
        """Tensors that must not change before the logits are computed."""
        self._sources += [(tensor, version(tensor)) for tensor in tensors if not tensor.is_inference()]

    def keeps(self, output: Tensor) -> None:
        """A tensor that stands for logits which are there now. Others must not read theirs after it was changed,
        because each arrangement of rows is computed by itself. Its version is also that of its views."""
        if not output.is_inference():
            self._computed.append((ref(output), version(output)))

    def check(self, own: Tensor | None) -> None:
        """Refuse what torch would compute from the values of another moment, or share between views. `own` stands for
        the logits that are read, if they are there."""
        found = [(tensor, before) for one, before in self._computed if (tensor := one()) is not None]
        others = [pair for pair in found if pair[0] is not own]
        if any(version(tensor) != before for tensor, before in (others if own is not None else others + self._sources)):
            raise ModelError(
                "the logits, or the input or weight that they are computed from, were changed in place after the "
                "model's last layer. --set chunked_loss=never keeps the logits."
            )

    def sums(self, gradient: Tensor) -> HeadSums:
        """The gradients of the layer, from that of all its logits."""
        if self.part is not None:
            gradient = gradient[:, self.part.first :][:, : len(self.weight)]
        needs_x, needs_weight, needs_bias = self.needs
        return HeadSums(
            gradient @ self.weight if needs_x else None,
            gradient.t() @ self.x if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


@dataclass(eq=False)
class LossRows:
    """The rows of one loss."""

    call: HeadCall
    rows: Tensor | None
    target: Tensor
    dtype: torch.dtype  # of the loss
    options: dict[str, Any]  # of `F.cross_entropy`

    def check(self) -> None:
        """A class that no rank has would be taken for one of another rank."""
        if self.call.part is not None:
            most, counted = self.call.num_classes, self.target != self.options["ignore_index"]
            found = (~counted | ((self.target >= 0) & (self.target < most))).all()
            assert_async(found, f"a target is not in [0, {most})")

    def num_units(self) -> Tensor:
        """What a mean is divided by: the rows that are not ignored, or the sum of the weights of their classes."""
        counted = self.target != self.options["ignore_index"]
        weight = self.options["weight"]
        # An ignored target may be no class at all.
        each: Tensor = counted if weight is None else weight[torch.where(counted, self.target, 0).long()] * counted
        return each.sum().to(self.dtype)

    def losses(self) -> Tensor:
        """Of each row."""
        return torch.cat([*self._losses(), torch.empty(0, dtype=self.dtype, device=self.target.device)])

    def total(self, scale: Tensor, *, needs_gradient: bool) -> tuple[Tensor, HeadSums | None]:
        """The sum of all losses, times the scale, and the gradients of the output layer."""
        losses = [torch.zeros((), dtype=self.dtype, device=self.target.device)]
        if needs_gradient:
            sums = self._sums(lambda part: scale, lambda each: losses.append(each.sum()))
        else:
            sums = None
            losses += [each.sum() for each in self._losses()]
        return torch.stack(losses).sum() * scale, sums

    def sums(self, upstream: Tensor) -> HeadSums:
        """The gradients of the output layer, from those of each row's loss."""
        return self._sums(lambda part: upstream[part], lambda loss: None)

    def _sums(self, upstream: Callable[[slice], Tensor], on_loss: Callable[[Tensor], None]) -> HeadSums:
        call, x = self.call, self._inputs()
        needs_x, needs_weight, needs_bias = call.needs
        wide = torch.float32 if call.weight.dtype in HALF_TYPES else call.weight.dtype
        dx = torch.empty_like(x) if needs_x else None
        dw = torch.zeros_like(call.weight, dtype=wide) if needs_weight else None
        db = torch.zeros_like(call.weight[:, 0], dtype=wide) if needs_bias else None
        for part in self._parts():
            each, gradient = _loss_and_gradient(
                self._logits(x, part),
                self.target[part],
                upstream(part),
                self.dtype,
                part=call.part,
                has_kernel=call.has_kernel,
                **self.options,
            )
            on_loss(each)
            with _no_autocast(x.device):
                if dx is not None:
                    torch.mm(gradient, call.weight, out=dx[part])
                if dw is not None:
                    if call.has_kernel:
                        add_product_(dw, gradient.t(), x[part])
                    else:
                        dw += gradient.t() @ x[part]
            if db is not None:
                db += gradient.sum(0, dtype=wide)
        if dx is not None and self.rows is not None:
            dx = torch.zeros_like(call.x).index_add_(0, self.rows, dx)
        return HeadSums(dx, dw, db)

    def _inputs(self) -> Tensor:
        return self.call.x if self.rows is None else self.call.x[self.rows]

    def _parts(self) -> list[slice]:
        return [slice(start, start + self.call.chunk) for start in range(0, len(self.target), self.call.chunk)]

    def _logits(self, x: Tensor, part: slice) -> Tensor:
        with _no_autocast(x.device):
            return F.linear(x[part], self.call.weight, self.call.bias)

    def _losses(self) -> Iterator[Tensor]:
        """Of the rows of each chunk."""
        call, x = self.call, self._inputs()
        for part in self._parts():
            logits, target = self._logits(x, part), self.target[part]
            if call.part is None:
                yield F.cross_entropy(logits.to(self.dtype), target, reduction="none", **self.options)
            else:
                none = torch.ones((), dtype=self.dtype, device=target.device)
                options = {"part": call.part, "has_kernel": False, **self.options}
                yield _loss_and_gradient(logits, target, none, self.dtype, **options)[0]
