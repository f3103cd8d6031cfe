"""Which module is cut how among the ranks of the tensor axis: the task's plan, the model's own, or a derived one.

Layers are cut in pairs only where the pair is proven right (`tensor_proof`); other linear layers are cut and their
results gathered, which is always right. Knows no process group and no mesh: every rank makes the same plan alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rung.errors import StrategyError
from rung.parallel.blocks import describe
from rung.parallel.rehearsal import Call, tensors_of
from rung.parallel.tensor_layers import can_be_cut, is_linear, is_norm, is_plain, num_inputs, num_outputs, output_dim
from rung.parallel.tensor_proof import Pair, Points, Trial
from rung.parallel.tensor_survey import Survey, fold
from rung.parallel.tensor_words import carried_plan, check_words, match_carried, match_given

_SMALLEST_VOCABULARY = 16


@dataclass(frozen=True)
class TensorPlan:
    """Exact module names and their words. Inside sequence blocks, the words end in `_sequence`."""

    num_ranks: int
    styles: Mapping[str, str]
    source: str  # "task", "model" or "derived"
    whole: tuple[str, ...] = ()  # modules with parameters of their own that every rank keeps, repeats folded
    notes: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    sequence_blocks: tuple[str, ...] = ()  # between these, activations are cut along the sequence
    gathers: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)  # inside them, arguments made whole

    @property
    def keeps_vocabulary_cut(self) -> bool:
        return "vocabulary_head" in self.styles.values()


def make_plan(
    model: nn.Module,
    num_ranks: int,
    *,
    given: Mapping[str, str] | None,
    run: Callable[[], Any],
    device: torch.device,
    mode: Any = None,
    blocks: str | None = None,
    sequence_parallel: bool = False,
    vocabulary_loss: bool = True,
    proofs: dict[Any, list[Pair]] | None = None,
    quick: bool = False,
) -> TensorPlan:
    """`run` calls the model on a batch and returns its output. The model may be a skeleton without data.

    `proofs` holds what was proven of blocks before, and gets what is proven now. A `quick` plan, which nobody trains
    with, takes a proof for one that holds for blocks that look alike, and for fewer ranks that divide the proven ones.
    """
    survey = Survey(model, num_ranks, run, device, mode, blocks)
    if given:
        source, styles = "task", match_given(survey, given)
        pairs = check_words(survey, styles)
    elif carried := carried_plan(model):
        source, styles = "model", match_carried(survey, carried)
        pairs = check_words(survey, styles)
    else:
        source, styles, pairs = "derived", {}, []
    if source != "task":
        pairs += _derive(survey, styles, proofs if proofs is not None else {}, quick)
        if vocabulary_loss:
            _keep_head_cut(survey, styles)
    styles |= {name: "summed" for pair in pairs for name in pair.summed}
    _agree_on_shared(survey, styles)
    sequence = _cut_sequence(survey, styles, pairs) if sequence_parallel else {}
    styles = {name: word for name, word in styles.items() if word != "whole"}
    if not any(word != "summed" for word in styles.values()):
        raise StrategyError(
            f"tensor parallelism on {num_ranks} ranks finds nothing to cut in this model: it cuts linear layers and "
            f"embeddings with at least a row for each rank. Use a data-parallel strategy."
        )
    gathers = {f"{block}.{name}": keys for block, points in sequence.items() for name, keys in points.items()}
    owners = [n for n, m in survey.modules.items() if any(True for _ in m.parameters(recurse=False))]
    whole = tuple(fold(name or "the model itself" for name in owners if name not in styles))
    return TensorPlan(num_ranks, styles, source, whole, tuple(survey.notes), tuple(pairs), tuple(sequence), gathers)


def _derive(survey: Survey, styles: dict[str, str], proofs: dict[Any, list[Pair]], quick: bool) -> list[Pair]:
    """Fill in what `styles` leaves open; returns the pairs."""
    pairs: list[Pair] = []
    open_layers = [n for n in survey.linears() if n not in styles]
    can_pair = [n for n in open_layers if not survey.shared & set(survey.parameter_names[n])]
    known: dict[Any, list[Pair]] = {}
    found: dict[Any, list[list[Pair]]] = {}
    for region, call, inside in survey.regions(can_pair):
        start = f"{region}." if region else ""
        key = (describe(call.module), tuple(n.removeprefix(start) for n in inside))
        proven = (*key, survey.num_ranks)
        if quick:
            more = (n for *other, n in proofs if tuple(other) == key and n % survey.num_ranks == 0)
            proven = (*key, min(more, default=survey.num_ranks))
        if proven in proofs:  # in another world of the same task
            pairs += [pair.below(start) for pair in proofs[proven]]
            continue
        if key not in known:
            known[key] = _find_pairs(survey, call, set(key[1]), quick)
        own = known[key]
        if quick:
            proofs[proven] = own
            pairs += [pair.below(start) for pair in own]
            continue
        others = [c for c in survey.all_calls(region) if c is not call]
        # What looks alike need not act alike: by its number, by how it is called. So each is tried.
        if not all(survey.still_holds(c, own) for c in [call, *others]):
            own = [] if others else _find_pairs(survey, call, set(key[1]))
        found.setdefault(proven, []).append(own)
        pairs += [pair.below(start) for pair in own]
    proofs |= {key: all_own[0] for key, all_own in found.items() if all(own == all_own[0] for own in all_own)}
    for pair in pairs:
        styles.update(dict.fromkeys(pair.columns, "colwise"))
        styles[pair.rows] = "rowwise"
    gathered = []
    for name in open_layers:
        if name not in styles and can_be_cut(num_outputs(survey.modules[name]), survey.num_ranks):
            styles[name] = "colwise_gather"
            gathered.append(name)
    inside_blocks = [n for n in gathered if any(n.startswith(f"{b}.") for b, _ in survey.blocks)]
    if inside_blocks:
        survey.notes.append(
            f"{', '.join(fold(inside_blocks))}: cut, with results gathered, as no layer after could be proven to work "
            f"with a part of them on {survey.num_ranks} ranks"
        )
    for name in survey.called:
        module = survey.modules[name]
        if type(module) is not nn.Embedding or name in styles or name in survey.used_directly:
            continue
        if is_plain(module) and can_be_cut(module.num_embeddings, survey.num_ranks):
            styles[name] = "embedding"
    return pairs


def _find_pairs(survey: Survey, call: Call, allowed: set[str], quick: bool = False) -> list[Pair]:
    """In training, where it is sought, and then in evaluation."""
    trial, num_ranks = survey.trial(call), survey.num_ranks
    found = _search(trial, allowed, num_ranks)
    if quick:
        return found
    evaluated = survey.trial(call, training=False)
    return [pair for pair in found if evaluated.prove(pair.columns, pair.rows, num_ranks) is not None]


def _search(trial: Trial, allowed: set[str], num_ranks: int) -> list[Pair]:
    pairs: list[Pair] = []
    pending: list[str] = []
    for name in (n for n in trial.order if n in allowed):
        for first in range(max(0, len(pending) - 8), len(pending)):
            columns = pending[first:]
            sizes = [*(num_outputs(trial.modules[n]) for n in columns), num_inputs(trial.modules[name])]
            if any(size % num_ranks for size in sizes) and (trial.drops or _drops(trial.block)):
                # Unequal parts would draw unequally many random numbers, and masks that must be alike would differ.
                continue
            pair = trial.prove(columns, name, num_ranks)
            if pair is not None:
                pairs.append(pair)
                pending = []
                break
        else:
            pending.append(name)
    return pairs


def _drops(block: nn.Module) -> bool:
    """Whether a block has dropout that is on."""
    for module in block.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items()):
            return True
    return False


def _keep_head_cut(survey: Survey, styles: dict[str, str]) -> None:
    """The last linear layer keeps its result cut for the loss, if that result is the model's output as it is."""
    last = next((c for c in reversed(survey.leaves.calls) if is_linear(c.module)), None)
    if last is None or styles.get(last.name) != "colwise_gather":
        return
    output = survey.leaves.output
    if isinstance(output, Mapping):  # Hugging Face's carries a cache of keys and values
        output = {key: value for key, value in output.items() if not key.startswith("past_key")}
    floats = [t for t in tensors_of(output) if t.is_floating_point()]
    is_output = len(floats) == 1 and floats[0] is last.output and floats[0].dim() in (2, 3)
    if is_output and floats[0].shape[-1] >= _SMALLEST_VOCABULARY:
        styles[last.name] = "vocabulary_head"


