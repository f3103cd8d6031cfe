"""Plans that are given: the task's words for its modules, or those that a Hugging Face model carries; both checked."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from rung.errors import StrategyError, TaskError, nearest
from rung.parallel.blocks import describe
from rung.parallel.tensor_layers import can_be_cut, is_linear, is_norm, is_plain, num_inputs, num_outputs
from rung.parallel.tensor_proof import Pair, Trial
from rung.parallel.tensor_survey import Survey, fold

# What a task may say of a module.
WORDS = {
    "colwise": "a linear layer cut by its outputs; each rank keeps its part of the result",
    "rowwise": "a linear layer cut by its inputs, which are the parts that colwise layers left; the results are summed",
    "colwise_gather": "a linear layer cut by its outputs; the parts of the result are gathered",
    "embedding": "an embedding cut by its rows",
    "vocabulary_head": "a linear layer whose result stays cut for the loss",
    "summed": "a norm between colwise and rowwise layers: whole, its gradient summed over the ranks",
    "whole": "the same on every rank",
}
# Hugging Face's words for the same. What is not here leaves the module as derivation has it.
_MODEL_WORDS = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_rep": "colwise_gather",
    "colwise_gather_output": "colwise_gather",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "summed",
}


def match_given(survey: Survey, given: Mapping[str, str]) -> dict[str, str]:
    styles: dict[str, str] = {}
    for pattern, word in given.items():
        if word not in WORDS:
            raise TaskError(
                f"tensor plan: {word!r} for {pattern!r} is not one of {', '.join(WORDS)}.{nearest(word, WORDS)}"
            )
        found = [n for n in survey.modules if n and _matches(n, pattern)]
        if not found:
            raise TaskError(
                f"tensor plan: {pattern!r} matches no module of the model."
                f"{nearest(pattern, [*fold(survey.modules), *survey.modules])}"
            )
        for name in found:
            module = survey.modules[name]
            word_here = "embedding" if word == "rowwise" and type(module) is nn.Embedding else word
            if not _fits(module, word_here):
                raise TaskError(f"tensor plan: {name} is a {type(module).__name__} and cannot be {word}, as it is.")
            if word_here not in ("whole", "summed") and name in survey.used_directly:
                raise TaskError(f"tensor plan: {name} cannot be cut: its weight is also used by other code.")
            styles[name] = word_here
    return styles


def _matches(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")


def _fits(module: nn.Module, word: str) -> bool:
    if word == "whole":
        return True
    if word == "embedding":
        return type(module) is nn.Embedding and is_plain(module)
    return is_norm(module) if word == "summed" else is_linear(module)


def carried_plan(model: nn.Module) -> dict[str, str]:
    """Hugging Face's plan: the configuration's for the base model, and the model's own for the head."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
    prefix = getattr(model, "base_model_prefix", "")
    start = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    plan = {f"{start}{pattern}": word for pattern, word in base.items()}
    own = getattr(model, "_tp_plan", None)
    return {**plan, **own} if isinstance(own, dict) else plan


def match_carried(survey: Survey, carried: Mapping[str, str]) -> dict[str, str]:
    """A block in which a word cannot be honoured is left to derivation, and so is what is not in the plan."""
    styles: dict[str, str] = {}
    unknown: dict[str, list[str]] = {}
    for pattern, word in carried.items():
        for name in (n for n in survey.modules if n and _matches(n, pattern)):
            known = _MODEL_WORDS.get(word, "")
            if known and _fits(survey.modules[name], known) and name not in survey.used_directly:
                styles[name] = known
            else:
                unknown.setdefault(word, []).append(name)
    for word, names in unknown.items():
        survey.notes.append(f"{', '.join(fold(names))}: the model's plan says {word}, which Rung does not know")
        for name in names:
            block = next((b for b, _ in survey.blocks if name.startswith(f"{b}.")), name.rpartition(".")[0])
            styles = {n: w for n, w in styles.items() if not n.startswith(f"{block}.")}
    for name, word in list(styles.items()):
        if word in ("colwise_gather", "embedding") and not can_be_cut(
            _cut_size(survey.modules[name], word), survey.num_ranks
        ):
            del styles[name]
    return styles


