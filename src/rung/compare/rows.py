"""Computes the figures of one row from the measurements of its ranks. Pure functions; nothing runs here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rung.compare.measure import RankMeasurement, RankProfile
from rung.compare.report.data import KINDS
from rung.compare.report.runs import logged_points
from rung.compare.variants import Variant
from rung.spec.abilities import call_axis, has_common_steps
from rung.train.heartbeat import PHASES, Peers
from rung.train.records import StepRecord

_NUM_GROUPS = 6  # of steps; a straggler must be slow in most of them
_FORWARD = ("scatter inputs", "broadcast parameters", "gather outputs")  # dp's exchanges in forward

Runs = Sequence[Sequence[RankMeasurement]]  # repeats, each with its ranks


def failed_row(variant: Variant, reason: str) -> dict[str, Any]:
    return {"strategy": variant.text, "ranks": variant.num_ranks, "status": "failed", "reason": reason}


def make_row(
    variant: Variant,
    runs: Runs,
    started: Sequence[float],
    profiles: Sequence[RankProfile],
    *,
    warmup: int,
    on_gpu: bool,
) -> dict[str, Any]:
    """The figures of one strategy's runs; `Bench.rows` adds those that need the reference."""
    steps = [[r.step_seconds for r in ranks[0].records if r.step > warmup] for ranks in runs]
    seconds = sorted(value for one in steps for value in one)
    times = {"median": statistics.median(seconds), "low": _percentile(seconds, 10), "high": _percentile(seconds, 90)}
    batch = _samples_per_step(variant, runs[0][0].records, warmup)
    first = [max(rank.first_step_at for rank in ranks) - start for ranks, start in zip(runs, started, strict=True)]
    waits = [r.data_wait_seconds for ranks in runs for r in ranks[0].records if r.step > warmup]
    messages = _messages(variant, runs, profiles)
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
        "memory": [_memory(rank, runs, profiles, on_gpu=on_gpu) for rank in range(len(runs[0]))],
        "messages": messages,
        "bytes_per_step": sum(message["bytes"] for message in messages),
        "communication": _communication(runs, profiles, warmup),
        "losses": [[r.step, r.loss] for r in runs[0][0].records],
        "logged": logged_points([(r.step, r.logged) for r in runs[0][0].records]),
        "experts": _experts(runs[0][0].records),
        "largest_difference": {"loss": None, "parameters": None},
        "timeline": _timeline(profiles),
        "slow": _slow(variant, runs, warmup),
        "predicted": None,
        "not_predicted": None,
        "prediction_error": None,
    }


def _experts(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """The rows of each expert in the first and the last step that has them."""
    found = [{"step": one.step, "layers": one.experts} for one in records if one.experts]
    return found if len(found) < 3 else [found[0], found[-1]]


def prediction_error(row: Mapping[str, Any]) -> dict[str, float | None] | None:
    """The error of each predicted figure relative to the measured one; None without a prediction."""
    predicted = row.get("predicted")
    if predicted is None:
        return None
    figures = {
        "step_seconds": row["step_seconds"]["median"],
        "peak_bytes": max(rank["peak_bytes"] for rank in row["memory"]),
        "bytes_per_step": row["bytes_per_step"],
    }
    return {key: _error(predicted.get(key), measured) for key, measured in figures.items()}


def _error(predicted: float | None, measured: float) -> float | None:
    if predicted is None or (not measured and predicted):
        return None
    return predicted / measured - 1 if measured else 0.0


def _samples_per_step(variant: Variant, records: Sequence[StepRecord], warmup: int) -> float:
    """The mean over measured steps: a small data set does not fill its batches."""
    assert variant.layout is not None
    before = next((one.samples for one in reversed(records) if one.step <= warmup), 0)
    measured = [one for one in records if one.step > warmup]
    if not measured or not has_common_steps(variant.layout):
        return variant.config.batch_size
    return (measured[-1].samples - before) / len(measured)


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.array(values), percent))


