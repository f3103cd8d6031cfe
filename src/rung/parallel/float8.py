"""`--precision fp8`: the linear layers of blocks multiply in float8, and all else computes as under bf16.

A factor is scaled so that its largest element is the largest of its type, by one scale for the tensor or one for each
row of the product. Factors of forward are e4m3. Gradients are e5m2, which has the wider range, or e4m3 where each row
has a scale of its own. Weights, gradients and optimizer state stay what they are.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rung.distributed.torch_private import make_wrapper, scaled_mm, without_torch_function
from rung.distributed.world import World
from rung.errors import EnvironmentProblem, ModelError
from rung.parallel.blocks import find_list_of_blocks
from rung.parallel.float8_cast import FACTOR, MULTIPLE, to_float8
from rung.spec.config import RunConfig

FIRST_CAPABILITY = (8, 9)  # Ada; then Hopper (9.0) and Blackwell


class Float8Linear(nn.Linear):
    """A linear layer of the task, which is made one of these in place: no parameter, name or hook changes."""

    scales_rows: bool

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input, self.weight, self.bias)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` in float8, for any part of the weight. Where the task turns autocast off, it is `F.linear`."""
        kind = input.device.type
        if input.numel() == 0 and isinstance(weight, GatheredWeight):
            return self.product(input.new_zeros(1, input.shape[-1]), weight, bias)[:0].view(
                *input.shape[:-1], weight.shape[0]
            )
        if not torch.is_autocast_enabled(kind) or input.numel() == 0:
            return F.linear(input, weight, bias)
        half = torch.get_autocast_dtype(kind)
        flat = input.to(half).reshape(-1, input.shape[-1])
        needs_gradient = torch.is_grad_enabled() and weight.requires_grad
        result: Tensor = _Product.apply(flat, weight, self.scales_rows, needs_gradient)  # type: ignore[no-untyped-call]
        result = result.view(*input.shape[:-1], weight.shape[0])
        return result if bias is None else result + bias.to(half)


