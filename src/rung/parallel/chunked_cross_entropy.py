"""Loss and gradients of an output layer with a cross entropy, over chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.nn import functional as F

from rung.distributed.torch_private import version
from rung.errors import ModelError

HALF_TYPES = (torch.bfloat16, torch.float16)


def _no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Types are chosen by the caller."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


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
    needs: tuple[bool, bool, bool] = (False, False, False)  # gradients of these three
    is_chunked: bool = False  # a loss was computed from it in chunks
    is_whole: bool = False  # its logits were computed
    # With the version that was read:
    _sources: list[tuple[Tensor, int]] = field(default_factory=list)
    viewed: list[Tensor] = field(default_factory=list)  # such tensors that have views, which may be written to
    _computed: list[tuple[ReferenceType[Tensor], int]] = field(default_factory=list)  # tensors that stand for logits

    def logits(self, rows: Tensor | None) -> Tensor:
        """Those of some rows."""
        self.is_whole = True
        with _no_autocast(self.x.device):
            return F.linear(self.x if rows is None else self.x[rows], self.weight, self.bias)

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
        needs_x, needs_weight, needs_bias = self.needs
        return HeadSums(
            gradient @ self.weight if needs_x else None,
            gradient.t() @ self.x if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
        )


@dataclass(eq=False)
class LossRows:
    """The rows of one loss. Each chunk's loss and gradient are torch's own."""

    call: HeadCall
    rows: Tensor | None
    target: Tensor
    dtype: torch.dtype  # of the loss
    options: dict[str, Any]  # of `F.cross_entropy`

    def num_units(self) -> Tensor:
        """What a mean is divided by: the rows that are not ignored, or the sum of the weights of their classes."""
        counted = self.target != self.options["ignore_index"]
        weight = self.options["weight"]
        # An ignored target may be no class at all.
        each: Tensor = counted if weight is None else weight[torch.where(counted, self.target, 0).long()] * counted
        return each.sum().to(self.dtype)

    def losses(self) -> Tensor:
        """Of each row."""
        x = self._inputs()
        found = [self._loss(self._logits(x, part), part, "none") for part in self._parts()]
        return torch.cat(found) if found else self._loss(x.new_zeros(0, len(self.call.weight)), slice(0), "none")

    def total(self, scale: Tensor, *, needs_gradient: bool) -> tuple[Tensor, HeadSums | None]:
        """The sum of all losses, times the scale, and the gradients of the output layer."""
        losses = [torch.zeros((), dtype=self.dtype, device=self.target.device)]
        if needs_gradient:
            sums = self._sums("sum", lambda part: scale, losses.append)
        else:
            x, sums = self._inputs(), None
            losses += [self._loss(self._logits(x, part), part, "sum") for part in self._parts()]
        return torch.stack(losses).sum() * scale, sums

    def sums(self, upstream: Tensor) -> HeadSums:
        """The gradients of the output layer, from those of each row's loss."""
        return self._sums("none", lambda part: upstream[part], lambda loss: None)

    def _sums(self, reduction: str, upstream: Callable[[slice], Tensor], on_loss: Callable[[Tensor], None]) -> HeadSums:
        call, x = self.call, self._inputs()
        needs_x, needs_weight, needs_bias = call.needs
        wide = torch.float32 if call.weight.dtype in HALF_TYPES else call.weight.dtype
        dx = torch.empty_like(x) if needs_x else None
        dw = torch.zeros_like(call.weight, dtype=wide) if needs_weight else None
        db = torch.zeros_like(call.weight[:, 0], dtype=wide) if needs_bias else None
        for part in self._parts():
            logits = self._logits(x, part)
            with torch.enable_grad():
                loss = self._loss(logits.requires_grad_(), part, reduction)
            (gradient,) = torch.autograd.grad(loss, logits, upstream(part))
            on_loss(loss.detach())
            del loss, logits
            with _no_autocast(x.device):
                if dx is not None:
                    torch.mm(gradient, call.weight, out=dx[part])
                if dw is not None:
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

    def _loss(self, logits: Tensor, part: slice, reduction: str) -> Tensor:
        target = self.target[part]
        loss: Tensor = F.cross_entropy(logits.to(self.dtype), target, reduction=reduction, **self.options)
        return loss
