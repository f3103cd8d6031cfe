"""From what ranks measured to the figures of one row. Plain values in and out; nothing runs here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rung.compare.measure import KINDS, Look, RankFigures
from rung.compare.variants import Variant
from rung.metrics import StepRecord
from rung.pulse import PHASES, Peers

_GROUPS = 6  # of steps, in most of which a rank must be slow to be called so
_FORWARD = ("scatter inputs", "broadcast parameters", "gather outputs")  # of dp's exchanges

Runs = Sequence[Sequence[RankFigures]]  # repeats, each with its ranks


def failed_row(variant: Variant, reason: str) -> dict[str, Any]:
    return {"strategy": variant.text, "ranks": variant.num_ranks, "status": "failed", "reason": reason}


def make_row(
    variant: Variant,
    runs: Runs,
    started: Sequence[float],
    looks: Sequence[Look],
    *,
    warmup: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """Everything that one strategy's runs tell by themselves; what needs other rows is put in later."""
    steps = [[r.step_seconds for r in ranks[0].records if r.step > warmup] for ranks in runs]
    seconds = sorted(value for one in steps for value in one)
    times = {"median": statistics.median(seconds), "low": _percentile(seconds, 10), "high": _percentile(seconds, 90)}
    batch = _samples_of_a_step(variant, runs[0][0].records, warmup)
    first = [max(rank.first_step_at for rank in ranks) - start for ranks, start in zip(runs, started, strict=True)]
    waits = [r.data_wait_seconds for ranks in runs for r in ranks[0].records if r.step > warmup]
    messages = _messages(variant, runs, looks)
    return {
        "strategy": variant.text,
        "ranks": variant.num_ranks,
        "status": "ok",
        "reason": None,
        "step_seconds": {**times, "runs": [statistics.median(one) for one in steps]},
        "samples_per_second": {
            "median": batch / times["median"],
            "low": batch / times["high"],
            "high": batch / times["low"],
        },
        "speedup": None,
        "first_step_seconds": statistics.median(first),
        "data_wait_seconds": statistics.fmean(waits),
        "memory": [_memory(rank, runs, looks, on_gpu=on_gpu) for rank in range(len(runs[0]))],
        "messages": messages,
        "bytes_per_step": sum(message["bytes"] for message in messages),
        "communication": _communication(runs, looks, warmup),
        "losses": [[r.step, r.loss] for r in runs[0][0].records],
        "largest_difference": {"loss": None, "parameters": None},
        "timeline": _timeline(looks),
        "slow": _slow(variant, runs, warmup),
        "predicted": None,
        "not_predicted": None,
        "prediction_error": None,
    }


def prediction_error(row: Mapping[str, Any]) -> dict[str, float | None] | None:
    """By which share of what was measured each predicted figure is off; None where there is nothing to compare."""
    said = row.get("predicted")
    if said is None:
        return None
    was = {
        "step_seconds": row["step_seconds"]["median"],
        "peak_bytes": max(rank["peak_bytes"] for rank in row["memory"]),
        "bytes_per_step": row["bytes_per_step"],
    }
    return {key: _error(said.get(key), measured) for key, measured in was.items()}


def _error(said: float | None, was: float) -> float | None:
    if said is None or (not was and said):
        return None
    return said / was - 1 if was else 0.0


def _samples_of_a_step(variant: Variant, records: Sequence[StepRecord], warmup: int) -> float:
    """Those of a measured step on average: a small data set does not fill its batches."""
    assert variant.layout is not None
    before = next((one.samples for one in reversed(records) if one.step <= warmup), 0)
    measured = [one for one in records if one.step > warmup]
    if variant.layout.kind == "ps-async" or not measured:
        return variant.config.batch_size
    return (measured[-1].samples - before) / len(measured)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.array(values), percent))


def _memory(rank: int, runs: Runs, looks: Sequence[Look], *, on_gpu: bool) -> dict[str, Any]:
    """Of a GPU the allocator's own peak, else what the tracer saw alive at once. Where there was no tracer, the growth
    of the process, of which only the state is told apart."""
    figures = [ranks[rank] for ranks in runs]
    traced = looks[rank].kinds if looks else None
    state = figures[0].state_bytes
    kinds = dict(traced) if traced is not None else dict.fromkeys(KINDS, 0)
    if traced is None:
        kinds |= {name: state.get(name, 0) for name in ("parameters", "optimizer")}
        kinds["gradients"] = state.get("gradients", 0) or state.get("parameters", 0)
        kinds["other"] = state.get("replicas", 0) + state.get("buffers", 0)
    whole = sum(kinds.values())
    if on_gpu:
        whole = max(one.peak_bytes for one in figures)
    elif traced is None:
        whole = max(whole, *(one.grown_bytes for one in figures))
    return {
        "rank": rank,
        "peak_bytes": whole,
        "process_bytes": max(one.process_bytes for one in figures),
        "kinds": fill_up(kinds, whole),
    }


