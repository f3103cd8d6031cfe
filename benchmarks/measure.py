"""Runs the contenders of one case side by side, in processes of their own, and hands back the times of all blocks.

Each contender is built once and kept; blocks of steps then alternate between them, so that a machine that becomes
slower for a while is so for all of them.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.cases import Case
from benchmarks.contenders import build_contender
from benchmarks.contenders.common import LOG_EVERY, Contender, Stopwatch
from rung.distributed.world import World, open_world
from rung.spec.strategy import parse
from rung.system.processes import die_with_parent

# Before each timed block: the switch from another contender has emptied the caches.
_LEAD_IN = LOG_EVERY
_JOB_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Plan:
    """One case, who takes part in it, and how often."""

    case: Case
    contenders: tuple[str, ...]
    steps: int
    repeats: int
    threads: int  # of each rank

    def order(self, repetition: int) -> list[str]:
        """Rotated each time, so that everyone is first equally often; turned round after a full circle."""
        circles, shift = divmod(repetition, len(self.contenders))
        rotated = [*self.contenders[shift:], *self.contenders[:shift]]
        return rotated if circles % 2 == 0 else rotated[::-1]


@dataclass(frozen=True)
class Measured:
    """Seconds a step of every block, by contender, in the order of the repetitions; and the mean loss of the last."""

    seconds_per_step: dict[str, list[float]]
    mean_loss: dict[str, float]
    stolen: list[float]  # in each repetition: the part of the cores' time that a hypervisor gave to others


def measure(plan: Plan, build: Callable[[str, Case, World], Contender] = build_contender) -> Measured:
    """Start the ranks of a case, wait for them, and put their times together. `build` makes a contender by its name."""
    case = plan.case
    # Inherited by the ranks. A peer that finds it unset chooses a number itself, for the whole process.
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)
    # On a port of the system's choice, and held by this process from the beginning: no two runs collide.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if case.is_distributed else None
    with tempfile.TemporaryDirectory() as folder:
        port = store.port if store is not None else None
        arguments = (plan, build, port, folder)
        torch.multiprocessing.start_processes(_rank_main, arguments, case.num_ranks, start_method="spawn")
        found = [json.loads(_result_file(folder, rank).read_text()) for rank in range(case.num_ranks)]
    # A step has ended when it has on all ranks.
    seconds = {
        name: [max(times) for times in zip(*(result["seconds_per_step"][name] for result in found), strict=True)]
        for name in plan.contenders
    }
    return Measured(seconds, found[0]["mean_loss"], found[0]["stolen"])


def _rank_main(
    rank: int, plan: Plan, build: Callable[[str, Case, World], Contender], port: int | None, folder: str
) -> None:
    die_with_parent()
    _describe_job(rank, plan.case, port)
    torch.set_num_threads(plan.threads)
    layout = parse(plan.case.strategy, plan.case.num_ranks)
    with open_world(layout, device=plan.case.device) as world:
        result = _measure_on_rank(plan, partial(build, case=plan.case, world=world), world)
    _result_file(folder, rank).write_text(json.dumps(result))


def _measure_on_rank(plan: Plan, build: Callable[[str], Contender], world: World) -> dict[str, Any]:
    contenders: dict[str, Contender] = {}
    for name in plan.contenders:
        _say(world, f"{plan.case.name}: building {name}")
        contenders[name] = build(name)
        # The first steps compile, and allocate the optimizer's state.
        contenders[name].run(LOG_EVERY, Stopwatch(world.device))
    torch.set_num_threads(plan.threads)  # building a contender may have changed it
    seconds: dict[str, list[float]] = {name: [] for name in plan.contenders}
    losses: dict[str, float] = {}
    stolen = []
    for repetition in range(plan.repeats):
        _say(world, f"{plan.case.name}: repetition {repetition + 1} of {plan.repeats}")
        before = _processor_time()
        for name in plan.order(repetition):
            gc.collect()  # what one contender left behind is not collected in the time of the next
            world.barrier()
            stopwatch = Stopwatch(world.device)
            losses[name] = contenders[name].run(_LEAD_IN + plan.steps, stopwatch)
            seconds[name].append(stopwatch.seconds_per_step(_LEAD_IN, _LEAD_IN + plan.steps))
        spent = [after - earlier for after, earlier in zip(_processor_time(), before, strict=True)]
        stolen.append(spent[0] / max(spent[1], 1))
    return {"seconds_per_step": seconds, "mean_loss": losses, "stolen": stolen}


def _processor_time() -> tuple[int, int]:
    """Ticks of all cores that a hypervisor gave to others, and all ticks."""
    _, *ticks = map(int, Path("/proc/stat").read_text().partition("\n")[0].replace("cpu", "0").split())
    return ticks[7], sum(ticks[:8])


def _describe_job(rank: int, case: Case, port: int | None) -> None:
    """The variables that torchrun would set; none of them for a job without a process group."""
    for name in _JOB_VARIABLES:
        os.environ.pop(name, None)
    if port is None:
        return
    values = (rank, rank, case.num_ranks, case.num_ranks, "127.0.0.1", port)
    os.environ.update(zip(_JOB_VARIABLES, map(str, values), strict=True))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 is a client, too, of the store that is there
    os.environ["TORCHELASTIC_RUN_ID"] = "benchmark"  # by this Fabric knows that its processes were started for it
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"


def _say(world: World, line: str) -> None:
    if world.is_main:
        print(line, flush=True)
