"""The example of examples/imagenet: a rank is lost in the middle of an epoch, and no sample with it."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rung.spec.config import resolve
from rung.spec.task import load_task
from rung.train.job import RankJob
from rung.train.worker import worker
from tests.faults.harness import COMPARABLE, Launched
from tests.marks import slow
from tests.metrics_file import committed
from tests.tasks import EXAMPLES

MISSING = [name for name in ("torchvision", "timm") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed: pip install 'rung[models]'")
TASK = EXAMPLES / "imagenet" / "task.py"
NUM_SAMPLES, BATCH, EPOCHS = 196, 12, 2
COUNTS = [*[12] * 16, 4]  # of the steps of an epoch
SETTINGS: dict[str, Any] = {
    "model.arch": "timm/test_resnet",  # the smallest with batch norms; in float64 some others take seconds a step
    "train_data.count": NUM_SAMPLES,
    "eval_data.count": 24,
    "optimizer.lr": 0.01,
}
_LIMIT = 300.0


def _wait(condition: Callable[[], object], what: str, job: Launched) -> None:
    deadline = time.monotonic() + _LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}:\n{job.output()[-3000:]}"
        time.sleep(0.02)


def _undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of one process that nothing happened to."""
    flags = {"batch_size": BATCH, "epochs": EPOCHS, "precision": "fp64"}
    told = {key: str(value) for key, value in {**SETTINGS, "dropout": "false", "device": "cpu"}.items()}
    found = resolve(load_task(TASK), flags=flags, assignments=told)
    worker(RankJob(str(TASK), "single", found.config, found.arguments, str(folder)))
    return load_file(folder / "model.safetensors")


def _lose_a_rank(folder: Path, strategy: str, processes: str, *more: str) -> Launched:
    """Kill rank 1 in the middle of an epoch, when there is a checkpoint, and wait for the end."""
    told = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
    sizes = ["--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--nproc", processes, "--set", "log_every=1"]
    job = Launched(
        folder,
        ["--strategy", strategy, "--checkpoint-every", "3", *sizes, *told, *COMPARABLE, *more],
        num_ranks=int(processes.partition(":")[2]),
        task=TASK,
    )
    try:
        _wait(lambda: any(row["event"] == "checkpoint" for row in job.rows()), "a checkpoint", job)
        job.kill(1)
        _wait(job.over, "the end", job)
        assert job.process.returncode == 0, job.output()
        return job
    finally:
        job.close()


def _examine(job: Launched, known: dict[str, torch.Tensor], worlds: list[int]) -> None:
    starts = [row for row in job.rows() if row["event"] in ("start", "resume")]
    assert [row["ranks"] for row in starts] == worlds
    assert starts[1]["event"] == "resume" and starts[1]["step"] % len(COUNTS), "it goes on within an epoch"
    steps = [row for row in committed(job.run_dir / "metrics.jsonl") if row["event"] == "step"]
    expected = list(itertools.accumulate(COUNTS * EPOCHS))
    assert [row["samples"] for row in steps] == expected, "every global batch is as large as it was asked to be"
    weights = load_file(job.run_dir / "model.safetensors")
    gaps = {name: float((weights[name].double() - value.double()).abs().max()) for name, value in known.items()}
    assert max(gaps.values()) < 1e-9, max(gaps, key=lambda name: gaps[name])


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return _undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("strategy", "most", "setting"),
    [
        ("ddp", 2, "workers=1"),
        slow("ddp", 3, "memory_format=channels_last"),
        slow("fsdp", 3, "memory_format=channels_last"),
    ],
)
def test_a_rank_lost_within_an_epoch_costs_no_sample(
    tmp_path: Path, known: dict[str, torch.Tensor], strategy: str, most: int, setting: str
) -> None:
    """Augmentation, loader processes, batch norms over all ranks: the weights are those of one process."""
    job = _lose_a_rank(tmp_path, strategy, f"{most - 1}:{most}", "--set", setting)
    _examine(job, known, [most, most - 1])
    assert "best top1" in job.output()
