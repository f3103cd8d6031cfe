"""Runs a sweep over collectives: on ranks of this machine, with other machines, or as a rank of another launcher."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rung.errors import ConfigError, EnvironmentProblem
from rung.hardware.bench.chart import draw
from rung.hardware.bench.collectives import Case, CollectiveTiming, SweepPlan, measure
from rung.hardware.bench.options import BenchOptions
from rung.hardware.bench.view import progress, show
from rung.hardware.collective_records import REDUCING, CollectiveRecord, Sweep, write_sweep
from rung.launch.rendezvous.topology import take_share_of_cores
from rung.launch.spawn import RankFailedError, local_ranks_of_world, on_local_ranks, on_ranks
from rung.system.launcher_env import LauncherRank


def finish(sweep: Sweep, options: BenchOptions, folder: Path) -> None:
    sweep.environment.update(command=shlex.join(["rung", *sys.argv[1:]]), date=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    path = write_sweep(sweep, folder)
    chart = path.with_suffix(".svg")
    chart.write_text(draw(sweep), encoding="utf-8")
    if options.as_json:
        sys.stdout.write(json.dumps(sweep.as_json(), indent=2) + "\n")
    else:
        show(sweep, [str(path), str(chart)])


def run_as_rank(plan: SweepPlan, place: LauncherRank) -> Sweep | None:
    """Measure as a rank of torchrun or mpirun. Returns None on all ranks but the first."""
    take_share_of_cores(place)
    if not place.is_main:
        measure(plan)
        return None
    with progress(plan.cases) as advance:
        return _whole(plan, measure(plan, advance))


def run_with_machines(plan: SweepPlan, nproc: int, options: BenchOptions) -> Sweep | None:
    """Measure with machines on which the same command was started. Returns None on all but the first."""

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    with (
        local_ranks_of_world(nproc, options.nnodes, options.rdzv, options.rdzv_key, say) as local_ranks,
        progress(plan.cases) as advance,
    ):
        found = on_local_ranks(measure, local_ranks, plan, listen=advance)[0]
    return _whole(plan, found) if local_ranks.first_rank == 0 else None


def _whole(plan: SweepPlan, found: CollectiveTiming) -> Sweep:
    """Add a row for each case that was not reached, so that none is missing without a reason."""
    rest = plan.cases[len(found.records) :]
    why = f"not measured: {found.records[-1].op} broke the group before"
    missing = [_unmeasured(case, plan, found.environment, why) for case in rest]
    return Sweep(found.environment, found.records + missing)


def run_here(plan: SweepPlan, nproc: int) -> Sweep:
    with progress(plan.cases) as advance:
        return run_on_ranks(plan, nproc, advance)


def run_on_ranks(plan: SweepPlan, nproc: int, advance: Callable[[Any], None]) -> Sweep:
    """Measure all cases on ranks of this machine. A call that ends a process or breaks the group gives a record, too;
    fresh processes measure the rest."""
    environment: dict[str, Any] = {}
    records: list[CollectiveRecord] = []

    def receive(message: Any) -> None:
        advance(message)
        if isinstance(message, CollectiveRecord):
            records.append(message)
        else:
            environment.update(message)

    while len(records) < len(plan.cases):
        before, left = len(records), replace(plan, cases=plan.cases[len(records) :])
        try:
            on_ranks(measure, nproc, left, listen=receive, timeout=plan.timeout_seconds + 60)
        except RankFailedError as failed:
            if not environment:
                raise EnvironmentProblem(f"the ranks could not begin: {failed}") from None
            why = failed.error.strip().splitlines()[-1] if failed.error else f"rank {failed.rank} {failed.what}"
            if len(records) == before or records[-1].state != "failed":  # else the record says why itself
                receive(_unmeasured(plan.cases[len(records)], plan, environment, why))
        # The same operation would break the group at every other size.
        last, kind = records[-1], plan.cases[len(records) - 1].kind
        while len(records) < len(plan.cases) and plan.cases[len(records)].kind == kind:
            receive(replace(last, bytes=plan.cases[len(records)].num_bytes))
    return Sweep(environment, records)


def _unmeasured(case: Case, plan: SweepPlan, environment: dict[str, Any], why: str) -> CollectiveRecord:
    return CollectiveRecord(
        op=case.op,
        backend=plan.backend,
        device=environment["device"],
        dtype=case.dtype,
        reduction=plan.reduction if case.op in REDUCING else "",
        bytes=case.num_bytes,
        ranks=environment["ranks"],
        hosts=len(environment["hosts"]),
        state="failed",
        why=why,
    )


def choose_backend_and_device(options: BenchOptions, place: LauncherRank | None) -> tuple[str, str]:
    """The backend and the device."""
    if options.backend == "mpi" and (place is None or place.launcher != "mpirun"):
        raise ConfigError(
            "--backend mpi measures the processes that mpirun starts: mpirun -n 4 rung bench collectives --backend mpi"
        )
    backend, device = options.backend, options.device
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() and device != "cpu" else "gloo"
    if backend == "nccl" and not torch.cuda.is_available():
        raise EnvironmentProblem("--backend nccl needs GPUs, and torch sees none here. Use --backend gloo.")
    if device == "auto":
        device = "cuda" if backend == "nccl" else "cpu"
    return backend, device


def default_nproc(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 2
