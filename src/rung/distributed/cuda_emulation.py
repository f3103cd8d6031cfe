"""Makes torch choose CUDA's kernels and types for fake CPU tensors that stand for CUDA tensors.

A torch without CUDA cannot run autograd on fake CUDA tensors, so a fake GPU has fake CPU tensors. Where torch decides
by device, it would choose the CPU's variant: which operations autocast runs in fp32, which kernel computes attention,
how dropout stores its mask. Here it gets CUDA's.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rung.distributed.fake_world import is_fake, patched
from rung.distributed.torch_private import schema, tree_map_only

# Operations that CUDA's autocast runs in fp32, and the CPU's does not or in another place. From torch's autocast op
# reference; the overloads are found by name.
_IN_FULL = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm", "nuclear_norm",
    "cosine_similarity", "renorm", "logsumexp", "dist", "pdist", "cdist", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "norm", "nll_loss", "nll_loss2d",
)  # fmt: skip
# Operations for which it sets dtype=float32, unless the caller gives a dtype.
_FULL_RESULT = (
    "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "prod", "softmax", "log_softmax", "sum",
)  # fmt: skip
# Operations that the CPU's runs in fp32 and CUDA's does not.
_LEFT_ALONE = ("cross_entropy_loss", "avg_pool3d", "binary_cross_entropy", "grid_sampler", "trace", "polar")
_LARGE_IMAGE = 400  # pixels
_HALVES = (torch.float16, torch.bfloat16)
_ALIGNED, _TILE = 8, 64  # elements


@contextlib.contextmanager
def like_cuda() -> Iterator[None]:
    """Within the context, torch decides for CPU tensors as it would for CUDA tensors."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    ways = {**dict.fromkeys(_IN_FULL, _in_full), **dict.fromkeys(_FULL_RESULT, _full_result)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, wrap in {**ways, **dict.fromkeys(_LEFT_ALONE, _as_it_is)}.items():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                operation = getattr(packet, overload)
                if _takes_tensors(operation):
                    key = name if overload == "default" else f"{name}.{overload}"
                    library.impl(key, wrap(operation), "AutocastCPU", with_keyset=wrap is _as_it_is)
        # Not by a TorchFunctionMode: none is active while checkpointed activations are recomputed.
        for name, way in (("scaled_dot_product_attention", _attention), ("dropout", _dropout)):
            operation = getattr(torch.ops.aten, name).default
            library.impl(name, _of_fakes(operation, way), "AutogradCPU", with_keyset=True)
        for name, way in _RECURRENT.items():
            operation = getattr(torch.ops.aten, name.partition(".")[0]).input
            library.impl(name, _of_fakes(operation, way), "AutogradCPU", with_keyset=True)
    try:
        with _foreach_kernels():
            yield
    finally:
        library._destroy()  # a Library has no public way to unregister its kernels


@contextlib.contextmanager
def _foreach_kernels() -> Iterator[None]:
    """Optimizers and norms take many tensors at once, which they do on no CPU and not for a subclass of Tensor."""
    helpers, optimizers = (
        importlib.import_module(f"torch.{name}") for name in ("utils._foreach_utils", "optim.optimizer")
    )
    devices = [*helpers._get_foreach_kernels_supported_devices(), "cpu"]
    with (
        patched(
            helpers,
            _get_foreach_kernels_supported_devices=lambda: devices,
            _foreach_supported_types=[*helpers._foreach_supported_types, FakeTensor],
        ),
        patched(
            optimizers,
            _get_foreach_kernels_supported_devices=lambda: devices,
            _foreach_supported_types=[*optimizers._foreach_supported_types, FakeTensor],
        ),
    ):
        yield


