"""Figures of steps, evaluations and whole runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rung.spec.best_metric import Best


@dataclass(frozen=True)
class StepRecord:
    """One step. Loss, waits for data and memory are those of all ranks; the times are this rank's."""

    step: int
    epoch: int
    samples: int
    loss: float
    grad_norm: float | None
    lr: float
    step_seconds: float  # without `compile_seconds`
    samples_per_second: float
    data_wait_seconds: float  # the longest wait of any rank
    slowest_reader: int  # the rank with that wait
    peak_memory_bytes: int  # the maximum over ranks
    event: str = "step"
    lrs: dict[str, float] | None = None  # the rate of each of several optimizers, by name; `lr` is the first one's
    compile_seconds: float | None = None  # of torch.compile, in a step in which it had something to do
    graph_breaks: list[str] | None = None  # why it left code of the main rank uncompiled then
    staleness: int | None = None  # ps-async: updates since the gradient's weights were read
    logged: Mapping[str, float] = field(default_factory=dict)  # by the task
    experts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # rows of each, by layer; where counted


@dataclass(frozen=True)
class EvalRecord:
    step: int
    epoch: int
    metrics: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Summary:
    steps: int
    last: StepRecord | None
    evaluation: EvalRecord | None
    stopped: bool = False  # asked to stop early, and the state is saved
    best: Best | None = None  # evaluation, by the setting keep_best

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Summary:
        """The inverse of `asdict`."""
        kinds: dict[str, type] = {"last": StepRecord, "evaluation": EvalRecord, "best": Best}
        return cls(**{k: kinds[k](**v) if k in kinds and v is not None else v for k, v in fields.items()})
