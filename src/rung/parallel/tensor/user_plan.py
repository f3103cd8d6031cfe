"""Read and check given plans: the task's styles for its modules, or the plan that a Hugging Face model carries."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rung.errors import StrategyError, TaskError, nearest
from rung.parallel.blocks import describe, fold
from rung.parallel.experts.validate import ExpertCall
from rung.parallel.linear_layers import can_shard, is_linear, is_norm, is_plain, num_inputs, num_outputs
from rung.parallel.tensor.survey import Survey
from rung.parallel.tensor.validate import Pair, ShardingCheck

# The styles that a task may give to a module.
STYLES = {
    "colwise": "a linear layer sharded by outputs; each rank keeps its part of the result",
    "rowwise": "a linear layer sharded by inputs, which colwise layers left sharded; the results are summed",
    "colwise_gather": "a linear layer sharded by outputs; the parts of the result are gathered",
    "embedding": "an embedding sharded by rows",
    "vocabulary_head": "a linear layer whose result stays sharded for the loss",
    "summed": "a norm between colwise and rowwise layers: replicated, its gradient summed over the ranks",
    "experts": "a module with the experts of a layer, some whole ones on each rank; their results are summed",
    "whole": "replicated on every rank",
}
# Hugging Face's names for these styles. A module with any other style is planned by derivation.
_HUGGING_FACE_STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "summed",
    # It cuts the inner dimension of each expert. Whole experts need no part of a matrix that holds two, and no other
    # messages.
    "moe_tp_experts": "experts",
}


def match_given(survey: Survey, given: Mapping[str, str]) -> dict[str, str]:
    styles: dict[str, str] = {}
    for pattern, style in given.items():
        if style not in STYLES:
            raise TaskError(
                f"tensor plan: {style!r} for {pattern!r} is not one of {', '.join(STYLES)}.{nearest(style, STYLES)}"
            )
        found = [n for n in survey.modules if n and _matches(n, pattern)]
        if not found:
            raise TaskError(
                f"tensor plan: {pattern!r} matches no module of the model."
                f"{nearest(pattern, [*fold(survey.modules), *survey.modules])}"
            )
        for name in found:
            module = survey.modules[name]
            style_here = "embedding" if style == "rowwise" and type(module) is nn.Embedding else style
            if isinstance(reason := survey.experts.get(name), str) and style == "experts":
                raise TaskError(f"tensor plan: ranks cannot share the experts of {name}: {reason}.")
            if not _fits(survey, name, style_here):
                raise TaskError(f"tensor plan: {name} is a {type(module).__name__} and cannot be {style}, as it is.")
            if style_here not in ("whole", "summed") and name in survey.used_directly:
                raise TaskError(f"tensor plan: {name} cannot be sharded: its weight is also used by other code.")
            styles[name] = style_here
    return styles


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def _fits(survey: Survey, name: str, style: str) -> bool:
    module = survey.modules[name]
    if style == "whole":
        return True
    if style == "experts":
        return isinstance(survey.experts.get(name), ExpertCall)
    if style == "embedding":
        return type(module) is nn.Embedding and is_plain(module)
    return is_norm(module) if style == "summed" else is_linear(module)


def carried_plan(model: nn.Module) -> dict[str, str]:
    """Hugging Face's plan: `config.base_model_tp_plan` for the base model, `_tp_plan` for the head."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    start = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan = {f"{start}{pattern}": style for pattern, style in base.items()}
    own = getattr(model, "_tp_plan", None)
    return {**plan, **own} if isinstance(own, dict) else plan


def match_carried(survey: Survey, carried: Mapping[str, str]) -> dict[str, str]:
    """Styles from the model's plan. Blocks with an unsupported style, and modules not in the plan, are derived."""
    styles: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    for pattern, style in carried.items():
        for name in (n for n in survey.modules if n and _matches(n, pattern)):
            known = _HUGGING_FACE_STYLES.get(style, "")
            if known == "experts" and name in survey.experts:
                continue  # they are shared out in any case, or a note says why not
            if known and _fits(survey, name, known) and name not in survey.used_directly:
                styles[name] = known
            else:
                unknown.setdefault(style, []).append(name)
    for style, names in unknown.items():
        survey.notes.append(f"{', '.join(fold(names))}: the model's plan uses {style}, which Rung does not support")
        for name in names:
            block = next((b for b, _ in survey.blocks if name.startswith(f"{b}.")), name.rpartition(".")[0])
            styles = {n: w for n, w in styles.items() if not n.startswith(f"{block}.")}
    for name, style in list(styles.items()):
        if style in ("colwise_gather", "embedding") and not can_shard(
            _sharded_size(survey.modules[name], style), survey.num_ranks
        ):
            del styles[name]
    return styles


