"""How long the ranks of a pipeline stand idle, against what the textbook says.

python -m benchmarks.bubble
python -m benchmarks.bubble --ranks 4 --micro-batches 8 16

Two kinds of work. `sleep`: every layer sleeps, in forward as long as in each half of backward; this stands for a device
that computes beside the host, and lets 4 ranks be measured on a machine with fewer cores. `compute`: real transformer
blocks, one thread a rank, for no more ranks than there are cores. The messages, the schedule and all of Rung are real
in both. The idle share of a step is one minus the time in which ranks compute, over the time from the first action of
any rank to the last, times the ranks.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks import report
from benchmarks.ranks import on_ranks
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.presets import SCHEDULES
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.system.processes import num_cores
from rung.train.worker import make_batches

_RESULTS = Path(__file__).parent / "results"
SLEEP_SECONDS = 0.02


class _SleepBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return grad


class Sleeper(nn.Module):
    """A layer that takes its time: as long for its output as for each of its two gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return _SleepBack.apply(x) + _SleepBack.apply(self.weight)


def sleeping_task(num_layers: int) -> Task:
    data = _data(8)
    return _task(lambda: nn.Sequential(*(Sleeper(8) for _ in range(num_layers))), data)


def computing_task(num_layers: int) -> Task:
    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True) for _ in range(num_layers))
        )

    return _task(model, _data(64, 192))


def _data(*shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)  # the same on every rank
    return TensorDataset(*(torch.randn(256, *shape, generator=generator) for _ in range(2)))


def _task(model: Any, data: TensorDataset) -> Task:
    return Task(
        model=model,
        train_data=lambda: data,
        loss=lambda output, target: nn.functional.mse_loss(output, target),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        name="bubble",
    )


def textbook(schedule: str, ranks: int, chunks: int) -> float:
    """The idle share when forward and both halves of backward cost the same in every stage."""
    if schedule == "interleaved":
        return (ranks - 1) / (2 * chunks + ranks - 1)
    if schedule == "zb":  # ZB1P: the weights' gradients fill all but one unit in three
        return (ranks - 1) / (3 * chunks + ranks - 1)
    return (ranks - 1) / (chunks + ranks - 1)


def measure(work: str, schedule: str, ranks: int, chunks: int, steps: int) -> list[float]:
    """The idle share of each step but the first two, which set things up."""
    found = on_ranks(_idle, ranks, work, schedule, chunks, steps, timeout=300)
    shares = []
    for step in range(2, steps):
        actions = [action for rank in found for action in rank[step]]
        span = max(stop for _, stop in actions) - min(start for start, _ in actions)
        shares.append(1 - sum(stop - start for start, stop in actions) / (span * ranks))
    return shares


def _idle(work: str, schedule: str, chunks: int, steps: int) -> list[list[tuple[float, float]]]:
    """When this rank's stages began and ended each action, by step."""
    task = (sleeping_task if work == "sleep" else computing_task)(2 * environment_size())
    samples = 2
    config = RunConfig(batch_size=chunks * samples, micro_batch=samples, steps=steps, device="cpu", schedule=schedule)
    found: list[list[tuple[float, float]]] = []
    with open_world(parse("pp", environment_size(), schedule=schedule), device="cpu") as world:
        runtime = build_runtime(task, world, config)
        for window in runtime.place(make_batches(task, config, world)):
            world.barrier()
            for stage in runtime.stages:
                stage.log = []
            runtime.step(window)
            found.append([(a.start, a.stop) for stage in runtime.stages for a in stage.log or []])
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bubble", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--work", nargs="+", choices=("sleep", "compute"), default=["sleep", "compute"])
    parser.add_argument("--schedules", nargs="+", choices=tuple(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path, default=_RESULTS / "bubble.json")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    table = Table(box=None, header_style="bold")
    for column in ("work", "schedule", "ranks", "micro-batches", "textbook", "measured", "range"):
        table.add_column(column, justify="left" if column in ("work", "schedule") else "right")
    for work in options.work:
        for ranks in options.ranks:
            if work == "compute" and ranks > num_cores():
                continue  # ranks that share a core wait for each other
            for chunks in options.micro_batches:
                for schedule in options.schedules:
                    shares = measure(work, schedule, ranks, chunks, options.steps)
                    expected = textbook(schedule, ranks, chunks)
                    middle = statistics.median(shares)
                    rows.append(
                        {
                            "work": work,
                            "schedule": schedule,
                            "ranks": ranks,
                            "micro_batches": chunks,
                            "textbook": expected,
                            "measured": middle,
                            "steps": shares,
                        }
                    )
                    spread = f"{min(shares):.1%} .. {max(shares):.1%}"
                    table.add_row(work, schedule, str(ranks), str(chunks), f"{expected:.1%}", f"{middle:.1%}", spread)
    content = {
        "command": shlex.join(["python", "-m", "benchmarks.bubble", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts("cpu"),
        "rows": rows,
    }
    report.write(options.out, content)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(table)
    console.print(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