def workspaces_of(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """Bytes of the temporaries that an operation allocates, one after the other, besides its results, where known.

    Measured on an H200 with torch 2.11.
    """
    way = _WORKSPACES.get(name)
    return [size for size in way(inputs, outputs) if size] if way is not None else []


def _of_convolution(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    return [_copies(inputs[0], inputs[1], outputs[0])]


def _of_convolution_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """For the input's gradient, and for the weight's, which is accumulated in fp32."""
    result, image, weight = inputs[:3]
    copies = _copies(image, weight, result)
    return [copies, copies + 4 * weight.numel()] if copies else []


def _of_embedding_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """A row for each distinct index at most, and for each segment of a long run of one index."""
    count, (rows, width) = inputs[1].numel(), outputs[0].shape
    return [(count // _RUN + min(count, rows)) * width * 4] if count > _FEW_INDICES else []


def _of_flash_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """The query's gradient in fp32, and a number for each of its rows."""
    query = inputs[1]
    return [query.numel() * 4 + query.numel() // query.shape[-1] * 4 + 256]


def _of_efficient_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """The gradient times the result, then the gradient of the queries in fp32, tile by tile, each with counters."""
    query = inputs[1]
    tiles = query.shape[0] * query.shape[1] * -(-query.shape[2] // _TILE) * -(-query.shape[3] // _TILE)
    return [_num_bytes(query), tiles * (16 + 4 * _TILE * _TILE)]


def _of_reduction(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """Where several blocks of threads reduce to one value, as for a bias' gradient, partial sums go through memory."""
    values, results = inputs[0].numel(), max(1, outputs[0].numel())
    if values // results < _LONG_REDUCTION or inputs[0].dim() == 0:
        return []
    return [min(values * (8 if results == 1 or results >= _MANY_RESULTS else 2), _MOST_PARTIAL_SUMS)]


def _of_softmax_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """The product of the gradient and the result."""
    return [_num_bytes(inputs[0])]


def _of_upsample_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    return [] if inputs[0].is_contiguous() else [_num_bytes(inputs[0])]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_WORKSPACES: dict[str, Callable[[list[Tensor], list[Tensor]], list[int]]] = {
    "aten::sum": _of_reduction,
    "aten::mean": _of_reduction,
    "aten::_softmax_backward_data": _of_softmax_backward,
    "aten::upsample_nearest2d_backward": _of_upsample_backward,
    "aten::upsample_bilinear2d_backward": _of_upsample_backward,
    "aten::convolution": _of_convolution,
    "aten::convolution_backward": _of_convolution_backward,
    "aten::embedding_dense_backward": _of_embedding_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _of_flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _of_efficient_backward,
}
_FEW_INDICES, _RUN = 3072, 10  # constants of the embedding backward kernel
# Of reductions: values for each result from which several blocks share it, results from which they are written in
# vectors, and the bytes that all blocks of the device write at most.
_LONG_REDUCTION, _MANY_RESULTS, _MOST_PARTIAL_SUMS = 1024, 128, 132 * 2**20


def steps_of(operation: Any) -> Callable[..., Tensor] | None:
    """The operations by which a GPU computes this one, if they are several."""
    return _STEPS.get(operation)


def _masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    whole: Tensor = torch.ops.aten.broadcast_tensors([input, mask])[0]
    return whole.clone(memory_format=torch.contiguous_format).masked_fill_(mask, value)


def _safe_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    result = torch.ops.aten._softmax.default(input if dtype is None else input.to(dtype), dim, False)
    is_hidden = torch.isneginf(input).all(dim, keepdim=True)
    return torch.ops.aten.where.self(is_hidden, torch.zeros((), dtype=result.dtype), result)  # type: ignore[no-any-return]


_STEPS: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.masked_fill.Scalar: _masked_fill,
    torch.ops.aten.masked_fill.Tensor: _masked_fill,
    torch.ops.aten._safe_softmax.default: _safe_softmax,
}


def pieces_of(operation: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """What a kernel computes one by one: the rows of a layer norm, or the elements of a pointwise kernel that cannot
    read several at a time, since an operand is broadcast, strided or in another order than the result, or is converted
    from half precision."""
    if operation is torch.ops.aten.native_layer_norm.default:
        return outputs[1].numel()
    if operation is torch.ops.aten.native_layer_norm_backward.default:
        return inputs[2].numel()
    if torch.Tag.pointwise not in operation.tags and operation.overloadpacket not in _COPIES:
        return 0
    result = outputs[0] if outputs else inputs[0]
    if not result.numel():
        return 0
    widens = result.dtype in (torch.float32, torch.float64) and any(t.dtype in _HALVES for t in inputs)
    operands = [tensor for tensor in (*inputs, result) if tensor.dim() > 0 and tensor.numel() > 1]
    lies_alike = all(_placement(tensor) == _placement(result) for tensor in operands) and _is_dense(result)
    return 0 if lies_alike and not widens else result.numel()


def _placement(tensor: Tensor) -> list[tuple[int, int]]:
    return [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side in memory, in whatever order."""
    expected = 1
    for size, stride in sorted(_placement(tensor), key=lambda pair: pair[1]):
        if stride != expected:
            return False
        expected *= size
    return True


_COPIES = (
    torch.ops.aten.copy_,
    torch.ops.aten._to_copy,
    torch.ops.aten.clone,
    torch.ops.aten.masked_fill_,
)


def _copies(image: Tensor, weight: Tensor, result: Tensor) -> int:
    """Bytes of cuDNN's copies: it convolves in channels-last order, and converts the input, the output and, unless the
    kernel is 1 x 1, the weight. For 1 x 1 kernels on large images it has another algorithm without copies."""
    if image.dim() != 4 or image.is_contiguous(memory_format=torch.channels_last):
        return 0
    is_pointwise = weight.shape[2] == weight.shape[3] == 1
    if is_pointwise and image.shape[2:] == result.shape[2:] and image.shape[2] * image.shape[3] >= _LARGE_IMAGE:
        return 0
    copied = (image, result) if is_pointwise else (image, result, weight)
    return sum(map(_num_bytes, copied))


def _takes_tensors(operation: Any) -> bool:
    arguments = schema(operation).arguments
    is_out = any(argument.is_out for argument in arguments)
    return not is_out and any("Tensor" in str(argument.type) for argument in arguments)


# As torch's C++ autocast kernels do. Python has dispatch keys only in `torch._C`.
def _without_autocast() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def _in_full(operation: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = tree_map_only(Tensor, _to_full, (args, kwargs))
            return operation(*args, **kwargs)

    return run


def _full_result(operation: Any) -> Callable[..., Any]:
    names = [argument.name for argument in schema(operation).arguments]
    place = names.index("dtype") if "dtype" in names else None

    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            given = place is None or kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None)
            if not given and args[0].dtype in (*_HALVES, torch.float32):
                args = args[:place]
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    return run


def _as_it_is(operation: Any) -> Callable[..., Any]:
    """Redispatch below autocast, which then applies to the operations that this one is composed of."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
        return operation.redispatch(keys & below, *args, **kwargs)

    return run


def _to_full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _of_fakes(operation: Any, way: Callable[..., Any]) -> Callable[..., Any]:
    """`way` for fake tensors only: real tensors are on the CPU and need its kernels."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if is_fake(args[0]):
            return way(*args, **kwargs)
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutogradOther)
        return operation.redispatch(keys & below, *args, **kwargs)

    return run


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0.0:
        return input
    if p == 1.0:
        return input.mul(torch.zeros((), dtype=input.dtype))
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Flash attention in half precision without a mask, the memory-efficient kernel in fp32 or with a mask; plain
    products where these know no way: in fp64, if groups of queries share a key in fp32, if heads are broadcast, and
    if neighbours in a row of the mask do not lie side by side."""
    is_plain = query.dim() != 4 or query.dtype not in (*_HALVES, torch.float32)
    shares_keys = query.dim() == 4 and key.shape[-3] != query.shape[-3]
    if shares_keys and (not enable_gqa or query.dtype == torch.float32):
        is_plain = True
    if attn_mask is not None and attn_mask.shape[-1] > 1 and attn_mask.stride(-1) != 1:
        is_plain = True
    if is_plain:
        found: Any = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    elif query.dtype in _HALVES and attn_mask is None and query.shape[-1] <= 256:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    else:
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query, key)
        keeps = any(t.requires_grad for t in (query, key, value))
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale
        )
    output: Tensor = found[0]
    return output


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if any(stride % _ALIGNED for stride in mask.stride()[:-1]):  # the kernel reads rows that begin at such places
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, _ALIGNED - length % _ALIGNED))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# -- recurrent layers --------------------------------------------------------------------------------------------------


class _Recurrence(torch.autograd.Function):
    """The layers of an LSTM, GRU or RNN as cuDNN computes them: one call, with weights in one buffer, a reserve that
    backward needs, and a workspace. Sizes as measured on an H200. The products of each time step depend on those of the
    one before, so each is an operation of its own."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, num_states: int, num_gates: int, num_layers: int, *states_and_weights: Tensor
    ) -> tuple[Tensor, ...]:
        states, weights = states_and_weights[:num_states], states_and_weights[num_states:]
        steps, batch, _ = input.shape
        directions, hidden = states[-1].shape[0] // num_layers, states[-1].shape[2]  # an LSTM's first may be projected
        buffer = input.new_empty(sum(weight.numel() for weight in weights))
        output = input.new_empty(steps, batch, directions * states[0].shape[2])
        lasts = tuple(input.new_empty(state.shape) for state in states)
        ctx.num_values = steps * batch * directions * hidden
        kept = num_layers * (num_gates + (1 if num_states == 2 else 3)) + num_layers - 1  # of these values
        reserve = torch.empty(ctx.num_values * kept * input.element_size(), dtype=torch.uint8)
        ctx.save_for_backward(input, output, buffer, reserve)
        ctx.shapes, ctx.state_shapes = [weight.shape for weight in weights], [state.shape for state in states]
        ctx.num_products, ctx.width, ctx.directions = steps * num_layers * directions, num_gates * hidden, directions
        _compute_steps(ctx, input, buffer, times=1)
        return output, *lasts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, _, buffer, _ = ctx.saved_tensors
        of_input, of_states = torch.empty_like(input), [input.new_empty(shape) for shape in ctx.state_shapes]
        flat = torch.empty_like(buffer)
        _compute_steps(ctx, input, buffer, times=2)
        parts = torch.split(flat, [shape.numel() for shape in ctx.shapes])
        of_weights = [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        return of_input, None, None, None, *of_states, *of_weights


def _compute_steps(ctx: Any, input: Tensor, buffer: Tensor, *, times: int) -> None:
    _, batch, size = ctx.state_shapes[0]
    workspace = input.new_empty(6 * ctx.num_values * ctx.directions + 2 * buffer.numel())
    left, right = workspace[: batch * size].view(batch, size), buffer[: size * ctx.width].view(size, ctx.width)
    _library.is_inside = True
    try:
        for _ in range(ctx.num_products * times):
            torch.mm(left, right)
    finally:
        _library.is_inside = False


_library = threading.local()


def is_inside_library() -> bool:
    """Whether operations are those that cuDNN issues within one of torch's."""
    return getattr(_library, "is_inside", False)


def _recurrent(num_gates: int, num_states: int) -> Callable[..., Any]:
    def way(
        input: Tensor,
        hx: Any,
        params: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = list(hx) if num_states == 2 else [hx]
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            input, states, params = input.to(half), [one.to(half) for one in states], [one.to(half) for one in params]
        ordered = input.transpose(0, 1) if batch_first else input
        output, *lasts = _Recurrence.apply(ordered, num_states, num_gates, num_layers, *states, *params)  # type: ignore[no-untyped-call]
        output = output.transpose(0, 1) if batch_first else output
        return (output, *lasts)

    return way


_RECURRENT = {
    "lstm.input": _recurrent(4, 2),
    "gru.input": _recurrent(3, 1),
    "rnn_tanh.input": _recurrent(1, 1),
    "rnn_relu.input": _recurrent(1, 1),
}