def fill_up(kinds: Mapping[str, int], whole: int) -> dict[str, int]:
    """Kinds that add up to the whole: what is missing is "other", and what is too much is taken from all alike."""
    total = sum(kinds.values())
    share = min(1.0, whole / total) if total else 1.0
    found = {name: math.floor(kinds[name] * share) for name in KINDS if name != "other"}
    return {**found, "other": whole - sum(found.values())}


def _messages(variant: Variant, runs: Runs, looks: Sequence[Look]) -> list[dict[str, Any]]:
    """Of rank 0, for a step: as they were seen, or as those count who send them beside the collectives, which among
    servers and trainers are the trainers."""
    if looks and looks[0].followed is not None:
        return [one.as_json() for one in looks[0].followed.messages]
    assert variant.layout is not None
    axis = {"dp": "devices", "rpc-pp": "stages"}.get(variant.layout.kind, "servers")
    count = len(runs[0][0].records)
    counted = next((rank.traffic for rank in runs[0] if any(one["messages"] for one in rank.traffic.values())), {})
    return [
        {
            "collective": name,
            "axis": axis,
            "phase": "forward" if name in _FORWARD else "backward" if axis == "devices" else "step",
            "calls": one["messages"] / count,
            "bytes": one["num_bytes"] / count,
        }
        for name, one in counted.items()
        if one["messages"]
    ]


def _communication(runs: Runs, looks: Sequence[Look], warmup: int) -> dict[str, float]:
    """Exposed is what ranks wait for others in measured steps, on average, unless the device waits for them; hidden is
    what was under way meanwhile in the step that was followed."""
    waited = [value for ranks in runs for rank in ranks for value in rank.waited[warmup:]]
    followed = [look.followed for look in looks if look.followed is not None]
    on_device = [one.exposed_seconds for one in followed if one.exposed_seconds is not None]
    exposed = statistics.fmean(on_device or waited or [0.0])
    hidden = statistics.fmean([one.hidden_seconds for one in followed] or [0.0])
    whole = exposed + hidden
    return {"seconds": whole, "exposed_seconds": exposed, "exposed_share": exposed / whole if whole else 0.0}


def _timeline(looks: Sequence[Look]) -> dict[str, Any] | None:
    """Of the stamped steps, the one of median length."""
    if not looks or not all(step for look in looks for step in look.steps):
        return None
    bounds = [
        (min(look.steps[k][0].start for look in looks), max(span.end for look in looks for span in look.steps[k]))
        for k in range(len(looks[0].steps))
    ]
    order = sorted(range(len(bounds)), key=lambda k: bounds[k][1] - bounds[k][0])
    chosen = order[len(order) // 2]
    zero, end = bounds[chosen]
    ranks = [{"rank": look.rank, "spans": [span.as_json(zero) for span in look.steps[chosen]]} for look in looks]
    return {"step": chosen + 1, "seconds": end - zero, "ranks": ranks}


def _slow(variant: Variant, runs: Runs, warmup: int) -> list[dict[str, Any]]:
    """Ranks that take clearly longer than their peers in a phase, in time of their own."""
    assert variant.layout is not None
    size = len(runs[0])
    if size < 2 or any(len(rank.phases) != len(runs[0][0].phases) for ranks in runs for rank in ranks):
        return []
    rows = np.array(
        [
            [[rank.phases[step].get(phase, 0.0) for phase in PHASES] for rank in ranks]
            for ranks in runs
            for step in range(warmup, len(ranks[0].phases))
        ]
    )
    groups = np.array_split(rows, min(_GROUPS, len(rows)))
    found = Peers(variant.layout, size).compare(np.array([np.median(group, axis=0) for group in groups]))
    return [
        {"rank": one.rank, "phase": one.phase, "seconds": one.seconds, "others_seconds": one.others_seconds}
        for one in found
    ]


def loss_difference(losses: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float | None:
    """The largest difference of the two curves, relative to the second."""
    pairs = list(zip(losses, reference, strict=False))
    if len(losses) != len(reference) or not pairs:
        return None
    found = [abs(own[1] - other[1]) / max(abs(other[1]), 1e-12) for own, other in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)


def without_infinities(value: Any) -> Any:
    """JSON has no nan and no infinity; they become null."""
    if isinstance(value, dict):
        return {key: without_infinities(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
