"""The tensor-parallel plan: a style for each module, from the task, from the model, or derived.

Layers form a colwise/rowwise pair only if `validate.py` has checked the pair; other linear layers are sharded and their
results gathered, which is always correct. This module uses no process group: every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rung.distributed.torch_private import Dropout
from rung.errors import StrategyError, TaskError
from rung.parallel.blocks import BlockReuse, describe, fold
from rung.parallel.experts.validate import ExpertCall
from rung.parallel.forward_trace import Call, tensors_of
from rung.parallel.linear_layers import can_shard, is_linear, is_norm, is_plain, num_inputs, num_outputs, output_dim
from rung.parallel.tensor.survey import Survey
from rung.parallel.tensor.user_plan import carried_plan, check_styles, match_carried, match_given
from rung.parallel.tensor.validate import Pair, Points, ShardingCheck

_SMALLEST_VOCABULARY = 16


@dataclass(frozen=True)
class TensorPlan:
    """Module names and their styles. Inside sequence-parallel blocks the styles end in `_sequence`."""

    num_ranks: int
    styles: Mapping[str, str]
    source: str  # "task", "model" or "derived"
    whole: tuple[str, ...] = ()  # modules whose parameters are replicated, block numbers folded
    notes: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    sequence_blocks: tuple[str, ...] = ()  # between these, activations are sharded along the sequence
    gathers: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)  # module -> arguments it gathers
    experts: Mapping[str, ExpertCall] = field(default_factory=dict)  # modules whose experts are shared out

    @property
    def keeps_vocabulary_cut(self) -> bool:
        return "vocabulary_head" in self.styles.values()


def make_plan(
    survey: Survey,
    given: Mapping[str, str] | None = None,
    *,
    sequence_parallel: bool = False,
    vocabulary_loss: bool = True,
    reuse: BlockReuse | None = None,
) -> TensorPlan:
    """Plan from the task's styles (`given`), else from the plan that the model carries, else derived.

    `reuse` caches checked pairs across plans. A quick plan, used for estimates only, trusts a cached check for blocks
    of equal types and shapes, and for fewer ranks that divide the checked number.
    """
    num_ranks = survey.num_ranks
    if given:
        source, styles = "task", match_given(survey, given)
        pairs = check_styles(survey, styles)
    elif carried := carried_plan(survey.model):
        source, styles = "model", match_carried(survey, carried)
        try:
            pairs = check_styles(survey, styles)
        except TaskError as error:  # which the user cannot change, and no number of ranks would help
            survey.notes.append(f"the model's own plan does not hold, so that a plan is derived: {error}")
            source, styles, pairs = "derived", {}, []
    else:
        source, styles, pairs = "derived", {}, []
    if source != "task":
        pairs += _derive(survey, styles, reuse or BlockReuse())
        if vocabulary_loss:
            _keep_head_cut(survey, styles)
    styles |= {name: "summed" for pair in pairs for name in pair.summed}
    _drop_conflicting_styles(survey, styles)
    sequence = _plan_sequence(survey, styles, pairs) if sequence_parallel else {}
    styles = {name: style for name, style in styles.items() if style != "whole"}
    if not any(style != "summed" for style in styles.values()):
        raise StrategyError(
            f"tensor parallelism on {num_ranks} ranks finds nothing to shard in this model: it shards linear layers "
            f"and embeddings with at least a row for each rank. Use a data-parallel strategy."
        )
    gathers = {f"{block}.{name}": keys for block, points in sequence.items() for name, keys in points.items()}
    owners = [n for n, m in survey.modules.items() if any(True for _ in m.parameters(recurse=False))]
    whole = tuple(fold(name or "the model itself" for name in owners if name not in styles))
    experts = {n: call for n, call in survey.experts.items() if isinstance(call, ExpertCall) and n in styles}
    return TensorPlan(
        num_ranks, styles, source, whole, tuple(survey.notes), tuple(pairs), tuple(sequence), gathers, experts
    )


def plan_adapters(plan: TensorPlan, layers: Mapping[str, Any]) -> TensorPlan:
    """The plan with adapters beside these layers, from that of the model without any.

    An adapted layer is linear, so what is proven for the plain one holds. Cut by outputs, B is cut alike, and A with
    its result is the same on all ranks. Cut by inputs, A is cut alike and its result summed over the ranks.
    """
    adapted = {name: layer for name, layer in layers.items() if name in plan.styles}
    if not adapted:
        return plan
    styles: dict[str, str] = {}
    for name, style in plan.styles.items():
        layer = adapted.get(name)
        if layer is None:
            styles[name] = style
            continue
        known = ("base_layer.", "lora_A.", "lora_B.", "lora_embedding_")
        if other := [key for key, _ in layer.named_parameters() if not key.startswith(known)]:
            raise StrategyError(
                f"{name}: its adapter is more than A and B (it has {other[0]}, as peft's DoRA), and tensor parallelism "
                "would compute that from a part of the weight. Use a strategy that leaves weights whole, such as zero3."
            )
        styles[_base_layer(name, adapted)] = style
        by_inputs = style == "rowwise"
        inner = "lora_A" if by_inputs else "lora_B"
        styles |= {f"{name}.{inner}.{adapter}": style for adapter in getattr(layer, inner)}
        dropouts = getattr(layer, "lora_dropout", nn.ModuleDict()).values()
        size = num_inputs(layer.base_layer)
        if by_inputs and size % plan.num_ranks and any(getattr(dropout, "p", 0) > 0 for dropout in dropouts):
            raise StrategyError(
                f"{name}: {plan.num_ranks} tensor ranks have unequal parts of its {size} inputs, and with dropout in "
                "its adapter they would draw unequal numbers. Leave dropout out, or use another number of tensor ranks."
            )
    pairs = [
        replace(
            pair, columns=tuple(_base_layer(n, adapted) for n in pair.columns), rows=_base_layer(pair.rows, adapted)
        )
        for pair in plan.pairs
    ]
    return replace(plan, styles=styles, pairs=tuple(pairs))


def plan_outside(plan: TensorPlan, modules: set[str]) -> TensorPlan:
    """The plan without what lies in some modules, which stay whole, and without the partners of that."""

    def is_inside(name: str) -> bool:
        return any(name == one or name.startswith(f"{one}.") for one in modules)

    dropped = [pair for pair in plan.pairs if any(map(is_inside, (*pair.columns, pair.rows)))]
    partners = {name for pair in dropped for name in (*pair.columns, pair.rows, *pair.summed)}
    styles = {n: style for n, style in plan.styles.items() if n not in partners and not is_inside(n)}
    return replace(plan, styles=styles, pairs=tuple(pair for pair in plan.pairs if pair not in dropped))


def _base_layer(name: str, adapted: Mapping[str, Any]) -> str:
    return f"{name}.base_layer" if name in adapted else name


def _derive(survey: Survey, styles: dict[str, str], reuse: BlockReuse) -> list[Pair]:
    """Add styles for modules that have none; returns the pairs."""
    proofs, quick = reuse.proofs, reuse.is_quick
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
        if proven in proofs:  # checked by an earlier plan of the same task
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
        # Blocks of equal shapes may still differ (by layer index, by how they are called), so every one is checked.
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
        size = num_outputs(survey.modules[name])
        if name not in styles and can_shard(size, survey.num_ranks) and not survey.is_router(name, size):
            styles[name] = "colwise_gather"
            gathered.append(name)
    inside_blocks = [n for n in gathered if any(n.startswith(f"{b}.") for b, _ in survey.blocks)]
    if inside_blocks:
        survey.notes.append(
            f"{', '.join(fold(inside_blocks))}: sharded, with results gathered: no later layer is known to be correct "
            f"on a part of them on {survey.num_ranks} ranks"
        )
    for name in survey.called:
        module = survey.modules[name]
        if type(module) is not nn.Embedding or name in styles or name in survey.used_directly:
            continue
        if is_plain(module) and can_shard(module.num_embeddings, survey.num_ranks):
            styles[name] = "embedding"
    for name, shared in survey.experts.items():
        if isinstance(shared, ExpertCall):
            styles.setdefault(name, "experts")
    left = {fold([name])[0]: reason for name, reason in survey.experts.items() if isinstance(reason, str)}
    survey.notes.extend(f"{name}: left whole: {reason}" for name, reason in left.items())
    return pairs


def _find_pairs(survey: Survey, call: Call, allowed: set[str], quick: bool = False) -> list[Pair]:
    """Pairs that are valid in training mode and, unless `quick`, in eval mode too."""
    check, num_ranks = survey.check(call), survey.num_ranks
    found = _search(check, allowed, num_ranks)
    if quick:
        return found
    evaluated = survey.check(call, training=False)
    return [pair for pair in found if evaluated.prove(pair.columns, pair.rows, num_ranks) is not None]


def _search(check: ShardingCheck, allowed: set[str], num_ranks: int) -> list[Pair]:
    pairs: list[Pair] = []
    pending: list[str] = []
    for name in (n for n in check.order if n in allowed):
        for first in range(max(0, len(pending) - 8), len(pending)):  # most layers first, at most 8
            columns = pending[first:]
            sizes = [*(num_outputs(check.modules[n]) for n in columns), num_inputs(check.modules[name])]
            if any(size % num_ranks for size in sizes) and (check.has_dropout or _has_active_dropout(check.block)):
                # Ranks with unequal parts draw different amounts of random numbers; later masks, which must be equal on
                # all ranks, would differ.
                continue
            pair = check.prove(columns, name, num_ranks)
            if pair is not None:
                pairs.append(pair)
                pending = []
                break
        else:
            pending.append(name)
    return pairs


def _has_active_dropout(block: nn.Module) -> bool:
    """Whether a module of the block has a dropout probability above 0."""
    for module in block.modules():
        if isinstance(module, Dropout) and module.p > 0:
            return True
        if any("drop" in key and isinstance(value, float) and value > 0 for key, value in vars(module).items()):
            return True
    return False


def _keep_head_cut(survey: Survey, styles: dict[str, str]) -> None:
    """Leave the logits sharded for the loss, if the result of the last linear layer is the model's output."""
    last = next((c for c in reversed(survey.leaves.calls) if is_linear(c.module)), None)
    if last is None or styles.get(last.name) != "colwise_gather":
        return
    output = survey.leaves.output
    if isinstance(output, Mapping):  # Hugging Face outputs carry a key-value cache
        output = {key: value for key, value in output.items() if not key.startswith("past_key")}
    floats = [t for t in tensors_of(output) if t.is_floating_point()]
    is_output = len(floats) == 1 and floats[0] is last.output and floats[0].dim() in (2, 3)
    if is_output and floats[0].shape[-1] >= _SMALLEST_VOCABULARY:
        styles[last.name] = "vocabulary_head"


