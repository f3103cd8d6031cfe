"""What the planner says of a row: memory and messages from pretended steps, seconds where this machine is on record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rung.compare.follow import messages_of
from rung.compare.variants import Variant
from rung.errors import RungError
from rung.planner.cost import step_time
from rung.planner.dryrun import DryRun, dry_run
from rung.planner.hardware import Cluster
from rung.planner.memory import ROUNDING, find_peak
from rung.task import Task

_CALIBRATE = "how long a step takes is not known without a record of this machine: run `rung calibrate`"


@dataclass(frozen=True)
class Prediction:
    """`why_not` says what is missing, in part or altogether."""

    figures: dict[str, Any] | None
    why_not: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {"predicted": self.figures, "not_predicted": self.why_not}


class Predictor:
    """Pretends rows of one task. Proofs of tensor plans are kept between them."""

    def __init__(self, task: Task, device: str, *, shares_gpus: bool = False) -> None:
        self._task, self._device, self._shares_gpus = task, device, shares_gpus
        self._proofs: dict[Any, Any] = {}

    def predict(self, variant: Variant, cluster: Cluster | None) -> Prediction:
        layout = variant.layout
        assert layout is not None
        if layout.kind != "mesh":
            return Prediction(
                None, "its messages are calls of processes or threads, for which there is no pretend world to plan in"
            )
        if variant.config.offload != "none":
            return Prediction(None, "host memory and its link are not modelled, so --offload cannot be planned")
        each = layout.num_ranks // layout.pp
        try:
            runs = [
                dry_run(self._task, layout, variant.config, rank=stage * each, device=self._device, proofs=self._proofs)
                for stage in range(layout.pp)
            ]
        except RungError as error:
            return Prediction(None, str(error))
        except Exception as error:  # what was measured is worth having without it
            return Prediction(None, f"planning it failed with {type(error).__name__}: {error}")
        figures: dict[str, Any] = {
            "step_seconds": None,
            "peak_bytes": max(self._peak(run, cluster) for run in runs),
            "bytes_per_step": sum(one.num_bytes for one in messages_of(runs[0].trace, runs[0].second_step)),
        }
        why_not = self._why_no_time(variant, cluster, runs)
        if why_not is None and cluster is not None:
            figures["step_seconds"] = step_time(runs, cluster).seconds
        return Prediction(figures, why_not)

    def _why_no_time(self, variant: Variant, cluster: Cluster | None, runs: Sequence[DryRun]) -> str | None:
        if self._shares_gpus and variant.num_ranks > 1:
            return "processes that share a GPU are not modelled: how long a step takes is not predicted"
        if cluster is None or cluster.device.kind != self._device:
            return _CALIBRATE
        return None

    def _peak(self, run: DryRun, cluster: Cluster | None) -> int:
        """Bytes alive at once, as they are measured: with the libraries' workspaces on a GPU."""
        if self._device != "cuda":
            return find_peak(run.trace).num_bytes
        spaces = cluster.device.workspaces if cluster is not None else {}
        return find_peak(run.trace, rounding=ROUNDING).num_bytes + sum(spaces.values())
