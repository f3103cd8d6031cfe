"""The best evaluation of a run, by the setting `keep_best`.

Imports no torch: the commands that list and export checkpoints read it from manifests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rung.errors import ConfigError, nearest


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    metric: str
    better: str  # max or min
    value: float
    step: int
    since: int = field(default=0, compare=False)  # evaluations after it

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Goal:
    """The metric that `keep_best` compares, and its direction."""

    metric: str
    better: str  # max or min

    def take(self, metrics: Mapping[str, float], step: int, best: Best | None) -> Best | None:
        """The best after one more evaluation. Of equal values the first wins; nan and infinity never do."""
        value = self.value_of(metrics)
        if math.isfinite(value) and (best is None or self.is_better(value, best.value)):
            return Best(self.metric, self.better, value, step)
        return replace(best, since=best.since + 1) if best is not None else None

    def value_of(self, metrics: Mapping[str, float]) -> float:
        if self.metric not in metrics:
            raise ConfigError(_no_metric(self, list(metrics)))
        return metrics[self.metric]

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.better == "max" else value < than

    def owns(self, best: Best | None) -> Best | None:
        """`best` if it was measured by this goal, else None: a run may be resumed with another goal."""
        return best if best is not None and (best.metric, best.better) == (self.metric, self.better) else None


def parse_best(text: str) -> Goal | None:
    """Parse 'loss', 'top1:max' or 'perplexity:min'; None for 'none'."""
    if text == "none":
        return None
    metric, colon, better = text.partition(":")
    if colon and better not in ("max", "min"):
        raise ConfigError(f"keep_best is METRIC:max or METRIC:min, not {text!r}.")
    if not metric:
        raise ConfigError(f"keep_best needs the name of a metric, as in top1:max, not {text!r}.")
    if not colon and metric != "loss":
        raise ConfigError(f"keep_best={metric} has no direction: write {metric}:max or {metric}:min.")
    return Goal(metric, better or "min")


def refuse_unknown_metric(goal: Goal, names: list[str]) -> None:
    """Refuse a metric that is not in `names`, the metrics of the task's evaluation."""
    if goal.metric not in names:
        raise ConfigError(_no_metric(goal, names))


def read_best(manifest: Mapping[str, Any]) -> Best | None:
    """The best evaluation so far, from a manifest."""
    found = manifest.get("best")
    if not found:
        return None
    return Best(found["metric"], found["better"], float(found["value"]), int(found["step"]), int(found.get("since", 0)))


def figure_of(manifest: Mapping[str, Any], metric: str) -> float | None:
    """A metric of the evaluation in a manifest, if there was one and the value is finite."""
    value = (manifest.get("evaluation") or {}).get(metric)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _no_metric(goal: Goal, names: list[str]) -> str:
    return (
        f"keep_best={goal.metric}:{goal.better}, and an evaluation has no {goal.metric!r}."
        f"{nearest(goal.metric, names)} It has: {', '.join(sorted(names))}."
    )