def _drop_conflicting_styles(survey: Survey, styles: dict[str, str]) -> None:
    """Remove the styles of modules that share a parameter but would shard it differently."""
    while conflict := _find_conflict(survey, styles):
        parameter, users = conflict
        if paired := [name for name in users if styles.get(name) in ("colwise", "rowwise")]:
            raise StrategyError(
                f"the tensor plan shards {parameter} in {paired[0]}, but these modules share it: {', '.join(users)}."
            )
        survey.notes.append(f"{', '.join(users)}: left whole, as they share {parameter} and need different shards")
        for name in users:  # this may put another parameter of theirs into conflict, hence the loop
            styles.pop(name, None)


def _find_conflict(survey: Survey, styles: Mapping[str, str]) -> tuple[str, list[str]] | None:
    dims: dict[str, dict[str, int | None]] = {}
    for name, own in survey.parameter_names.items():
        style = styles.get(name, "whole")
        for parameter in set(own) & survey.shared:
            dim: int | None = None
            if style not in ("whole", "summed"):
                is_bias = survey.model.get_parameter(parameter).dim() == 1
                dim = 0 if is_bias or style in ("embedding", "experts") else output_dim(survey.modules[name])
                if style == "rowwise":
                    dim = None if is_bias else 1 - dim
            dims.setdefault(parameter, {})[name] = dim
    return next(((p, list(users)) for p, users in dims.items() if len(set(users.values())) > 1), None)


