"""The planner's prediction for a row: memory and messages from dry runs, time if this machine is calibrated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rung.compare.variants import Variant
from rung.errors import RungError
from rung.hardware.cluster import Cluster
from rung.planner.cost import step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.memory import ROUNDING, find_peak
from rung.spec.abilities import can
from rung.spec.task import Task

_CALIBRATE = "the time of a step cannot be predicted without a record of this machine: run `rung calibrate`"


@dataclass(frozen=True)
class Prediction:
    """`why_not` is the reason why some or all of the figures are missing."""

    figures: dict[str, Any] | None
    why_not: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"predicted": self.figures, "not_predicted": self.why_not}


class Predictor:
    """Makes dry runs of one task; checks of tensor plans are cached between rows."""

    def __init__(self, task: Task, device: str, *, shares_gpus: bool = False) -> None:
        self._task, self._device, self._shares_gpus = task, device, shares_gpus
        self._proofs: dict[Any, Any] = {}

    def predict(self, variant: Variant, cluster: Cluster | None) -> Prediction:
        layout = variant.layout
        assert layout is not None
        if not can(layout, "plan"):  # without the row's name: reports group rows by the reason
            return Prediction(None, "it communicates by RPC or between threads, which the planner does not model")
        first_ranks = range(
            0, layout.num_ranks, layout.num_ranks // layout.pp
        )  # of each stage: its other ranks do the same
        try:
            runs = [
                dry_run(self._task, layout, variant.config, rank=rank, device=self._device, proofs=self._proofs)
                for rank in first_ranks
            ]
            figures: dict[str, Any] = {
                "step_seconds": None,
                "peak_bytes": max(self._peak(run, cluster) for run in runs),
                "bytes_per_step": sum(one.num_bytes for one in runs[0].trace.messages(runs[0].second_step)),
            }
            why_not = self._why_no_time(variant, cluster)
            if why_not is None and cluster is not None:
                figures["step_seconds"] = step_time(runs, cluster).seconds
            return Prediction(figures, why_not)
        except RungError as error:
            return Prediction(None, str(error))
        except Exception as error:  # a prediction must not lose the measurements
            return Prediction(None, f"planning it failed with {type(error).__name__}: {error}")

    def _why_no_time(self, variant: Variant, cluster: Cluster | None) -> str | None:
        if self._shares_gpus and variant.num_ranks > 1:
            return "processes that share a GPU are not modelled, so the time of a step is not predicted"
        if cluster is None or cluster.device.kind != self._device:
            return _CALIBRATE
        return None

    def _peak(self, run: DryRun, cluster: Cluster | None) -> int:
        """Peak bytes, comparable with the measured ones: on a GPU with the libraries' workspaces."""
        if self._device != "cuda":
            return find_peak(run.trace).num_bytes
        spaces = cluster.device.workspaces if cluster is not None else {}
        return find_peak(run.trace, rounding=ROUNDING).num_bytes + sum(spaces.values())