def _agree_on_shared(survey: Survey, styles: dict[str, str]) -> None:
    """A parameter of several modules is cut one way, or not at all."""
    while clash := _find_clash(survey, styles):
        parameter, users = clash
        if paired := [name for name in users if styles.get(name) in ("colwise", "rowwise")]:
            raise StrategyError(
                f"the tensor plan cuts {parameter} in {paired[0]}, but other modules have it, too: {', '.join(users)}."
            )
        survey.notes.append(f"{', '.join(users)}: left whole, as they share {parameter} and cannot be cut alike")
        for name in users:  # which may leave another parameter of theirs in disagreement
            styles.pop(name, None)


def _find_clash(survey: Survey, styles: Mapping[str, str]) -> tuple[str, list[str]] | None:
    dims: dict[str, dict[str, int | None]] = {}
    for name, own in survey.parameter_names.items():
        word = styles.get(name, "whole")
        for parameter in set(own) & survey.shared:
            dim: int | None = None
            if word not in ("whole", "summed"):
                is_bias = survey.model.get_parameter(parameter).dim() == 1
                dim = 0 if is_bias or word == "embedding" else output_dim(survey.modules[name])
                if word == "rowwise":
                    dim = None if is_bias else 1 - dim
            dims.setdefault(parameter, {})[name] = dim
    return next(((p, list(users)) for p, users in dims.items() if len(set(users.values())) > 1), None)