def _memory(rank: int, runs: Runs, profiles: Sequence[RankProfile], *, on_gpu: bool) -> dict[str, Any]:
    """A rank's peak memory by kind.

    The peak is the allocator's on a GPU, else the tracer's. Without a trace it is the growth of the process, of which
    only the training state is known by kind.
    """
    figures = [ranks[rank] for ranks in runs]
    traced = profiles[rank].kinds if profiles else None
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
    """Make kinds add up to the whole: a gap becomes "other", an excess is scaled away from all of them."""
    total = sum(kinds.values())
    share = min(1.0, whole / total) if total else 1.0
    found = {name: math.floor(kinds[name] * share) for name in KINDS if name != "other"}
    return {**found, "other": whole - sum(found.values())}


def _messages(variant: Variant, runs: Runs, profiles: Sequence[RankProfile]) -> list[dict[str, Any]]:
    """Rank 0's messages in a step, from the profile. For strategies that send by RPC or between threads, the traffic
    that the first rank with any counted itself; with parameter servers that is a trainer."""
    if profiles and profiles[0].followed is not None:
        return [one.as_json() for one in profiles[0].followed.messages]
    assert variant.layout is not None
    axis = call_axis(variant.layout)
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


def _communication(runs: Runs, profiles: Sequence[RankProfile], warmup: int) -> dict[str, float]:
    """Exposed and hidden communication of a step, averaged over ranks.

    Exposed are the waits of the measured steps or, where the device waits, of the followed step. Hidden is the rest of
    the followed step's messages.
    """
    waited = [value for ranks in runs for rank in ranks for value in rank.waited[warmup:]]
    followed = [profile.followed for profile in profiles if profile.followed is not None]
    on_device = [one.exposed_seconds for one in followed if one.exposed_seconds is not None]
    exposed = statistics.fmean(on_device or waited or [0.0])
    hidden = statistics.fmean([one.hidden_seconds for one in followed] or [0.0])
    whole = exposed + hidden
    return {"seconds": whole, "exposed_seconds": exposed, "exposed_share": exposed / whole if whole else 0.0}


def _timeline(profiles: Sequence[RankProfile]) -> dict[str, Any] | None:
    """The timeline of the timed step with the median length."""
    if not profiles or not all(step for profile in profiles for step in profile.steps):
        return None
    bounds = [
        (min(p.steps[k][0].start for p in profiles), max(span.end for p in profiles for span in p.steps[k]))
        for k in range(len(profiles[0].steps))
    ]
    order = sorted(range(len(bounds)), key=lambda k: bounds[k][1] - bounds[k][0])
    chosen = order[len(order) // 2]
    zero, end = bounds[chosen]
    ranks = [{"rank": p.rank, "spans": [span.as_json(zero) for span in p.steps[chosen]]} for p in profiles]
    return {"step": chosen + 1, "seconds": end - zero, "ranks": ranks}


def _slow(variant: Variant, runs: Runs, warmup: int) -> list[dict[str, Any]]:
    """Stragglers: ranks whose own work in a phase takes clearly longer than that of their peers."""
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
    groups = np.array_split(rows, min(_NUM_GROUPS, len(rows)))
    found = Peers(variant.layout, size).compare(np.array([np.median(group, axis=0) for group in groups]))
    return [
        {"rank": one.rank, "phase": one.phase, "seconds": one.seconds, "others_seconds": one.others_seconds}
        for one in found
    ]


def loss_difference(losses: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float | None:
    """The largest difference of two loss curves, relative to the second."""
    pairs = list(zip(losses, reference, strict=False))
    if len(losses) != len(reference) or not pairs:
        return None
    found = [abs(own[1] - other[1]) / max(abs(other[1]), 1e-12) for own, other in pairs]
    return math.nan if any(map(math.isnan, found)) else max(found)


def without_infinities(value: Any) -> Any:
    """Replace nan and infinity, which JSON lacks, by None."""
    if isinstance(value, dict):
        return {key: without_infinities(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