def _plan_sequence(survey: Survey, styles: dict[str, str], pairs: Sequence[Pair]) -> dict[str, Points]:
    """Consecutive blocks that can run on a part of the sequence -> where they gather it. Updates their styles."""
    verdicts: dict[Any, Points | str] = {}
    run: dict[str, Points] = {}
    last: Call | None = None
    reason = "no block is called"
    for call in survey.in_blocks.calls:
        start = f"{call.name}."
        own = tuple(pair.within(start) for pair in pairs if pair.rows.startswith(start))
        key = (describe(call.module), own)
        if key not in verdicts:
            check = survey.check(call)
            verdicts[key] = check.reason or check.prove_sequence(own, survey.num_ranks)
        verdict = verdicts[key]
        norms = [f"{start}{n}" for n, m in call.module.named_modules() if is_norm(m)]
        if not all(survey.is_called_within(norm, call.name) for norm in norms) or call.name in run:
            verdict = "it, or a norm of it, is called more than once"
        if call.reads_values:
            verdict = f"it branches on values, which differ between parts of the sequence ({call.reads_values})"
        problem = verdict if isinstance(verdict, str) else _discontinuity(survey, last, call)
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
            f"sequence parallelism cannot split sequences of {length} among {survey.num_ranks} ranks in equal parts. "
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


def _discontinuity(survey: Survey, before: Call | None, call: Call) -> str:
    """Why a block does not directly continue the one before it; empty if it does."""
    if before is None:
        return ""
    source = (before.index, 0)
    users = [c.index for c in survey.in_blocks.calls if source in c.needs]
    if call.args[0] is tensors_of(before.output)[0] and users == [call.index] and source not in survey.in_blocks.needs:
        return ""
    return f"it does not take the unchanged result of {before.name}, or other code uses that result too"
