"""The cross entropy of a large output layer, computed in chunks of rows, so that its logits are never held at once.

A language model's logits are its largest tensor by far: rows times vocabulary, and cross entropy keeps several of that
size. Here the output layer returns a `HeadOutput`, which has the shape of the logits and no storage. Changes of shape
that keep rows together give another `HeadOutput`; `F.cross_entropy` of one goes over its rows in chunks, with gradients
on the way. Any other operation computes the logits and goes on with them, as without this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from rung.data.pytree import map_tensors
from rung.distributed.torch_private import make_wrapper, schema, without_torch_function
from rung.errors import ModelError
from rung.parallel.chunked_cross_entropy import HALF_TYPES, HeadCall, HeadSums, LossRows, VocabularyPart

# Of a chunk. With fewer rows a GPU takes longer to add to the weight's gradient than it saves in memory.
LEAST_BYTES, LEAST_ROWS_OF_KERNEL = 2**27, 4096  # bytes as if in fp32
_WAY_OUT = "--set chunked_loss=never keeps the logits."


# -- the output layer --------------------------------------------------------------------------------------------------


class ChunkedLinear(nn.Linear):
    """An output layer whose result may be a `HeadOutput`. Made from a `nn.Linear` by its class alone."""

    rows_per_chunk: int | None
    has_kernel = False  # of softmax_kernel.py
    is_chunked = True
    takes_few = False  # rows that fit into one chunk

    def forward(self, input: Tensor) -> Tensor:
        is_cut = isinstance(input, DTensor) or isinstance(self.weight, DTensor)
        found = None if is_cut else self.in_chunks(input, self.weight, self.bias)
        return super().forward(input) if found is None else found

    def in_chunks(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, part: VocabularyPart | None = None
    ) -> Tensor | None:
        """The result for this weight, or this rank's part of it, as a `HeadOutput`; None where logits are as good."""
        num_rows = input.numel() // max(1, self.in_features)
        least = LEAST_ROWS_OF_KERNEL if self.has_kernel else 1
        num_classes = self.out_features if part is None else part.most
        chunk = self.rows_per_chunk or max(least, LEAST_BYTES // (4 * num_classes))
        is_mixed = input.dtype != weight.dtype and not _is_autocast(input.device)  # an error
        is_small = num_rows <= chunk and not self.takes_few
        if not self.is_chunked or is_small or is_mixed:
            return None
        return _OutputLayer.apply(input, weight, bias, chunk, self.has_kernel, part)  # type: ignore[no-any-return, no-untyped-call]


def _is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _without_graph(backward: Callable[[Any, Tensor], tuple[Any, ...]]) -> Callable[[Any, Tensor], tuple[Any, ...]]:
    """A backward whose result has no gradient of its own. torch's `once_differentiable` would return it as a constant
    where the gradient it is given needs none."""

    def checked(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise ModelError(f"a gradient of the gradient of the loss (create_graph) is asked for. {_WAY_OUT}")
        return backward(ctx, gradient)

    return checked


class _OutputLayer(torch.autograd.Function):
    """The output layer: its gradient comes as the gradient of logits, or as sums that the loss has taken already."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        has_kernel: bool,
        part: VocabularyPart | None,
    ) -> Tensor:
        is_cast = _is_autocast(x.device) and x.dtype != torch.float64
        dtype = torch.get_autocast_dtype(x.device.type) if is_cast else x.dtype
        ctx.shape, ctx.dtype = x.shape, x.dtype
        read = [t for t in (x, weight, bias) if t is not None and t.dtype == dtype]  # the others are copied
        x, weight = x.detach().to(dtype), weight.detach().to(dtype)
        bias = None if bias is None else bias.detach().to(dtype)
        rows, needs = x.reshape(-1, x.shape[-1]), tuple(ctx.needs_input_grad[:3])
        call = HeadCall(rows, weight, bias, chunk, has_kernel, part, needs)
        call.reads(read)
        ctx.call = call
        return HeadOutput(call, None, (*x.shape[:-1], call.num_classes), x.dim() - 1, x.dtype)

    @staticmethod
    @_without_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        call: HeadCall = ctx.call
        parts, plain = (gradient.parts, gradient.plain) if isinstance(gradient, HeadGradient) else ([], gradient)
        if plain is not None:
            whole = plain.reshape(-1, plain.shape[-1]).to(call.x.dtype)
            parts = [*parts, call.sums(whole)]
        dx, dw, db = (_total([getattr(part, name) for part in parts]) for name in ("x", "weight", "bias"))
        return None if dx is None else dx.reshape(ctx.shape).to(ctx.dtype), dw, db, None, None, None


def _total(tensors: Sequence[Tensor | None]) -> Tensor | None:
    given = [tensor for tensor in tensors if tensor is not None]
    return sum(given[1:], given[0]) if given else None


# -- logits that are not there -----------------------------------------------------------------------------------------


class HeadOutput(Tensor):
    """The logits of some rows of a call, not computed yet. They are on the first operation that needs their values."""

    call: HeadCall
    rows: Tensor | None  # flat, of the call; None: all of them in order
    class_dim: int
    _whole: Tensor | None

    def __new__(
        cls, call: HeadCall, rows: Tensor | None, shape: Sequence[int], class_dim: int, dtype: torch.dtype
    ) -> HeadOutput:
        made: HeadOutput = make_wrapper(cls, shape, dtype, call.x.device)
        made.call, made.rows, made.class_dim, made._whole = call, rows, class_dim, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeadOutput(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def lead(self) -> list[int]:
        """The shape without the classes."""
        return [size for dim, size in enumerate(self.shape) if dim != self.class_dim]

    def whole(self) -> Tensor:
        """The logits themselves. Below autograd, which has recorded this tensor as the operation's input."""
        self.call.check(None if self._whole is None else self)
        if self._whole is None:
            rows = self.call.logits(self.rows).to(self.dtype)
            self._whole = rows.reshape(*self.lead, rows.shape[-1]).movedim(-1, self.class_dim)
            self.call.keeps(self)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], HeadOutput) and args[0]._whole is None:
            found = None
            if func is F.cross_entropy:
                found = _cross_entropy(*args, **kwargs)
            elif func in _REARRANGING:
                found = _rearranged(func, *args, **kwargs)
            if found is not None:
                return found
        with without_torch_function():
            if func in _WATCHING:
                args[0].whole()  # so that their gradient is computed as such
            if func in _READING:
                whole = args[0].whole().detach().requires_grad_(args[0].requires_grad)
                return func(whole, *args[1:], **kwargs)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        written = [
            arg
            for arg, one in zip(args, schema(func).arguments, strict=False)
            if one.alias_info and one.alias_info.is_write
        ]
        if any(isinstance(arg, HeadOutput) for arg in written) or func is torch.ops.aten.as_strided.default:
            for arg in args:
                if isinstance(arg, HeadOutput):
                    arg.call.is_whole = True  # as a run without values must see, whatever it tries next
            raise ModelError(f"{func} changes the logits in place, or reads them by their storage. {_WAY_OUT}")
        if any(one.alias_info for one in schema(func).returns):
            for arg in args:
                if isinstance(arg, HeadOutput):
                    arg.call.viewed.append(arg)
        args, kwargs = map_tensors((args, kwargs or {}), lambda t: t.whole() if isinstance(t, HeadOutput) else t)
        return func(*args, **kwargs)


