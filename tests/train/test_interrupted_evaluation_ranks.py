"""An evaluation that a request to stop or an error interrupts: what is saved then is the state of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rung.distributed.status_board import StatusWriter
from rung.spec.config import RunConfig
from rung.spec.task import Task
from rung.system.launcher_env import environment_rank
from tests.checkpoints import Leg, one_leg
from tests.harness import on_ranks
from tests.marks import slow
from tests.tasks import dropping_task, image_data, image_task

# Of 103 samples in steps of 10, with an evaluation of 37 samples after every fourth step and after the last.
CONFIG = RunConfig(batch_size=10, steps=6, device="cpu", eval_every="4")


class Interrupting(torch.utils.data.Dataset[Any]):
    """Evaluation data that does something when the third of its batches is read, in one of the evaluations."""

    act: Any = None
    evaluation = 0

    def __init__(self) -> None:
        self._data = image_data(37)
        Interrupting.evaluation -= 1

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        if index >= 20 and Interrupting.evaluation == 0 and Interrupting.act is not None:
            Interrupting.act()
        return self._data[index]


def _metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"accuracy": (output.argmax(1) == target).float(), "drawn": torch.rand(len(output))}


def make_task() -> Task:
    """Draws random numbers in training and in evaluation."""
    task = dropping_task()
    return image_task(
        model=task.model, train_data=task.train_data, optimizer=task.optimizer, eval_data=Interrupting, metrics=_metrics
    )


def _fail() -> None:
    raise OSError("the evaluation data is gone")


def leg(strategy: str, config: RunConfig, folder: str, evaluation: int, how: str) -> Leg:
    status = StatusWriter()
    Interrupting.evaluation = evaluation
    if how == "stopped" and environment_rank() == 0:
        Interrupting.act = status.ask_to_stop
    elif how == "failed":
        Interrupting.act = _fail
    try:
        return one_leg(make_task, strategy, config, folder, 6, status)
    except OSError as error:
        return Leg(notes=[str(error)])


def _changed(**changes: Any) -> RunConfig:
    return RunConfig(**{**CONFIG.__dict__, **changes})


@pytest.mark.parametrize("evaluation", [1, slow(2)], ids=["first", "last"])
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "how", "config"),
    [
        ("zero2", 2, "stopped", CONFIG),
        slow("zero3", 2, "stopped", CONFIG),
        slow("pp2", 2, "stopped", CONFIG),
        ("tp2", 2, "stopped", CONFIG),
        slow("hsdp", 4, "stopped", CONFIG),
        ("pp2,fsdp2", 4, "stopped", CONFIG),
        slow("fsdp2,tp2", 4, "stopped", CONFIG),
        ("ddp", 2, "stopped", _changed(local_steps=3)),
        slow("zero1", 2, "stopped", _changed(ema=0.5)),
        slow("zero1", 2, "failed", _changed(ema=0.5)),
        ("single", 1, "failed", CONFIG),
        slow("zero2", 2, "failed", CONFIG),
        ("zero3", 2, "failed", CONFIG),
        slow("pp2,fsdp2", 4, "failed", CONFIG),
    ],
    ids=lambda value: "" if isinstance(value, RunConfig) else str(value),
)
def test_resumes_as_if_nothing_had_been(
    tmp_path: Path, strategy: str, num_ranks: int, how: str, config: RunConfig, evaluation: int
) -> None:
    first: list[float] = []
    if how == "stopped":
        interrupted = on_ranks(leg, num_ranks, strategy, config, str(tmp_path / "legs"), evaluation, how)[0]
        first = interrupted.losses
        assert len(first) == (4 if evaluation == 1 else 6)
        assert (tmp_path / f"legs/checkpoints/step-{len(first):08d}/manifest.json").exists()
    else:
        for failed in on_ranks(leg, num_ranks, strategy, config, str(tmp_path / "legs"), evaluation, how):
            assert failed.notes == ["the evaluation data is gone"]
        assert list((tmp_path / "legs/rescue").glob("step-*"))
    again = on_ranks(leg, num_ranks, strategy, config, str(tmp_path / "legs"), 0, "")[0]
    whole = on_ranks(leg, num_ranks, strategy, config, str(tmp_path / "whole"), 0, "")[0]
    assert again.start == (4 if evaluation == 1 else 6)
    assert again.losses == whole.losses[again.start :]
    assert again.evaluations == whole.evaluations[evaluation - 1 :]
    assert all((again.state[name] == value).all() for name, value in whole.state.items())