def _cut_size(module: nn.Module, word: str) -> int:
    if isinstance(module, nn.Embedding):
        return module.num_embeddings
    return num_inputs(module) if word == "rowwise" else num_outputs(module)


def check_words(survey: Survey, styles: Mapping[str, str]) -> list[Pair]:
    """The pairs that a given plan means. One that is wrong is refused, with the numbers of ranks that are right."""
    for name, word in styles.items():
        if word in ("whole", "summed"):
            continue
        size = _cut_size(survey.modules[name], word)
        if not can_be_cut(size, survey.num_ranks):
            valid = [n for n in range(1, size + 1) if can_be_cut(size, n)]
            raise StrategyError(
                f"tensor parallelism on {survey.num_ranks} ranks: {name} is {word}, and its {size} "
                f"{'columns' if word == 'rowwise' else 'rows'} leave a rank with nothing. Valid: {_list(valid)}."
            )
    chosen = [n for n in survey.linears() if styles.get(n) in ("colwise", "rowwise")]
    pairs: list[Pair] = []
    unchecked: set[str] = set()
    known: dict[Any, list[Pair]] = {}
    for region, call, inside in survey.regions(chosen):
        start = f"{region}." if region else ""
        words = {n.removeprefix(start): styles[n] for n in inside}
        key = (describe(call.module), tuple(words.items()))
        if key not in known:
            trial = survey.trial(call)
            if trial.reason:
                survey.notes.append(f"{region or 'the model'}: the plan was not checked, since {trial.reason}")
            known[key] = _check_region(survey, trial, start, words)
        others = [c for c in survey.all_calls(region) if c is not call]
        if known[key] and not all(survey.still_holds(c, known[key]) for c in [call, *others]):
            raise TaskError(
                f"the tensor plan is wrong: {region or 'the model'} computes something else when it is cut so. A block "
                "may act unlike others of its kind, or unlike itself in training."
            )
        if not known[key]:
            unchecked |= set(inside)
        pairs += [pair.below(start) for pair in known[key]]
    alone = set(chosen) - unchecked - {n for pair in pairs for n in (*pair.columns, pair.rows)}
    if alone:
        name = min(alone)
        raise TaskError(
            f"the tensor plan is wrong: {name} is {styles[name]} and has no partner. A colwise layer keeps a part of "
            f"its result, which a rowwise one after it must take. Use colwise_gather for a layer alone."
        )
    return pairs


def _check_region(survey: Survey, trial: Trial, start: str, words: Mapping[str, str]) -> list[Pair]:
    pairs: list[Pair] = []
    pending: list[str] = []
    for name in (n for n in trial.order if n in words):
        if words[name] == "colwise":
            pending.append(name)
            continue
        pair = trial.prove(pending, name, survey.num_ranks) if pending else None
        if pair is None:
            _refuse(survey, trial, start, pending, name)
        else:
            pairs.append(pair)
        pending = []
    return pairs


def _refuse(survey: Survey, trial: Trial, start: str, columns: Sequence[str], rows: str) -> None:
    limit = range(1, survey.num_ranks) if survey.num_ranks <= 16 else (1, 2, 4, 8, 16, 32, 64)
    valid = [n for n in limit if n < survey.num_ranks and (n == 1 or (columns and trial.prove(columns, rows, n)))]
    names = ", ".join(start + name for name in columns) or "no colwise layer"
    if len(valid) > 1:
        raise StrategyError(
            f"tensor parallelism on {survey.num_ranks} ranks: cutting {names} for {start}{rows} does not give what the "
            f"whole block gives (as when ranks do not divide heads). Valid below {survey.num_ranks}: {_list(valid)}."
        )
    raise TaskError(
        f"the tensor plan is wrong: with {names} colwise and {start}{rows} rowwise the block does not give what it "
        f"gives whole, on any number of ranks. Leave these out of the plan, or make them colwise_gather."
    )


def _list(numbers: Sequence[int]) -> str:
    return (
        ", ".join(map(str, numbers))
        if len(numbers) <= 12
        else f"{', '.join(map(str, numbers[:11]))}, ... {numbers[-1]}"
    )
