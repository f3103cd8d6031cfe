"""Whether sending less would pay: ddp looked at again with compressed gradients, where links are what limits it.

Compression changes the numbers, so it is told beside the recommendation and never part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rung.errors import RungError
from rung.planner.estimate import Estimate, Estimator

METHODS = ("bf16", "powersgd:4", "topk:0.01")
VISIBLE = 0.1  # a share of the step in which messages are waited for
WORTH_SAYING = 1.05  # times quicker; the numbers that a step gives are worth more than less


@dataclass(frozen=True)
class Advice:
    """ddp with a `--compress` method, held against the layout that is recommended."""

    compress: str
    seconds: float
    times_quicker: float
    fits: bool


def try_compression(
    rows: Sequence[Estimate], chosen: Estimate | None, estimator: Estimator, tell: Callable[[str], None]
) -> list[Advice]:
    """What each method would give, the quickest first. Nothing where messages of ddp are hardly waited for."""
    plain = plain_ddp(rows)
    config = estimator.config
    if chosen is None or plain is None or waiting_share(plain) <= VISIBLE:
        return []
    if config.compress != "none" or config.local_steps > 1:
        return []
    found = []
    for method in METHODS:
        tell(f"ddp with --compress {method}")
        looks = Estimator(estimator.task, replace(config, compress=method), estimator.cluster, estimator.num_blocks)
        try:
            row = looks.estimate(plain.layout, plain.checkpointing, plain.micro_batch)
        except RungError:  # a model that the method refuses
            continue
        gain = chosen.time.seconds / row.time.seconds
        found.append(Advice(method, row.time.seconds, gain, row.fits(estimator.cluster)))
    return sorted(found, key=lambda one: one.seconds)


def plain_ddp(rows: Sequence[Estimate]) -> Estimate | None:
    """The quickest with whole copies of the model, the only layout whose gradients can be compressed."""
    found = [row for row in rows if row.layout.name == "ddp"]
    return min(found, key=lambda row: row.time.seconds) if found else None


def waiting_share(row: Estimate) -> float:
    """The part of a step in which computing waits for collectives."""
    return row.time.messages / row.time.seconds


def best_of(advice: Sequence[Advice]) -> Advice | None:
    """The one to tell of: the quickest that fits, or the first nearly as quick that changes the numbers less."""
    good = [one for one in advice if one.fits and one.times_quicker >= WORTH_SAYING]
    if not good:
        return None
    near = [one for one in good if one.times_quicker * WORTH_SAYING >= good[0].times_quicker]
    return min(near, key=lambda one: METHODS.index(one.compress))