def _sharded_size(module: nn.Module, style: str) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    return num_inputs(module) if style == "rowwise" else num_outputs(module)


def check_styles(survey: Survey, styles: Mapping[str, str]) -> list[Pair]:
    """The pairs of a given plan. Raises if one is wrong, with the numbers of ranks that would be valid."""
    for name, style in styles.items():
        if style in ("whole", "summed", "experts"):
            continue
        size = _sharded_size(survey.modules[name], style)
        if not can_shard(size, survey.num_ranks):
            valid = [n for n in range(1, size + 1) if can_shard(size, n)]
            raise StrategyError(
                f"tensor parallelism on {survey.num_ranks} ranks: {name} is {style}, and its {size} "
                f"{'columns' if style == 'rowwise' else 'rows'} leave a rank with nothing. Valid: {_list(valid)}."
            )
    chosen = [n for n in survey.linears() if styles.get(n) in ("colwise", "rowwise")]
    pairs: list[Pair] = []
    unchecked: set[str] = set()
    known: dict[Any, list[Pair]] = {}
    for region, call, inside in survey.regions(chosen):
        start = f"{region}." if region else ""
        region_styles = {n.removeprefix(start): styles[n] for n in inside}
        key = (describe(call.module), tuple(region_styles.items()))
        if key not in known:
            check = survey.check(call)
            if check.reason:
                survey.notes.append(f"{region or 'the model'}: the plan was not checked, since {check.reason}")
            known[key] = _check_region(survey, check, start, region_styles)
        others = [c for c in survey.all_calls(region) if c is not call]
        if known[key] and not all(survey.still_holds(c, known[key]) for c in [call, *others]):
            raise TaskError(
                f"the tensor plan is wrong: sharded by it, {region or 'the model'} gives other results than whole. The "
                "block may differ from others of its class, or between training and eval mode."
            )
        if not known[key]:
            unchecked |= set(inside)
        pairs += [pair.below(start) for pair in known[key]]
    alone = set(chosen) - unchecked - {n for pair in pairs for n in (*pair.columns, pair.rows)}
    if alone:
        name = min(alone)
        if line := survey.deciding_line(name):
            raise TaskError(
                f"{line}\nthe tensor plan cannot be checked: {name} is {styles[name]}, and the forward around it "
                "branches on tensor values here. Leave it out of the plan, or make it colwise_gather."
            )
        raise TaskError(
            f"the tensor plan is wrong: {name} is {styles[name]} and has no partner. A colwise layer leaves its result "
            f"sharded, and a later rowwise layer must take it. Use colwise_gather for a single layer."
        )
    return pairs


def _check_region(survey: Survey, check: ShardingCheck, start: str, region_styles: Mapping[str, str]) -> list[Pair]:
    pairs: list[Pair] = []
    pending: list[str] = []
    for name in (n for n in check.order if n in region_styles):
        if region_styles[name] == "colwise":
            pending.append(name)
            continue
        pair = check.prove(pending, name, survey.num_ranks) if pending else None
        if pair is None:
            _refuse(survey, check, start, pending, name)
        else:
            pairs.append(pair)
        pending = []
    return pairs


def _refuse(survey: Survey, check: ShardingCheck, start: str, columns: Sequence[str], rows: str) -> None:
    limit = range(1, survey.num_ranks) if survey.num_ranks <= 16 else (1, 2, 4, 8, 16, 32, 64)
    valid = [n for n in limit if n < survey.num_ranks and (n == 1 or (columns and check.prove(columns, rows, n)))]
    names = ", ".join(start + name for name in columns) or "no colwise layer"
    if len(valid) > 1:
        raise StrategyError(
            f"tensor parallelism on {survey.num_ranks} ranks: with {names} colwise and {start}{rows} rowwise the block "
            f"gives other results than whole (do the ranks divide its heads?). Valid below {survey.num_ranks}: "
            f"{_list(valid)}."
        )
    raise TaskError(
        f"the tensor plan is wrong: with {names} colwise and {start}{rows} rowwise the block gives other results than "
        f"whole, on any number of ranks. Leave these out of the plan, or make them colwise_gather."
    )


def _list(numbers: Sequence[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:11]))}, ... {numbers[-1]}"
