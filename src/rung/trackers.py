"""`--log wandb,mlflow,trackio`: the figures of a run in experiment trackers, under the names that TensorBoard has.

Each is an optional package, imported here and only when asked for. Figures are handed to a thread, so that a server far
away does not hold up training; a tracker that fails is told of and left out, and the run goes on. A run that is resumed
goes on in the trackers, too: it is known by the mark of its directory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rung.checkpoint import SaveRecord
from rung.environment import is_in_environment
from rung.errors import EnvironmentProblem
from rung.live import Live
from rung.looking import refuse_missing_trackers
from rung.metrics import EvalRecord, Observer, StepRecord, rank_figures, speed_figures, training_figures

log = logging.getLogger("rung")

_FLUSH_SECONDS = 60.0  # that trackers have at the end to send what is left


class Tracker(Protocol):
    """One run in one tracker."""

    name: str

    def put(self, figures: Mapping[str, float], step: int) -> None: ...

    def finish(self, *, is_complete: bool) -> None: ...


def open_trackers(
    names: tuple[str, ...], run_dir: Path, settings: Mapping[str, Any], *, must_open: bool
) -> list[Observer]:
    """Begin the run in each tracker, or go on with it. One that cannot is an error where `must_open`, else left out."""
    refuse_missing_trackers(names)
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(_OPENERS[name](run_dir, str(settings["task"]), _flat(settings)))
        except Exception as error:
            told = f"--log {name} cannot begin: {_first_line(error)}"
            if must_open:
                raise EnvironmentProblem(f"{told} Set {name} up, or leave it out.") from error
            log.warning("%s The run goes on without it.", told)
    return [_Post(opened)] if opened else []


class _Post:
    """Hands figures to the trackers, in a thread of its own."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers
        self._letters: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._is_complete = False
        self._thread = threading.Thread(target=self._deliver, name="rung-trackers", daemon=True)
        self._thread.start()

    def on_start(self, facts: dict[str, Any], step: int) -> None: ...

    def on_steps(self, records: list[StepRecord]) -> None:
        for record in records[:-1]:
            self._letters.put((training_figures(record), record.step))
        last = records[-1]
        self._letters.put(({**training_figures(last), **speed_figures(last)}, last.step))

    def on_evaluation(self, record: EvalRecord) -> None:
        self._letters.put(({f"eval/{name}": value for name, value in record.metrics.items()}, record.step))

    def on_checkpoint(self, record: SaveRecord) -> None:
        told = {"checkpoint/stall_seconds": record.stall_seconds, "checkpoint/write_seconds": record.write_seconds}
        self._letters.put((told, record.step))

    def on_ranks(self, live: Live) -> None:
        self._letters.put((rank_figures(live), live.step))

    def on_end(self, facts: dict[str, Any]) -> None:
        self._is_complete = True

    def close(self) -> None:
        self._letters.put(None)
        self._thread.join(_FLUSH_SECONDS)
        if self._thread.is_alive():
            log.warning("trackers did not take all figures within %.0f s; metrics.jsonl has them.", _FLUSH_SECONDS)

    def _deliver(self) -> None:
        while (letter := self._letters.get()) is not None:
            for tracker in list(self._trackers):
                self._try(tracker, lambda one=tracker, told=letter: one.put(*told))
        for tracker in list(self._trackers):
            self._try(tracker, lambda one=tracker: one.finish(is_complete=self._is_complete))

    def _try(self, tracker: Tracker, act: Any) -> None:
        try:
            act()
        except Exception as error:
            self._trackers.remove(tracker)
            log.warning(
                "%s takes no more figures: %s The run goes on; metrics.jsonl has them.",
                tracker.name,
                _first_line(error),
            )


class _Wandb:
    name = "wandb"

    def __init__(self, run_dir: Path, task: str, settings: dict[str, Any]) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=None if is_in_environment("WANDB_PROJECT") else task,
            name=run_dir.name,
            id=_mark(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Steps of a resumed run begin again at a checkpoint, and wandb's own count only goes forward.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        log.info("  wandb: %s", self._run.dir if self._run.offline else self._run.url)

    def put(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def finish(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0)
        self._wandb.teardown()  # ends its service; this process may leave without the usual goodbyes


class _Mlflow:
    name = "mlflow"

    def __init__(self, run_dir: Path, task: str, settings: dict[str, Any]) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient()
        self._run_id = self._find_run(_experiment(task), run_dir)
        known = self._client.get_run(self._run_id).data.params
        # What a parameter was cannot be changed; that of a run which went on otherwise stays.
        parameters = [Param(key, str(value)[:6000]) for key, value in settings.items() if key not in known]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(self._run_id, params=parameters[start : start + 100])
        self._client.update_run(self._run_id, "RUNNING")
        log.info("  mlflow: run %s in %s", self._run_id, mlflow.get_tracking_uri())

    def _find_run(self, experiment: str, run_dir: Path) -> str:
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        mark = _mark(run_dir)
        before = self._client.search_runs([place], f"tags.`rung.run` = '{mark}'", max_results=1)
        run = before[0] if before else self._client.create_run(place, run_name=run_dir.name, tags={"rung.run": mark})
        return str(run.info.run_id)

    def put(self, figures: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, *, is_complete: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if is_complete else "KILLED")


class _Trackio:
    name = "trackio"

    def __init__(self, run_dir: Path, task: str, settings: dict[str, Any]) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            self._run: Any = trackio.init(
                project=task, name=f"{run_dir.name}-{_mark(run_dir)[:6]}", config=settings, resume="allow", embed=False
            )
        log.info("  trackio: trackio show --project %s", task)

    def put(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self, *, is_complete: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


_OPENERS: Mapping[str, Any] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}


def _experiment(task: str) -> str:
    import mlflow

    named: str | None = mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get()
    return named or task


def _mark(run_dir: Path) -> str:
    """What tells this run from all others, in whatever directory of the same name."""
    return (run_dir / ".state" / "run").read_text(encoding="utf-8").strip()


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and the arguments of the task's functions in one row; what is not set is left out."""
    told = {"task": settings["task"], **settings["config"], **settings["arguments"]}
    return {key: value for key, value in told.items() if value is not None}


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."