class GatheredWeight(Tensor):
    """A weight that is there in float8, with the inverse of its scale. It has the type of its gradient."""

    factor: Tensor
    inverse_scale: Tensor

    def __new__(cls, factor: Tensor, inverse_scale: Tensor, dtype: torch.dtype) -> GatheredWeight:
        made: GatheredWeight = make_wrapper(cls, factor.shape, dtype, factor.device)
        made.factor, made.inverse_scale = factor, inverse_scale
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    # By these two, torch.compile looks through it.
    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["factor", "inverse_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        return GatheredWeight(inner["factor"], inner["inverse_scale"], dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        aten, own = torch.ops.aten, args[0]
        same_shape = func is aten.as_strided.default and tuple(args[1]) == tuple(own.shape)
        if func in (aten.detach.default, aten.alias.default) or same_shape:
            return GatheredWeight(own.factor, own.inverse_scale, own.dtype)
        raise ModelError(
            f"{func} reads a weight of a float8 layer, which FSDP has gathered in float8: the model uses it beside the "
            "layer, or without autocast. --set gather=fp32 gathers such weights as they are."
        )


class _Product(torch.autograd.Function):
    """The product of an input and a turned weight. Backward scales the weight again rather than keep a copy of it: that
    would be the memory that sharding saves. Of the input only what backward needs is kept, in float8."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, scales_rows: bool, needs_gradient: bool) -> Tensor:
        ctx.scales_rows, ctx.kind = scales_rows, FACTOR if scales_rows else torch.float8_e5m2
        plain, turned = to_float8(input, FACTOR, scales_rows=scales_rows, plain=True, turned=needs_gradient)
        ctx.save_for_backward(weight, *turned)
        return _multiply(*plain, *_weight(weight, scales_rows), input.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        weight, *input_turned = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        plain, turned = to_float8(
            gradient, ctx.kind, scales_rows=ctx.scales_rows, plain=needs_input, turned=needs_weight
        )
        for_input = for_weight = None
        if needs_input:
            for_input = _multiply(*plain, *_weight(weight, ctx.scales_rows, turned=True), gradient.dtype)
        if needs_weight:
            for_weight = _multiply(*turned, *_second(*input_turned), weight.dtype)
        return for_input, for_weight, None, None


def _weight(weight: Tensor, scales_rows: bool, *, turned: bool = False) -> tuple[Tensor, Tensor]:
    """The weight as the second factor; in backward it is the weight of the turned layer."""
    if isinstance(weight, GatheredWeight):
        factor = weight.factor.t() if turned else weight.factor
        return _second(factor.contiguous(), weight.inverse_scale)
    plain, other = to_float8(weight, FACTOR, scales_rows=scales_rows, plain=not turned, turned=turned)
    return _second(*(other if turned else plain))


def _second(factor: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the second factor of a product lie one after another in its columns."""
    return factor.t(), scale.t() if scale.dim() else scale


def _multiply(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype, *, fast: bool = False
) -> Tensor:
    # The kernels for scales of rows write bf16 alone.
    written = torch.bfloat16 if left_scale.dim() else dtype
    product = scaled_mm(left, right, left_scale, right_scale, out_dtype=written, use_fast_accum=fast)
    # Not `.to` in any case: where it changes nothing, torch 2.11 compiles a function that returns its result into one
    # without gradients.
    return product if product.dtype == dtype else product.to(dtype)


def compute_in_float8(
    model: nn.Module,
    world: World,
    config: RunConfig,
    blocks: str | None,
    styles: Mapping[str, str],
    adapters: Collection[nn.Module] = (),
) -> str:
    """Make the linear layers of blocks `Float8Linear`. Returns a sentence that says which, and why others are not.

    `styles` are those of the tensor-parallel plan. Low-rank layers of `adapters` stay as they are.
    """
    _check_device(world, config)
    inside = {id(layer) for _, block in find_list_of_blocks(model, blocks) for layer in block.modules()}
    taken, left = 0, Counter[str]()
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        reason = _reason_against(layer, id(layer) in inside, styles.get(name, ""), world.layout.tp)
        reason = "of adapters" if any(layer is one for one in adapters) else reason
        if reason is None:
            layer.__class__ = Float8Linear
            assert isinstance(layer, Float8Linear)
            layer.scales_rows = config.fp8_scaling == "row"
            taken += 1
        else:
            left[reason] += 1
    others = "; ".join(f"{count} not, {reason}" for reason, count in left.items())
    if not taken:
        none = "it has no list of equal blocks" if not inside else others or "it has no nn.Linear"
        raise ModelError(
            f"--precision fp8 computes the linear layers of repeated blocks in float8, and the model has none that it "
            f'could: {none}. Use --precision bf16, or name the blocks in the task, as in blocks = "layers.*".'
        )
    scales = "one scale for each row" if config.fp8_scaling == "row" else "one scale for each tensor"
    sentence = f"fp8: {taken} linear layers multiply in float8 with {scales}, all else computes in bf16"
    sentence += f" ({others})" if others else ""
    if not config.compile:
        sentence += "; with --compile, scaling takes less of what they save"
    return sentence


@contextlib.contextmanager
def as_plain_layers(model: nn.Module) -> Iterator[None]:
    """For code of the task that looks at the classes of layers, as an optimizer's groups may."""
    changed: list[Any] = [module for module in model.modules() if type(module) is Float8Linear]
    for module in changed:
        module.__class__ = nn.Linear
    try:
        yield
    finally:
        for module in changed:
            module.__class__ = Float8Linear


def _reason_against(layer: nn.Linear, is_inside: bool, style: str, tp: int) -> str | None:
    if not is_inside:
        return "outside of the repeated blocks"
    if (
        type(layer) is not nn.Linear
        or "forward" in vars(layer)
        or "weight" not in dict(layer.named_parameters(recurse=False))
    ):
        return "with a forward or a weight of their own kind"
    inputs, outputs = layer.in_features, layer.out_features
    if style.startswith("rowwise"):
        inputs = inputs // tp if inputs % tp == 0 else 1
    elif style:
        outputs = outputs // tp if outputs % tp == 0 else 1
    if inputs % MULTIPLE or outputs % MULTIPLE:
        return f"of sizes that {MULTIPLE} does not divide"
    return None


def _check_device(world: World, config: RunConfig) -> None:
    if world.is_dry_run:
        return
    if world.device.type == "cpu":
        if not config.fp8_emulate:
            raise EnvironmentProblem(
                "--precision fp8 needs a GPU with float8 arithmetic (Ada, Hopper or later); a CPU has none, and would "
                "be slower than in fp32. To try its numbers here: --set fp8_emulate=true."
            )
        return
    capability = torch.cuda.get_device_capability(world.device)
    if capability < FIRST_CAPABILITY:
        raise EnvironmentProblem(
            f"--precision fp8 needs a GPU with float8 arithmetic (compute capability 8.9 or later: Ada, Hopper, "
            f"Blackwell); {torch.cuda.get_device_name(world.device)} has {capability[0]}.{capability[1]}. "
            "Use --precision bf16."
        )
