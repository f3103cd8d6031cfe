"""`--log wandb,mlflow,trackio`: the figures of a run in experiment trackers, under the names that TensorBoard has.

Each is an optional package, imported only when requested. A thread sends the figures, so that a slow server does not
stall training. A tracker that raises is logged and dropped; the run continues. A resumed run continues in its trackers,
which identify it by the id in its directory.
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
from rung.distributed.live_status import JobSnapshot
from rung.errors import EnvironmentProblem
from rung.spec.observability import refuse_missing_trackers
from rung.system.launcher_env import is_in_environment
from rung.train import metrics
from rung.train.metrics import Observer
from rung.train.records import EvalRecord, StepRecord

log = logging.getLogger("rung")

_FLUSH_SECONDS = 60.0  # limit at the end for sending the rest


class Tracker(Protocol):
    """One run in one tracker."""

    name: str

    def put(self, figures: Mapping[str, float], step: int) -> None: ...

    def finish(self, *, is_complete: bool) -> None: ...


def open_trackers(
    names: tuple[str, ...], run_dir: Path, settings: Mapping[str, Any], *, must_open: bool
) -> list[Observer]:
    """Start or resume the run in each tracker. A tracker that fails is an error if `must_open`, else it is dropped."""
    refuse_missing_trackers(names)
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(_OPENERS[name](run_dir, str(settings["task"]), _flat(settings)))
        except Exception as error:
            problem = f"--log {name} cannot begin: {_first_line(error)}"
            if must_open:
                raise EnvironmentProblem(f"{problem} Set {name} up, or leave it out.") from error
            log.warning("%s The run goes on without it.", problem)
    return [_TrackerThread(opened)] if opened else []


class _TrackerThread:
    """Observer that sends figures to the trackers from a thread."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers
        self._queue: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._is_complete = False
        self._thread = threading.Thread(target=self._send_all, name="rung-trackers", daemon=True)
        self._thread.start()

    def on_start(self, facts: dict[str, Any], step: int) -> None: ...

    def on_steps(self, records: list[StepRecord]) -> None:
        for record in records[:-1]:
            self._queue.put((metrics.training_figures(record), record.step))
        last = records[-1]
        self._queue.put(({**metrics.training_figures(last), **metrics.speed_figures(last)}, last.step))

    def on_evaluation(self, record: EvalRecord) -> None:
        self._queue.put(({f"eval/{name}": value for name, value in record.metrics.items()}, record.step))

    def on_logged(self, figures: Mapping[str, float], step: int) -> None:
        self._queue.put((metrics.logged_figures(figures), step))

    def on_checkpoint(self, record: SaveRecord) -> None:
        self._queue.put((metrics.checkpoint_figures(record), record.step))

    def on_ranks(self, live: JobSnapshot) -> None:
        self._queue.put((metrics.rank_figures(live), live.step))

    def on_end(self, facts: dict[str, Any]) -> None:
        self._is_complete = True

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_FLUSH_SECONDS)
        if self._thread.is_alive():
            log.warning("trackers did not take all figures within %.0f s; metrics.jsonl has them.", _FLUSH_SECONDS)

    def _send_all(self) -> None:
        while (item := self._queue.get()) is not None:
            for tracker in list(self._trackers):
                self._try(tracker, lambda one=tracker, item=item: one.put(*item))
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
        import wandb  # optional package, as the others

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=None if is_in_environment("WANDB_PROJECT") else task,
            name=run_dir.name,
            id=_run_id(run_dir),
            resume="allow",
            dir=str(run_dir),
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # A resumed run repeats steps after its checkpoint; wandb's own step count must not decrease.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        log.info("  wandb: %s", self._run.dir if self._run.offline else self._run.url)

    def put(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, "step": step})

    def finish(self, *, is_complete: bool) -> None:
        self._run.finish(exit_code=0)
        self._wandb.teardown()  # ends its service: this process may exit by os._exit, without atexit


class _Mlflow:
    name = "mlflow"

    def __init__(self, run_dir: Path, task: str, settings: dict[str, Any]) -> None:
        import mlflow  # optional package
        from mlflow.entities import Metric, Param

        self._metric: Any = Metric
        self._client: Any = mlflow.MlflowClient()
        self._run_id = self._find_run(_experiment(task), run_dir)
        known = self._client.get_run(self._run_id).data.params
        # MLflow refuses to change a parameter: a run resumed with other settings keeps its first values.
        parameters = [Param(key, str(value)[:6000]) for key, value in settings.items() if key not in known]
        for start in range(0, len(parameters), 100):
            self._client.log_batch(self._run_id, params=parameters[start : start + 100])
        self._client.update_run(self._run_id, "RUNNING")
        log.info("  mlflow: run %s in %s", self._run_id, mlflow.get_tracking_uri())

    def _find_run(self, experiment: str, run_dir: Path) -> str:
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        tags = {"rung.run": _run_id(run_dir)}
        before = self._client.search_runs([place], f"tags.`rung.run` = '{tags['rung.run']}'", max_results=1)
        run = before[0] if before else self._client.create_run(place, run_name=run_dir.name, tags=tags)
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
        import trackio  # optional package

        with contextlib.redirect_stdout(io.StringIO()):
            name = f"{run_dir.name}-{_run_id(run_dir)[:6]}"
            self._run: Any = trackio.init(project=task, name=name, config=settings, resume="allow", embed=False)
        log.info("  trackio: trackio show --project %s", task)

    def put(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self, *, is_complete: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


_OPENERS: Mapping[str, Any] = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}


def _experiment(task: str) -> str:
    import mlflow  # optional package

    named: str | None = mlflow.environment_variables.MLFLOW_EXPERIMENT_NAME.get()
    return named or task


def _run_id(run_dir: Path) -> str:
    """The id that the launcher gave this run; directories of different runs may have the same name."""
    return (run_dir / ".state" / "run").read_text(encoding="utf-8").strip()


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and the arguments of the task's functions in one dict, without those that are None."""
    merged = {"task": settings["task"], **settings["config"], **settings["arguments"]}
    return {key: value for key, value in merged.items() if value is not None}


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if line.endswith(".") else f"{line}."