class _Rearrangement(torch.autograd.Function):
    """Another arrangement of the rows of a `HeadOutput`, or some of them."""

    @staticmethod
    def forward(
        ctx: Any, source: HeadOutput, local: Tensor | None, shape: Sequence[int], class_dim: int, dtype: torch.dtype
    ) -> Tensor:
        """`local` are the rows, flat, of those of the source; None for all of them in order."""
        ctx.source, ctx.local = (source.shape, source.class_dim, source.dtype), local
        rows = source.rows if local is None else local if source.rows is None else source.rows[local]
        ctx.class_dim = class_dim
        return HeadOutput(source.call, rows, shape, class_dim, dtype)

    @staticmethod
    @_without_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        shape, class_dim, dtype = ctx.source
        parts, plain = (gradient.parts, gradient.plain) if isinstance(gradient, HeadGradient) else ([], gradient)
        if plain is not None:
            flat = plain.movedim(ctx.class_dim, -1).reshape(-1, plain.shape[ctx.class_dim]).to(dtype)
            lead = [size for dim, size in enumerate(shape) if dim != class_dim]
            if ctx.local is not None:
                num_rows = torch.Size(lead).numel()
                flat = flat.new_zeros(num_rows, flat.shape[-1]).index_add_(0, ctx.local, flat)
            plain = flat.reshape(*lead, flat.shape[-1]).movedim(-1, class_dim)
        passed = HeadGradient(parts, plain, shape, dtype, gradient.device) if parts else plain
        return passed, None, None, None, None


