"""What the checks of a run cost: the first step against one process, and replicas against each other.

python -m benchmarks.checks

Two ranks train the GPT example, as it is and larger. Measured are the median time of a step; by how much later the
first step ends with the check before it than without, in steps (a first step takes longer than later ones, and the
check has done a part of that already); and what one comparison of replicas adds to the steps between two of them
(`check_every`).
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import machine_facts, write
from rung.checkpoint import Position
from rung.distributed.world import open_world
from rung.launch.fork_server import start_fork_server
from rung.launch.spawn import on_ranks
from rung.runtime import build_runtime
from rung.spec.config import RunConfig, resolve
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from rung.system.launcher_env import environment_local_size, environment_size
from rung.train.first_step import check_first_step
from rung.train.replica_check import ReplicaCheck
from rung.train.worker import make_batches

_STEPS, _REPEATS, _STARTS = 20, 20, 5
_SIZES: dict[str, dict[str, str]] = {"small": {}, "larger": {"model.size": "3m", "batch_size": "64"}}


def _job(path: str, strategy: str, settings: dict[str, str], check: bool = True) -> tuple[Task, RunConfig]:
    task = load_task(path)
    found = resolve(task, flags={"steps": _STEPS, "strategy": strategy, "check": check}, assignments=settings)
    return task.bind(found.arguments), found.config


def measure_start(path: str, strategy: str, settings: dict[str, str], check: bool) -> float:
    """Seconds from a built runtime to the end of the first step, on this rank."""
    task, config = _job(path, strategy, settings, check)
    layout = parse(strategy, environment_size(), environment_local_size())
    with open_world(layout, device="cpu", timeout_seconds=300) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps, dataset=batches.dataset)
        world.barrier()
        started = time.perf_counter()
        check_first_step(runtime, task, config, batches)
        runtime.step(next(iter(runtime.place(batches))))
        world.barrier()
        return time.perf_counter() - started


def measure(path: str, strategy: str, settings: dict[str, str]) -> dict[str, float]:
    """Seconds of a step and of one comparison, on this rank."""
    task, config = _job(path, strategy, settings)
    layout = parse(strategy, environment_size(), environment_local_size())
    with open_world(layout, device="cpu", timeout_seconds=300) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps, dataset=batches.dataset)
        steps = []
        for window in runtime.place(batches):
            started = time.perf_counter()
            runtime.step(window)
            world.barrier()
            steps.append(time.perf_counter() - started)
        replicas = ReplicaCheck(runtime, config, None)
        comparisons = []
        for number in range(1, _REPEATS + 1):
            started = time.perf_counter()
            replicas.after_step(Position(number * config.check_every, 0, 0, 0), is_saved=False)
            world.barrier()
            comparisons.append(time.perf_counter() - started)
    return {
        "step_seconds": statistics.median(steps[5:]),
        "comparison_seconds": statistics.median(comparisons),
        "check_every": float(config.check_every),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero3", "tp2", "pp2"])
    parser.add_argument("--task", default="examples/gpt/task.py")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/checks.json"))
    options = parser.parse_args()
    start_fork_server()
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.checks", *sys.argv[1:]]),
        "machine": machine_facts("cpu"),
        "strategies": {},
    }
    for (size, settings), strategy in itertools.product(_SIZES.items(), options.strategies):
        job = options.task, strategy, settings
        found = on_ranks(measure, 2, *job, threads=1, timeout=300.0)[0]
        starts: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(_STARTS):
            for check, seconds in starts.items():
                seconds += on_ranks(measure_start, 2, *job, check, threads=1, timeout=300.0)[:1]
        without, with_check = (statistics.median(seconds) for seconds in starts.values())
        found |= {"first_step_seconds": without, "first_step_with_check_seconds": with_check}
        found["first_check_in_steps"] = (with_check - without) / found["step_seconds"]
        found["comparison_share"] = found["comparison_seconds"] / (found["check_every"] * found["step_seconds"])
        content["strategies"].setdefault(size, {})[strategy] = found
        print(
            f"{size:<6} {strategy:<8} step {1e3 * found['step_seconds']:.1f} ms, first check "
            f"{found['first_check_in_steps']:.1f} steps, comparisons {100 * found['comparison_share']:.3f} %"
        )
    write(options.out, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