def _cut_sequence(survey: Survey, styles: dict[str, str], pairs: Sequence[Pair]) -> dict[str, Points]:
    """The consecutive blocks between which activations can be cut along the sequence, and where they gather them.

    The words of their modules are changed.
    """
    verdicts: dict[Any, Points | str] = {}
    run: dict[str, Points] = {}
    last: Call | None = None
    reason = "no block is called"
    for call in survey.in_blocks.calls:
        start = f"{call.name}."
        own = tuple(pair.within(start) for pair in pairs if pair.rows.startswith(start))
        key = (describe(call.module), own)
        if key not in verdicts:
            trial = survey.trial(call)
            verdicts[key] = trial.reason or trial.prove_sequence(own, survey.num_ranks)
        verdict = verdicts[key]
        norms = [f"{start}{n}" for n, m in call.module.named_modules() if is_norm(m)]
        if not all(survey.is_called_within(norm, call.name) for norm in norms) or call.name in run:
            verdict = "it, or a norm of it, is called more than once"
        problem = verdict if isinstance(verdict, str) else _break(survey, last, call)
        if problem:
            reason = f"{call.name}: {problem}"
            if len(run) > 1:
                break
            run, last = {}, None
        if not isinstance(verdict, str):
            run[call.name], last = verdict, call
    if last is None:
        survey.notes.append(f"sequence parallelism is off. {reason}")
        return {}
    length = last.args[0].shape[1]
    if length % survey.num_ranks:
        below = length // survey.num_ranks * survey.num_ranks
        raise StrategyError(
            f"sequence parallelism cannot cut sequences of {length} among {survey.num_ranks} ranks in equal parts. "
            f"Valid lengths near by: {', '.join(str(n) for n in (below, below + survey.num_ranks) if n)}."
        )
    for name, module in survey.modules.items():
        if any(name.startswith(f"{block}.") for block in run):
            if styles.get(name) in ("colwise", "rowwise"):
                styles[name] += "_sequence"
            elif is_norm(module) and any(True for _ in module.parameters()):
                styles[name] = "summed"
    if len(run) < len(survey.in_blocks.calls):
        survey.notes.append(f"sequence parallelism in {', '.join(fold(run))} only. {reason}")
    return run


def _break(survey: Survey, before: Call | None, call: Call) -> str:
    """Why a block does not simply go on from the one before it; nothing if it does."""
    if before is None:
        return ""
    source = (before.index, 0)
    users = [c.index for c in survey.in_blocks.calls if source in c.needs]
    if call.args[0] is tensors_of(before.output)[0] and users == [call.index] and source not in survey.in_blocks.needs:
        return ""
    return f"it is not given {before.name}'s result as it is, or other code uses that, too"