class HeadGradient(Tensor):
    """The gradient of a `HeadOutput` as what comes of it: sums for the output layer, beside a usual gradient if other
    operations than the loss took part."""

    parts: list[HeadSums]
    plain: Tensor | None

    def __new__(
        cls, parts: list[HeadSums], plain: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> HeadGradient:
        made: HeadGradient = make_wrapper(cls, shape, dtype, device)
        made.parts, made.plain = parts, plain
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeadGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def where(self, flag: Tensor) -> HeadGradient:  # type: ignore[override]
        """Itself if the flag on the device is set, else zero."""

        def kept(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.where(flag, tensor, torch.zeros_like(tensor))  # 0 * nan is nan

        parts = [HeadSums(kept(one.x), kept(one.weight), kept(one.bias)) for one in self.parts]
        return HeadGradient(parts, kept(self.plain), self.shape, self.dtype, self.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and not kwargs and len(args) == 2:
            first = next(arg for arg in args if isinstance(arg, HeadGradient))
            parts = [part for arg in args if isinstance(arg, HeadGradient) for part in arg.parts]
            plain = _total([arg.plain if isinstance(arg, HeadGradient) else arg for arg in args])
            return HeadGradient(parts, plain, first.shape, first.dtype, first.device)
        if func is torch.ops.aten.isnan.default:  # `detect_anomaly` asks whether there is any
            own: HeadGradient = args[0]
            held = [own.plain, *(t for part in own.parts for t in (part.x, part.weight, part.bias))]
            return torch.stack([tensor.isnan().any() for tensor in held if tensor is not None])
        raise ModelError(
            f"{func} reads the gradient of the logits, perhaps in a hook, and it is not computed as such. {_WAY_OUT}"
        )


# What wants the gradient of the logits.
_WATCHING = {Tensor.register_hook, Tensor.retain_grad}

# What leaves torch reads the storage, and is no operation that is dispatched.
_READING = {
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.tolist,
    Tensor.__reduce_ex__,
    Tensor.data_ptr,
    Tensor.untyped_storage,
}


# -- changes of shape --------------------------------------------------------------------------------------------------


def _rearranged(func: Any, source: HeadOutput, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result as a `HeadOutput`; None if rows do not stay together."""
    found = _REARRANGING[func](func, source, *args, **kwargs)
    if found is None:
        return None
    local, shape, class_dim, dtype = found
    if local is None and torch.Size(shape) == source.shape and class_dim == source.class_dim and dtype == source.dtype:
        return source
    flat = None if local is None else local.reshape(-1)
    return _Rearrangement.apply(source, flat, shape, class_dim, dtype)  # type: ignore[no-any-return, no-untyped-call]


_Arranged = tuple[Tensor | None, Sequence[int], int, torch.dtype] | None


def _reshaped(func: Any, source: HeadOutput, *args: Any, **kwargs: Any) -> _Arranged:
    if source.class_dim != source.dim() - 1 or any(isinstance(arg, torch.dtype) for arg in [*args, *kwargs.values()]):
        return None
    shape = func(torch.empty(source.shape, device="meta"), *args, **kwargs).shape
    if not shape or shape[-1] != source.shape[-1]:
        return None
    return None, shape, len(shape) - 1, source.dtype


def _moved(func: Any, source: HeadOutput, *args: Any, **kwargs: Any) -> _Arranged:
    labels = [2 + dim for dim in range(source.dim())]  # sizes by which dimensions are told apart
    order = [size - 2 for size in func(torch.empty(labels, device="meta"), *args, **kwargs).shape]
    if [dim for dim in order if dim != source.class_dim] != [d for d in range(source.dim()) if d != source.class_dim]:
        return None
    return None, [source.shape[dim] for dim in order], order.index(source.class_dim), source.dtype


def _indexed(func: Any, source: HeadOutput, key: Any) -> _Arranged:
    keys = list(key) if isinstance(key, tuple) else [key]
    if source.class_dim != source.dim() - 1 or not all(_is_plain_key(one) for one in keys):
        return None
    taken = [one.dim() if isinstance(one, Tensor) and one.dtype == torch.bool else 1 for one in keys]
    taken = [0 if one is None or one is Ellipsis else size for one, size in zip(keys, taken, strict=True)]
    reaches_classes = any(one is Ellipsis for one in keys) or sum(taken) == source.dim()
    if reaches_classes:
        if not isinstance(keys[-1], slice) or keys[-1] != slice(None):
            return None  # classes are chosen, or it cannot be told
        keys = keys[:-1]
    lead = source.lead
    local = torch.arange(torch.Size(lead).numel(), device=source.device).reshape(lead)[tuple(keys)]
    return local, (*local.shape, source.shape[-1]), local.dim(), source.dtype


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, Tensor):
        return key.dtype in (torch.bool, torch.int64)
    return key is None or key is Ellipsis or isinstance(key, slice) or type(key) is int


def _unchanged(func: Any, source: HeadOutput, *args: Any, **kwargs: Any) -> _Arranged:
    return None if args or kwargs else (None, source.shape, source.class_dim, source.dtype)


def _cast(func: Any, source: HeadOutput, *args: Any, **kwargs: Any) -> _Arranged:
    """Another type, in which the loss is computed. Not after another: a narrower one would have rounded the logits."""
    given = [*args, *kwargs.values()]
    if func is Tensor.float and not given:
        dtype = torch.float32
    elif func is Tensor.to and len(given) == 1 and isinstance(given[0], torch.dtype):
        dtype = given[0]
    else:
        return None
    is_first = source.dtype == source.call.x.dtype or dtype == source.dtype
    return (None, source.shape, source.class_dim, dtype) if is_first and dtype.is_floating_point else None


_REARRANGING: dict[Any, Callable[..., _Arranged]] = {
    **dict.fromkeys(
        (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten), _reshaped
    ),
    **dict.fromkeys((Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.movedim), _moved),
    **dict.fromkeys((Tensor.swapaxes, Tensor.swapdims, torch.movedim), _moved),
    **dict.fromkeys((Tensor.float, Tensor.to), _cast),
    Tensor.__getitem__: _indexed,
    Tensor.contiguous: _unchanged,
}


# -- the loss ----------------------------------------------------------------------------------------------------------


def _cross_entropy(
    input: HeadOutput,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` of logits that are not there; None where it is left to torch: probabilities as targets, types
    that it refuses, and the mean of weighted classes with smoothing, which torch divides by sums of its own."""
    by_index = input.class_dim == 1 and list(target.shape) == input.lead and target.dtype in (torch.int64, torch.uint8)
    if not by_index or size_average is not None or reduce is not None or reduction not in ("none", "mean", "sum"):
        return None
    if weight is not None and (label_smoothing or weight.requires_grad):
        return None
    options = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    found: Tensor = _CrossEntropy.apply(input, target.reshape(-1), reduction, options)  # type: ignore[no-untyped-call]
    return found.reshape(target.shape) if reduction == "none" else found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: HeadOutput, target: Tensor, reduction: str, options: dict[str, Any]) -> Tensor:
        is_widened = _is_autocast(input.device) and input.dtype in HALF_TYPES  # as autocast does with this loss
        dtype = torch.float32 if is_widened else input.dtype
        input.call.check(None)
        input.call.is_chunked = True
        ctx.facts = (input.shape, input.dtype, input.device)
        ctx.rows = LossRows(input.call, input.rows, target, dtype, options)
        ctx.rows.check()
        ctx.sums = ctx.scale = None
        if reduction == "none":
            return ctx.rows.losses()  # type: ignore[no-any-return]
        ctx.scale = torch.ones((), dtype=dtype, device=input.device)
        if reduction == "mean":
            ctx.scale = ctx.scale / ctx.rows.num_units()
        # Gradients in fp16 must be scaled before they are rounded, and the scale comes with backward.
        is_early = ctx.needs_input_grad[0] and input.call.x.dtype != torch.float16
        loss, ctx.sums = ctx.rows.total(ctx.scale, needs_gradient=is_early)
        return loss  # type: ignore[no-any-return]

    @staticmethod
    @_without_graph
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.sums is not None:
            sums = ctx.sums.times(gradient)
        else:  # of each row its own gradient, which is only now known
            each = gradient.reshape(-1) if ctx.scale is None else (gradient * ctx.scale).expand(len(ctx.rows.target))
            sums = ctx.rows.sums(each)
        return HeadGradient([sums], None, *ctx.facts), None, None, None
