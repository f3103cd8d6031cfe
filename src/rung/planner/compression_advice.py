"""Estimate ddp with compressed gradients, if communication limits it.

Compression changes the results of training, so it is advice beside the recommendation and never part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rung.errors import RungError
from rung.planner.estimate import Estimate, Estimator
from rung.spec.abilities import can

METHODS = ("bf16", "powersgd:4", "topk:0.01")
VISIBLE = 0.1  # share of a step spent waiting for messages below which no advice is given
WORTH_SAYING = 1.05  # a smaller speedup is not worth changed numbers


@dataclass(frozen=True)
class Advice:
    """ddp with a `--compress` method, compared with the recommended layout."""

    compress: str
    seconds: float
    times_quicker: float
    fits: bool


def try_compression(
    rows: Sequence[Estimate], chosen: Estimate | None, estimator: Estimator, progress: Callable[[str], None]
) -> list[Advice]:
    """Estimates of each method, the fastest first; empty if ddp spends little time waiting for messages."""
    plain = plain_ddp(rows)
    config = estimator.config
    if chosen is None or plain is None or waiting_share(plain) <= VISIBLE:
        return []
    if config.compress != "none" or config.local_steps > 1:
        return []
    found = []
    for method in METHODS:
        progress(f"ddp with --compress {method}")
        compressed = Estimator(
            estimator.task, replace(config, compress=method), estimator.cluster, estimator.num_blocks
        )
        try:
            row = compressed.estimate(plain.layout, plain.checkpointing, plain.micro_batch)
        except RungError:  # the method refuses this model
            continue
        gain = chosen.time.seconds / row.time.seconds
        found.append(Advice(method, row.time.seconds, gain, row.fits(estimator.cluster)))
    return sorted(found, key=lambda one: one.seconds)


def plain_ddp(rows: Sequence[Estimate]) -> Estimate | None:
    """The fastest layout whose gradients can be compressed: replicas of the whole model."""
    found = [row for row in rows if can(row.layout, "compress")]
    return min(found, key=lambda row: row.time.seconds) if found else None


def waiting_share(row: Estimate) -> float:
    """The share of a step in which computation waits for collectives."""
    return row.time.messages / row.time.seconds


def best_of(advice: Sequence[Advice]) -> Advice | None:
    """The fastest method that fits, or one nearly as fast that changes the numbers less."""
    good = [one for one in advice if one.fits and one.times_quicker >= WORTH_SAYING]
    if not good:
        return None
    near = [one for one in good if one.times_quicker * WORTH_SAYING >= good[0].times_quicker]
    return min(near, key=lambda one: METHODS.index(one.compress))
