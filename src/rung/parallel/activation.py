"""Activation checkpointing: discard the activations of blocks in forward and recompute them in backward.

`full` keeps only each block's input. `selective` also keeps the results of matrix products and attention, which are
expensive to compute and small to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rung.distributed.torch_private import TorchDispatchMode
from rung.errors import ModelError

_COSTLY_NAMES = (
    "mm",
    "addmm",
    "_scaled_mm",
    "_grouped_mm",
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


def _keep_nothing(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


Around = Callable[[], AbstractContextManager[Any]]


def apply_activation_checkpointing(
    blocks: list[nn.Module], mode: str, recomputing: Around | None = None, *, keep_generators: bool = True
) -> None:
    """Wrap the blocks' forward in place: the modules keep their types and parameter names.

    `recomputing` makes a context for the recomputation, in which modes around the backward are not active. Without
    `keep_generators` torch does not restore the random state, and `recomputing` must.
    """
    for block in blocks:
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ModelError(
                f"a block is a {type(block).__name__}, which has no forward and cannot be checkpointed. "
                'Name the blocks in the task, as in blocks = "layers.*".'
            )
        block.forward = _checkpointed(block, mode, recomputing, keep_generators)


def checkpoint_again(
    model: nn.Module, mode: str, recomputing: Around | None = None, *, keep_generators: bool = True
) -> None:
    """Wrap the blocks of a copied model again: its wrappers still call the forward of the original's modules."""
    wrapped = [module for module in model.modules() if hasattr(vars(module).get("forward"), "is_checkpointed")]
    for module in wrapped:
        inside: Any = module.forward.__wrapped__  # type: ignore[attr-defined]
        if isinstance(inside, MethodType):
            del module.forward
        else:  # a function that the user assigned to this module's forward
            module.forward = inside
    apply_activation_checkpointing(wrapped, mode, recomputing, keep_generators=keep_generators)


def _checkpointed(block: nn.Module, mode: str, around: Around | None, keep_generators: bool) -> Callable[..., Any]:
    forward = block.forward

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if mode == "selective":
            first_pass, recomputing = create_selective_checkpoint_contexts(_keep_costly)  # type: ignore[no-untyped-call]
            first_pass = _both(_without_autocast_cache(), first_pass)
            recomputing = _both(_without_autocast_cache(), recomputing)
        else:
            first_pass, recomputing = nullcontext(), nullcontext()
        if around is not None:
            recomputing = _both(around(), recomputing)
        return first_pass, _both(_unchanged_buffers(block), recomputing)

    options: dict[str, Any] = {"preserve_rng_state": keep_generators}
    if mode == "selective" or around is not None or next(block.buffers(), None) is not None:
        options["context_fn"] = contexts

    def compiled_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        keep = _keep_costly if mode == "selective" else _keep_nothing
        first_pass, recomputing = create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]
        return first_pass, _AsMode(_both(_unchanged_buffers(block), recomputing))

    # In compiled code buffers change once and casts are not kept. But a block that the compiler gives up is computed
    # again as without it.
    compiled_options: dict[str, Any] = {"preserve_rng_state": keep_generators}
    if mode == "selective" or next(block.buffers(), None) is not None:
        compiled_options["context_fn"] = compiled_contexts

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **compiled_options, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    run.is_checkpointed = True  # type: ignore[attr-defined]
    return run


class _AsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context as a mode, which torch asks for under torch.compile. It changes no operation by itself."""

    def __init__(self, context: AbstractContextManager[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._context = context

    def __enter__(self) -> Any:
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Cast weights at every use: of a block that is called twice, the second call would find them cast, and its
    recomputation would not."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def _unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers afterwards: forward updated running statistics, and recomputation must not do it again."""
    saved = [
        (part, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for part, name, buffer, value in saved:
            setattr(part, name, buffer)  # forward may have assigned another
            buffer.data.copy_(value)  # through .data: autograd may have saved the buffer and must not see a new version
