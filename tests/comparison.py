"""A comparison as `rung compare` writes it, with invented figures that hang together: for tests of what shows it."""

from __future__ import annotations

from typing import Any

MIB = 2**20
HOSTILE = 'RuntimeError: </script><script>alert(1)</script> & "quotes" | pipes `ticks` <b>bold</b>'
_STATE = {"parameters": 24, "gradients": 24, "optimizer": 48, "activations": 60, "other": 9}  # MiB on one process


def sample() -> dict[str, Any]:
    """One process, sharding, a pipeline, eight ranks, one without a prediction, and one that failed."""
    rows = [
        _row("single", 1, 0.120, {}),
        _row("ddp", 2, 0.072, {"all-reduce": (24, 3)}, halved={"activations"}),
        _row("zero1", 2, 0.078, {"all-reduce": (24, 3), "all-gather": (24, 1)}, halved={"activations", "optimizer"}),
        _row("zero3", 2, 0.091, {"all-gather": (48, 12), "reduce-scatter": (24, 6)}, halved=set(_STATE), slow=True),
        _row("pp2", 2, 0.083, {"send": (3, 8), "receive": (3, 8)}, halved=set(_STATE), micro_batches=4),
        _row("ps-async", 8, 0.064, {"send": (24, 8), "broadcast": (0.001, 1)}, halved={"activations"}, predicted=False),
        {"strategy": "tp2", "ranks": 2, "status": "failed", "reason": HOSTILE},
    ]
    return {
        "format": "rung-compare 1",
        "rung": "0.1.0",
        "torch": "2.13.0",
        "made": "2026-11-15T19:00:00+00:00",
        "task": "babycnn",
        "machine": {
            "processor": "A processor", "cores": 2, "device": "cpu", "device_name": "2 cores of a processor",
            "memory_bytes": 16 * 2**30,
        },
        "settings": {
            "nproc": 2, "steps": 20, "warmup": 3, "repeats": 3, "batch_size": 64, "precision": "fp32", "seed": 0,
            "command": "rung compare examples/babycnn/task.py --nproc 2",
        },
        "reference": "single",
        "rows": rows,
        "verdict": {
            "sentence": "On 2 processes, ddp trains babycnn 1.67 times as fast as one process.",
            "recommendation": "Use ddp: everything fits, and it sends the least.",
            "strategy": "ddp",
        },
    }  # fmt: skip


def _row(
    name: str,
    ranks: int,
    seconds: float,
    messages: dict[str, tuple[float, int]],
    *,
    halved: set[str] = frozenset(),  # type: ignore[assignment]
    slow: bool = False,
    micro_batches: int = 0,
    predicted: bool = True,
) -> dict[str, Any]:
    kinds = {kind: int(size * MIB / (ranks if kind in halved else 1)) for kind, size in _STATE.items()}
    peak, sent = sum(kinds.values()), int(sum(size for size, _ in messages.values()) * MIB)
    layers = {
        "blocks.0.experts": {"rows": [40, 0, 88, 128], "choices": 256, "dropped": 0},
        "blocks.1.<experts>": {"rows": [64, 60, 70, 30], "empty": 32, "rows_in": 128},
    }
    losses = [[step, 2.3 * 0.93**step + 0.02 * (step % 3) + ranks * 1e-8] for step in range(1, 21)]
    return {
        "strategy": name,
        "ranks": ranks,
        "status": "ok",
        "reason": None,
        "step_seconds": {"median": seconds, "low": 0.95 * seconds, "high": 1.1 * seconds, "runs": [seconds] * 3},
        "samples_per_second": {"median": 64 / seconds, "low": 64 / (1.1 * seconds), "high": 64 / (0.95 * seconds)},
        "speedup": 0.120 / seconds,
        "first_step_seconds": 2.0 + 0.3 * ranks,
        "data_wait_seconds": 0.002,
        "memory": [
            {"rank": rank, "peak_bytes": peak, "process_bytes": 400 * MIB + peak, "kinds": kinds}
            for rank in range(ranks)
        ],
        "messages": [
            {
                "collective": collective,
                "axis": "dp_shard",
                "phase": "backward",
                "calls": calls,
                "bytes": int(size * MIB),
            }
            for collective, (size, calls) in messages.items()
        ],
        "bytes_per_step": sent,
        "communication": {
            "seconds": 0.02 if sent else 0.0,
            "exposed_seconds": 0.01 if sent else 0.0,
            "exposed_share": 0.5 if sent else 0.0,
        },
        "losses": losses,
        "experts": [{"step": 1, "layers": layers}, {"step": 20, "layers": layers}] if name in ("single", "ddp") else [],
        "largest_difference": {"loss": ranks * 1e-8 if ranks > 1 else 0.0, "parameters": None if slow else 1e-7},
        "timeline": {"step": 9, "seconds": seconds, "ranks": _lanes(ranks, seconds, bool(sent), micro_batches)},
        "slow": [{"rank": 1, "phase": "backward", "seconds": 0.05, "others_seconds": 0.03}] if slow else [],
        "predicted": {"step_seconds": 1.1 * seconds, "peak_bytes": int(0.98 * peak), "bytes_per_step": sent}
        if predicted
        else None,
        "not_predicted": None if predicted else "the planner knows nothing of servers",
    }


def _lanes(ranks: int, seconds: float, sends: bool, micro_batches: int) -> list[dict[str, Any]]:
    return [{"rank": rank, "spans": _spans(rank, ranks, seconds, sends, micro_batches)} for rank in range(ranks)]


def _spans(rank: int, ranks: int, seconds: float, sends: bool, micro_batches: int) -> list[dict[str, Any]]:
    spans = [_span("data", 0, 0.03, seconds)]
    if micro_batches:
        part = 0.9 / (3 * (micro_batches + ranks - 1))
        turned = 0.03 + part * (micro_batches + ranks - 1)
        for number in range(micro_batches):
            start = 0.03 + part * (rank + number)
            spans.append(_span("forward", start, start + part, seconds, number))
            start = turned + 2 * part * (ranks - 1 - rank + number)
            spans.append(_span("backward", start, start + 2 * part, seconds, number))
    else:
        spans += [_span("forward", 0.03, 0.33, seconds), _span("backward", 0.33, 0.85, seconds)]
    if sends:
        spans.append(_span("communication", 0.55, 0.93, seconds))
    return [*spans, _span("update", 0.93, 1.0, seconds)]


def _span(what: str, start: float, end: float, seconds: float, micro_batch: int | None = None) -> dict[str, Any]:
    return {"what": what, "start": start * seconds, "end": end * seconds, "micro_batch": micro_batch}
