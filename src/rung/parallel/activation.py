"""Activation checkpointing: blocks forget what they computed in forward and compute it again in backward.

`full` keeps only each block's input. `selective` also keeps the results of matrix products and attention, which are
costly to compute and small to keep, and recomputes the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rung.errors import ModelError

_COSTLY_NAMES = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
COSTLY_OPERATIONS = frozenset(
    getattr(torch.ops.aten, name).default for name in _COSTLY_NAMES if hasattr(torch.ops.aten, name)
)


def _keep_costly(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


Around = Callable[[], AbstractContextManager[Any]]


def apply_activation_checkpointing(
    blocks: list[nn.Module], mode: str, recomputing: Around | None = None, *, keep_generators: bool = True
) -> None:
    """Wrap the blocks' forward in place: the modules keep their type and their parameters' names.

    `recomputing` is called in each forward, for what is to be around the computation of the same again: no mode that is
    active around a backward is active in what it computes again. Without `keep_generators` that sees to random numbers.
    """
    for block in blocks:
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ModelError(
                f"a block is a {type(block).__name__}, which is never called and cannot be checkpointed. "
                'Say where the blocks are, as in blocks = "layers.*".'
            )
        block.forward = _checkpointed(block, mode, recomputing, keep_generators)


def checkpoint_again(
    model: nn.Module, mode: str, recomputing: Around | None = None, *, keep_generators: bool = True
) -> None:
    """For a copy of a model with wrapped blocks: the wrappers are still those of the original, with its parameters."""
    wrapped = [module for module in model.modules() if hasattr(vars(module).get("forward"), "is_checkpointed")]
    for module in wrapped:
        inside: Any = module.forward.__wrapped__  # type: ignore[attr-defined]
        if isinstance(inside, MethodType):
            del module.forward
        else:  # the user's own, put on this very module
            module.forward = inside
    apply_activation_checkpointing(wrapped, mode, recomputing, keep_generators=keep_generators)


def _checkpointed(block: nn.Module, mode: str, around: Around | None, keep_generators: bool) -> Callable[..., Any]:
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if mode == "selective":
            keeping, recomputing = create_selective_checkpoint_contexts(_keep_costly)  # type: ignore[no-untyped-call]
        else:
            keeping, recomputing = nullcontext(), nullcontext()
        if around is not None:
            recomputing = _both(around(), recomputing)
        return keeping, _both(_unchanged_buffers(block), recomputing)

    options: dict[str, Any] = {"preserve_rng_state": keep_generators}
    if mode == "selective" or around is not None or next(block.buffers(), None) is not None:
        options["context_fn"] = contexts

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    run.is_checkpointed = True  # type: ignore[attr-defined]
    return run


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Running statistics were updated in forward; the recomputation must not update them again."""
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.data.copy_(value)  # through .data: autograd may have saved the buffer and must not see a new version
