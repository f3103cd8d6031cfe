"""Which layers compute their cross entropy in chunks (see chunked_loss.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rung.data.pytree import map_tensors
from rung.data.sample_reader import NUM_EXAMPLES
from rung.distributed import fake_world
from rung.distributed.world import World
from rung.errors import StrategyError
from rung.parallel.chunked_cross_entropy import HeadCall
from rung.parallel.chunked_loss import ChunkedLinear, HeadOutput
from rung.parallel.forward_trace import trace_forward
from rung.parallel.materialize import Weights
from rung.parallel.model_copy import meta_copy
from rung.parallel.pipeline.partition import lies_in
from rung.parallel.softmax_kernel import why_no_kernel
from rung.spec.abilities import compiles_blocks, why_not
from rung.spec.compatibility import largest_micro_batch
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.spec.task import Task, split_batch
from rung.spec.turns import turns_of

_LEAST_CLASSES = 4096  # an output layer with fewer has small logits
# Of a micro-batch's logits, as if in fp32, for chunks where the model would else be compiled as a whole. With smaller
# ones a step took up to half as long again in blocks (models of transformers, H200), for a sixth less memory.
_LEAST_COMPILED_BYTES = 2**31


def large_heads(model: nn.Module, layout: Layout, config: RunConfig, task: Task) -> list[str]:
    """The layers that may be an output layer with large logits, if these settings allow a loss in chunks."""
    is_asked = config.chunked_loss not in ("auto", "never")
    reason = _why_not(config, layout, task)
    if is_asked and reason is not None:
        raise StrategyError(reason)
    if reason is not None or config.chunked_loss == "never":
        return []
    least = 1 if is_asked else _LEAST_CLASSES
    return [
        name
        for name, module in model.named_modules()
        if name and type(module) is nn.Linear and module.out_features >= least
    ]


def _why_not(config: RunConfig, layout: Layout, task: Task) -> str | None:
    asked = f"chunked_loss={config.chunked_loss}"
    if (reason := why_not(layout, "chunked_loss", asked)) is not None:
        return reason
    if task.loss_scope == "batch":
        return f'{asked} is not possible with loss_scope = "batch", which gathers all logits: leave it out.'
    if turns_of(task.loss) is not None:
        return f"{asked} is for one loss, and this task has several, which take turns: leave it out."
    return None


def heads_to_chunk(
    weights: Weights, world: World, config: RunConfig, task: Task, run: Callable[[nn.Module, Any], Any], example: Any
) -> list[str]:
    """Those of the large layers whose output goes into a cross entropy and nowhere else, by a run without values.

    `run` calls a model on a batch, of which `example` is one.
    """
    assert weights.model is not None
    names = large_heads(weights.model, world.layout, config, task)
    if not names:
        return []
    sizes = _probe(names, weights, world, task, run, example)
    if sizes is None:  # perhaps for another layer, whose result is changed in place
        alone = [_probe([name], weights, world, task, run, example) or {} for name in names]
        sizes = {name: size for one in alone for name, size in one.items()}
    found = list(sizes)
    if config.chunked_loss == "auto" and config.compile and not compiles_blocks(world.layout):
        # Of a micro-batch in tokens, each has a row. All layers or none: one is enough to compile block by block.
        classes = sum(cast(nn.Linear, weights.model.get_submodule(name)).out_features for name in found)
        each = classes if config.batch_tokens is not None else sum(sizes.values()) / NUM_EXAMPLES
        if 4 * each * largest_micro_batch(config, world.layout) < _LEAST_COMPILED_BYTES:
            found = []
    if not found and config.chunked_loss != "auto":
        raise StrategyError(
            f"chunked_loss={config.chunked_loss}: no linear layer's output goes into cross_entropy and nowhere else, "
            "as far as a run without values can tell."
        )
    return found


def _probe(
    names: list[str], weights: Weights, world: World, task: Task, run: Callable[[nn.Module, Any], Any], example: Any
) -> dict[str, int] | None:
    """Those of the layers whose output goes into a cross entropy alone, and how many logits the example has of each;
    None if the run fails."""
    assert weights.model is not None
    probe = meta_copy(weights.model)
    calls: dict[str, list[HeadCall]] = {name: [] for name in names}
    for name in names:
        _chunk(probe.get_submodule(name), rows=sys.maxsize, takes_few=True)

        def note(module: nn.Module, given: Any, output: Any, name: str = name) -> None:
            if isinstance(output, HeadOutput):
                calls[name].append(output.call)

        probe.get_submodule(name).register_forward_hook(note)
    mode = weights.mode or fake_world.new_fake_mode()
    with fake_world.imagined(mode):
        batch = map_tensors(example, lambda t: torch.empty(t.shape, dtype=t.dtype, device=world.device))

    loss = _Loss(task.loss)
    both = nn.ModuleList([probe, loss])

    def take_loss() -> Any:
        return loss(run(probe, batch), split_batch(batch)[1])

    try:
        trace_forward(both, take_loss, lambda *_: False, device=world.device, mode=mode, may_decide=lambda *_: True)
    except Exception:
        return None  # the loss changes logits, or cannot be run without values: what it does cannot be told
    return {
        name: sum(len(call.x) * call.num_classes for call in made)
        for name, made in calls.items()
        if made and all(call.is_chunked and not call.is_whole for call in made)
    }


class _Loss(nn.Module):
    """The loss as a module, so that it may read values as a model's forward may: it selects rows by a mask, say."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self._call = (loss,)  # no submodule, if it is one

    def forward(self, output: Any, target: Any) -> Any:
        return self._call[0](output, target)


