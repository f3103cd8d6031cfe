"""What torch would choose on a CUDA device, for tensors that stand for such a device and do not lie on one.

A torch without CUDA cannot run autograd on fake CUDA tensors, so a pretended GPU has fake CPU tensors. Where torch goes
by the device, it would then take the CPU's way: which operations autocast leaves in full precision, which kernel
computes attention, how dropout keeps its mask. Here it is given CUDA's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

# What CUDA's autocast computes in fp32, where the CPU's does not or does it elsewhere. From torch's table of op
# behaviour; the overloads are found by name.
_IN_FULL = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow", "softplus", "layer_norm", "native_layer_norm", "group_norm", "frobenius_norm", "nuclear_norm",
    "cosine_similarity", "renorm", "logsumexp", "dist", "pdist", "cdist", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "norm", "nll_loss", "nll_loss2d",
)  # fmt: skip
# What it asks for a result in fp32, unless the caller has asked for something.
_FULL_RESULT = (
    "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "prod", "softmax", "log_softmax", "sum",
)  # fmt: skip
# What the CPU's computes in fp32 and CUDA's leaves as it is.
_LEFT_ALONE = ("cross_entropy_loss", "avg_pool3d", "binary_cross_entropy", "grid_sampler", "trace", "polar")
_LARGE_IMAGE = 400  # pixels
_HALVES = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def like_cuda() -> Iterator[None]:
    """While inside, torch decides for CPU tensors as it would for CUDA ones."""
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
        # Not by a mode of torch's functions: none is active where activations are computed again.
        for name, way in (("scaled_dot_product_attention", _attention), ("dropout", _dropout)):
            operation = getattr(torch.ops.aten, name).default
            library.impl(name, _of_fakes(operation, way), "AutogradCPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def workspaces_of(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """Bytes that an operation takes one after the other while it runs, beside its results, where that is known.

    Seen on an H200 with torch 2.11.
    """
    way = _WORKSPACES.get(name)
    return [size for size in way(inputs, outputs) if size] if way is not None else []


def _of_convolution(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    return [_copies(inputs[0], inputs[1], outputs[0])]


def _of_convolution_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """For the input's gradient, and for the weight's, which is added up in fp32."""
    result, image, weight = inputs[:3]
    copies = _copies(image, weight, result)
    return [copies, copies + 4 * weight.numel()] if copies else []


def _of_embedding_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """A row for each index that may be met, and for each piece of a long run of the same one."""
    count, (rows, width) = inputs[1].numel(), outputs[0].shape
    return [(count // _RUN + min(count, rows)) * width * 4] if count > _FEW_INDICES else []


def _of_flash_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """The query's gradient in fp32, and a number for each of its rows."""
    query = inputs[1]
    return [query.numel() * 4 + query.numel() // query.shape[-1] * 4 + 256]


def _of_efficient_backward(inputs: list[Tensor], outputs: list[Tensor]) -> list[int]:
    """The gradient times the result, then the query's gradient again."""
    query = inputs[1]
    size = query.numel() * query.element_size()
    return [size, query.numel() * 4 + query.shape[0] * query.shape[1] * query.shape[-1] * 4]


_WORKSPACES: dict[str, Callable[[list[Tensor], list[Tensor]], list[int]]] = {
    "aten::convolution": _of_convolution,
    "aten::convolution_backward": _of_convolution_backward,
    "aten::embedding_dense_backward": _of_embedding_backward,
    "aten::_scaled_dot_product_flash_attention_backward": _of_flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _of_efficient_backward,
}
_FEW_INDICES, _RUN = 3072, 10  # of the kernel for gradients of embeddings


def _copies(image: Tensor, weight: Tensor, result: Tensor) -> int:
    """cuDNN computes convolutions with channels last. Of other tensors it makes copies in that order: of the input, the
    output and, unless its kernel is 1 x 1, the weight. For 1 x 1 kernels on large images it has another way, which
    takes little."""
    if image.dim() != 4 or image.is_contiguous(memory_format=torch.channels_last):
        return 0
    is_pointwise = weight.shape[2] == weight.shape[3] == 1
    if is_pointwise and image.shape[2:] == result.shape[2:] and image.shape[2] * image.shape[3] >= _LARGE_IMAGE:
        return 0
    copied = (image, result) if is_pointwise else (image, result, weight)
    return sum(t.numel() * t.element_size() for t in copied)


def _takes_tensors(operation: Any) -> bool:
    arguments = operation._schema.arguments
    is_out = any(argument.is_out for argument in arguments)
    return not is_out and any("Tensor" in str(argument.type) for argument in arguments)


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
    place = (
        [argument.name for argument in operation._schema.arguments].index("dtype") if _has_dtype(operation) else None
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            asked = place is None or kwargs.get("dtype") is not None or (len(args) > place and args[place] is not None)
            if not asked and args[0].dtype in (*_HALVES, torch.float32):
                args = args[:place]
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    return run


def _has_dtype(operation: Any) -> bool:
    return any(argument.name == "dtype" for argument in operation._schema.arguments)


def _as_it_is(operation: Any) -> Callable[..., Any]:
    """The operation itself. Autocast sees those that it is made of."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.AutocastCPU)
        return operation.redispatch(keys & below, *args, **kwargs)

    return run


def _to_full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALVES else tensor


def _of_fakes(operation: Any, way: Callable[..., Any]) -> Callable[..., Any]:
    """Real tensors lie on the CPU, whose kernels they need."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(args[0], FakeTensor):
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
    """Flash attention in half precision without a mask, the memory-efficient kernel else, plain products in fp64."""
    if query.dim() != 4 or query.dtype not in (*_HALVES, torch.float32):
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
    bias = (
        torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        if mask.dtype == torch.bool
        else mask
    )
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
