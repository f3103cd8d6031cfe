"""`rung bench collectives`: from flags to a table, a chart and records. Starts the ranks, or is one of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.disk import check_folder, writing
from rung.environment import Place
from rung.errors import ConfigError, EnvironmentProblem, nearest
from rung.launch.server import warm_up
from rung.launch.signals import leaving_at_once
from rung.launch.where import find_machines, take_share_of_cores
from rung.measured import BENCH_FOLDER, OPS, REDUCING, CollectiveRecord, Sweep, write_sweep

if TYPE_CHECKING:  # torch is imported later, while the server that `warm_up` starts imports it, too
    from rung.bench.collectives import Case, Measured, Plan

SIZES = "1K:256M"
DTYPES = "float32,bfloat16"
KNOWN_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_STEP = 4
_LARGEST = 2**40


@dataclass(frozen=True)
class Asked:
    """The flags, as they came."""

    nproc: int | None = None
    nnodes: int = 1
    rdzv: str | None = None
    rdzv_key: str | None = None
    backend: str = "auto"
    device: str = "auto"
    ops: Sequence[str] = ()
    sizes: str = SIZES
    dtypes: str = DTYPES
    reduction: str = "sum"
    seconds: float = 0.2
    out: str | None = None
    as_json: bool = False


def collectives_command(asked: Asked) -> int:
    """Returns the exit code: 1 if a result was wrong or a call failed."""
    folder = check_folder(asked.out if asked.out is not None else BENCH_FOLDER, "--out")
    with leaving_at_once():
        sizes, dtypes, ops = parse_sizes(asked.sizes), _parse_dtypes(asked.dtypes), _parse_ops(asked.ops)
        machines = find_machines(asked.nproc, asked.nnodes, asked.rdzv)
        place = machines.place
        asked = replace(asked, nproc=machines.nproc, nnodes=machines.nnodes, rdzv=machines.rdzv)
        if machines.line:
            sys.stderr.write(f"{machines.line}\n")
        if place is None:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            warm_up(["rung.bench.collectives", "torch.distributed.tensor"])
        backend, device = _choose(asked, place)
        if asked.seconds <= 0:
            raise ConfigError(f"--seconds {asked.seconds:g}: a positive time is needed.")
        from rung.bench.collectives import Case, Plan

        cases = [Case(op, dtype, size) for op in ops if op != "barrier" for dtype in dtypes for size in sizes]
        cases += [Case("barrier", "", 0)] if "barrier" in ops else []
        plan = Plan(tuple(cases), backend, device, asked.reduction, asked.seconds)
    if place is not None:
        sweep = _run_as_rank(plan, place)
    else:
        nproc = asked.nproc or _usual_nproc(device)
        sweep = _run_with_others(plan, nproc, asked) if asked.nnodes > 1 else _run_here(plan, nproc)
    if sweep is None:
        return 0
    with writing(folder, "--out"):
        _finish(sweep, asked, folder)
    return int(any(record.state in ("wrong", "failed") for record in sweep.records))


def _finish(sweep: Sweep, asked: Asked, folder: Path) -> None:
    from rung.bench.chart import draw
    from rung.bench.view import show

    sweep.environment.update(command=shlex.join(["rung", *sys.argv[1:]]), date=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    path = write_sweep(sweep, folder)
    chart = path.with_suffix(".svg")
    chart.write_text(draw(sweep), encoding="utf-8")
    if asked.as_json:
        sys.stdout.write(json.dumps(sweep.as_json(), indent=2) + "\n")
    else:
        show(sweep, [str(path), str(chart)])


# -- running it ------------------------------------------------------------------------------------------------------


def _run_as_rank(plan: Plan, place: Place) -> Sweep | None:
    """In the world of torchrun or mpirun. None on all ranks but the first, which speaks for them."""
    from rung.bench.collectives import measure
    from rung.bench.view import progress

    take_share_of_cores(place)
    if not place.is_main:
        measure(plan)
        return None
    with progress(plan.cases) as advance:
        return _whole(plan, measure(plan, advance))


def _run_with_others(plan: Plan, nproc: int, asked: Asked) -> Sweep | None:
    """With machines on which the same command was started. None on all but the first."""
    from rung.bench.collectives import measure
    from rung.bench.view import progress
    from rung.launch.crew import on_seats, seats_among

    def say(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    with seats_among(nproc, asked.nnodes, asked.rdzv, asked.rdzv_key, say) as seats, progress(plan.cases) as advance:
        found = on_seats(measure, seats, plan, listen=advance)[0]
    return _whole(plan, found) if seats.first_rank == 0 else None


def _whole(plan: Plan, found: Measured) -> Sweep:
    """With rows for the cases that could not be reached: there are no silent holes."""
    rest = plan.cases[len(found.records) :]
    why = f"not measured: {found.records[-1].op} broke the group before"
    missing = [unmeasured(case, plan, found.environment, why) for case in rest]
    return Sweep(found.environment, found.records + missing)


def _run_here(plan: Plan, nproc: int) -> Sweep:
    from rung.bench.view import progress

    with progress(plan.cases) as advance:
        return run_on_ranks(plan, nproc, advance)


def run_on_ranks(plan: Plan, nproc: int, advance: Callable[[Any], None]) -> Sweep:
    """All cases on ranks of this machine. A call that ends a process or breaks the group is a record like others: the
    rest goes on with fresh processes."""
    from rung.bench.collectives import measure
    from rung.launch.crew import CrewFailed, on_ranks

    environment: dict[str, Any] = {}
    records: list[CollectiveRecord] = []

    def hear(told: Any) -> None:
        advance(told)
        if isinstance(told, CollectiveRecord):
            records.append(told)
        else:
            environment.update(told)

    while len(records) < len(plan.cases):
        before, left = len(records), replace(plan, cases=plan.cases[len(records) :])
        try:
            on_ranks(measure, nproc, left, listen=hear, timeout=plan.timeout_seconds + 60)
        except CrewFailed as failed:
            if not environment:
                raise EnvironmentProblem(f"the ranks could not begin: {failed}") from None
            why = failed.error.strip().splitlines()[-1] if failed.error else f"rank {failed.rank} {failed.what}"
            if len(records) == before or records[-1].state != "failed":  # else it has told itself what broke it
                hear(unmeasured(plan.cases[len(records)], plan, environment, why))
        # What broke it would do so again at every size.
        last, kind = records[-1], plan.cases[len(records) - 1].kind
        while len(records) < len(plan.cases) and plan.cases[len(records)].kind == kind:
            hear(replace(last, bytes=plan.cases[len(records)].num_bytes))
    return Sweep(environment, records)


def unmeasured(case: Case, plan: Plan, environment: dict[str, Any], why: str) -> CollectiveRecord:
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


# -- what was asked for ----------------------------------------------------------------------------------------------


def parse_sizes(text: str) -> list[int]:
    """Bytes: 4K,1M are two; 1K:256M is every power of four between; 1K:1M:2 every power of two."""
    found: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ConfigError(f"--sizes takes FROM:TO or FROM:TO:FACTOR, not {part!r}.")
        low, high = _parse_size(first), _parse_size(rest[0] if rest else first)
        step = int(rest[1]) if len(rest) == 2 and rest[1].isdigit() else _STEP
        if high < low or step < 2 or (len(rest) == 2 and not rest[1].isdigit()):
            raise ConfigError(f"--sizes {part}: from the smaller to the larger, by a factor of at least 2.")
        while low <= high:
            found.append(low)
            low *= step
    return sorted(set(found))


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match.group(1)) * _UNITS[match.group(2).upper()] if match else 0
    if not 0 < size <= _LARGEST:
        raise ConfigError(f"--sizes takes sizes such as 1K, 64M or 2G (powers of 1024), not {text!r}.")
    return size


def _parse_dtypes(text: str) -> list[str]:
    return _known(text.replace(",", " ").split(), KNOWN_DTYPES, "dtypes")


def _parse_ops(ops: Sequence[str]) -> list[str]:
    asked = _known([op for text in ops for op in text.replace(",", " ").split()], OPS, "ops")
    return [op for op in OPS if op in asked] or list(OPS)


def _known(words: list[str], choices: Sequence[str], flag: str) -> list[str]:
    for word in words:
        if word not in choices:
            raise ConfigError(f"--{flag} knows {', '.join(choices)}, not {word!r}.{nearest(word, choices)}")
    return list(dict.fromkeys(words))


def _choose(asked: Asked, place: Place | None) -> tuple[str, str]:
    """The backend and the device."""
    if asked.backend == "mpi" and (place is None or place.launcher != "mpirun"):
        raise ConfigError(
            "--backend mpi measures the processes that mpirun starts: mpirun -n 4 rung bench collectives --backend mpi"
        )
    import torch

    backend, device = asked.backend, asked.device
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() and device != "cpu" else "gloo"
    if backend == "nccl" and not torch.cuda.is_available():
        raise EnvironmentProblem("--backend nccl needs GPUs, and torch sees none here. Use --backend gloo.")
    if device == "auto":
        device = "cuda" if backend == "nccl" else "cpu"
    return backend, device


def _usual_nproc(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "cuda" else 2