def without_heads(blocks: list[nn.Module], model: nn.Module, names: list[str]) -> list[nn.Module]:
    """The blocks that can be compiled: a compiled layer would have to compute its logits."""
    heads = {model.get_submodule(name) for name in names}
    return [block for block in blocks if heads.isdisjoint(block.modules())]


def chunk_heads(model: nn.Module, names: list[str], config: RunConfig, world: World) -> None:
    """Let these layers compute their loss in chunks. Before others wrap their `forward`."""
    for name in names:
        rows = None if config.chunked_loss == "auto" else int(config.chunked_loss)
        _chunk(model.get_submodule(name), rows, has_kernel=why_no_kernel(world) is None)


def settle_heads(
    model: nn.Module, names: list[str], config: RunConfig, world: World, styles: Mapping[str, str]
) -> list[str]:
    """Leave out layers that FSDP has in a unit below the root: it frees their weights when the unit's forward ends,
    which is before the loss. And those whose results the tensor plan, of these styles, has gathered.

    Returns what to tell the user.
    """
    units = {name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)}
    gathered = [name for name in names if styles.get(name, "vocabulary_head") != "vocabulary_head"]
    kept = [name for name in names if not lies_in(name, units) and name not in gathered]
    for name in names:
        cast(ChunkedLinear, model.get_submodule(name)).is_chunked = name in kept
    if kept:
        compiled = ", and the model is compiled block by block" if config.compile else ""
        left = f"the logits of {', '.join(kept)} are not kept{compiled}"
        lines = [f"cross entropy in chunks: {left}; chunked_loss=never keeps them"]
        if world.device_type == "cuda" and (reason := why_no_kernel(world)) is not None:
            lines.append(f"cross entropy in chunks: without its kernel, which is slower: {reason}")
        return lines
    if gathered and config.chunked_loss != "auto":
        raise StrategyError(
            f"chunked_loss={config.chunked_loss}: the plan of {world.layout.name} gathers the logits of "
            f"{', '.join(gathered)}, because something else than a cross entropy may follow. Give it the style "
            '"vocabulary_head" in tensor_parallel, or leave it out.'
        )
    if names and config.chunked_loss != "auto":
        other = 'Use blocks = "..." for modules without it' if config.shard_by == "block" else "Use --shard-by block"
        raise StrategyError(
            f"chunked_loss={config.chunked_loss}: FSDP has {', '.join(names)} in a unit, whose weights are gone before "
            f"the loss. {other}, or --shard-by whole, or leave it out."
        )
    return []


def _chunk(head: nn.Module, rows: int | None, *, takes_few: bool = False, has_kernel: bool = False) -> None:
    """By its class alone: what others keep of the module, such as hooks and tied weights, stays."""
    head.__class__ = ChunkedLinear
    chunked = cast(ChunkedLinear, head)
    chunked.rows_per_chunk, chunked.takes_few, chunked.has_kernel = rows, takes_few, has_kernel
