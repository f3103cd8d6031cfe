"""The job with Ray Train: the loop of its guide, in worker processes that Ray starts.

Ray runs processes of its own beside its workers, and they would take time from the other contenders. So it is started
for each block of steps and stopped after it, which is not in the figures, and each block trains from the beginning.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader

from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch, endless, seeded_module
from rung.distributed.world import World

_ROOT = Path(__file__).parents[2]


class WithRay:
    def __init__(self, case: Case, world: World) -> None:
        self._case, self._world = case, world

    def run(self, num_steps: int, stopwatch: Stopwatch) -> float:
        found: list[Any] = [self._train(num_steps) if self._world.is_main else None]
        if self._case.num_ranks > 1:
            dist.broadcast_object_list(found)
        stopwatch.times.update({int(step): seconds for step, seconds in found[0]["times"].items()})
        return fmean(found[0]["losses"])

    def _train(self, num_steps: int) -> dict[str, Any]:
        case = self._case
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "times.json"
            settings = {"case": asdict(case), "steps": num_steps, "threads": torch.get_num_threads(), "out": str(out)}
            described = {name: os.environ.pop(name) for name in list(os.environ) if name in _OF_THIS_JOB}
            try:
                ray.init(
                    num_cpus=case.num_ranks, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
                    runtime_env={"env_vars": {"PYTHONPATH": f"{_ROOT}:{_ROOT / 'src'}"}},
                )  # fmt: skip
                scaling = ScalingConfig(num_workers=case.num_ranks, use_gpu=case.device == "cuda")
                run_config = RunConfig(storage_path=folder)
                TorchTrainer(_loop, train_loop_config=settings, scaling_config=scaling, run_config=run_config).fit()
            finally:
                ray.shutdown()
                os.environ.update(described)
            found: dict[str, Any] = json.loads(out.read_text())
            return found


# Ray's workers are another job, and find each other by themselves.
_OF_THIS_JOB = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID",
)  # fmt: skip


def _loop(settings: dict[str, Any]) -> None:
    """On each worker."""
    case = Case(**settings["case"])
    torch.set_num_threads(settings["threads"])
    task = case.load_task()
    module: Any = seeded_module(case, task)
    if case.compile:
        module.compile()
    module = prepare_model(module)
    optimizer = task.optimizer(module)
    loader = DataLoader(task.train_data(), batch_size=case.rank_batch_size, shuffle=True, drop_last=True)
    batches = endless(prepare_data_loader(loader))
    half = torch.bfloat16 if case.precision == "bf16" else None
    stopwatch = Stopwatch(torch.device(case.device))
    losses = []
    for step in range(1, settings["steps"] + 1):
        inputs, targets = next(batches)
        with torch.autocast(case.device, dtype=half) if half is not None else nullcontext():
            loss = module(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        if case.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), case.clip)
        optimizer.step()
        if step % LOG_EVERY == 0:
            losses.append(loss.item())
            stopwatch.mark(step)
    if ray.train.get_context().get_world_rank() == 0:
        Path(settings["out"]).write_text(json.dumps({"times": stopwatch.times, "losses": losses}))


def build(case: Case, world: World, *, tuned: bool = False) -> Contender:
    return WithRay(case, world)
