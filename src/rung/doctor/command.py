"""`rung doctor`: checks this machine, then starts ranks (or is one of them) and checks what is between them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rung.doctor.finding import FAILED, NOT_HERE, OK, WARNING, Finding, fold, worst
from rung.environment import Place
from rung.launch.server import warm_up
from rung.launch.signals import leaving_at_once
from rung.launch.where import find_machines, take_share_of_cores

_STYLES = {OK: "green", WARNING: "yellow", FAILED: "red", NOT_HERE: "dim"}
_SECONDS = 60  # for the ranks of one machine to meet
_SECONDS_BETWEEN = 300  # for machines


@dataclass(frozen=True)
class Asked:
    """The flags, as they came."""

    nproc: int | None = None
    nnodes: int = 1
    rdzv: str | None = None
    rdzv_key: str | None = None
    backend: str = "auto"
    device: str = "auto"
    out: str = "runs"
    as_json: bool = False


def doctor_command(asked: Asked) -> int:
    """Returns the exit code: 1 if a check failed."""
    with leaving_at_once():
        machines = find_machines(asked.nproc, asked.nnodes, asked.rdzv)
        place = machines.place
        asked = replace(asked, nproc=machines.nproc, nnodes=machines.nnodes, rdzv=machines.rdzv)
        if machines.line:
            sys.stderr.write(f"{machines.line}\n")
        if place is None:
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
            warm_up(["rung.doctor.ranks", "torch.distributed.tensor"])
        importlib.import_module("rung.doctor.ranks")  # torch, while a signal may still end this process at once
    console = Console(file=sys.stderr, markup=False)
    with console.status("looking at this machine") if place is None else contextlib.nullcontext():
        own = _look_here(asked, place)
        is_told, findings = _examine_as_rank(asked, place, own) if place is not None else _examine(asked, own)
    if is_told:
        _tell(findings, as_json=asked.as_json)
    return int(worst(findings) == FAILED)


def _look_here(asked: Asked, place: Place | None) -> list[Finding]:
    """At this machine, once."""
    from rung.doctor.gpus import check_gpus, peer_access
    from rung.doctor.machine import check_machine

    if place is not None and place.local_rank != 0:
        return []
    nproc = _nproc(asked) if place is None else place.local_size
    nnodes = asked.nnodes if place is None else -(-place.size // place.local_size)
    found = check_machine(nproc=nproc, nnodes=nnodes, rdzv=asked.rdzv, folder=Path(asked.out))
    return [*found, *check_gpus(), *([peer_access()] if asked.device != "cpu" else [])]


def _examine(asked: Asked, own: list[Finding]) -> tuple[bool, list[Finding]]:
    """Start ranks and let them look. On all machines but the first, only what was found there counts, and is told
    there only if the ranks did not get through."""
    from rung.doctor.ranks import Examination, examine, rendezvous_failed
    from rung.launch.crew import CrewFailed, on_ranks, on_seats, seats_among

    def how() -> Examination:
        seconds = _SECONDS if asked.nnodes == 1 else _SECONDS_BETWEEN
        return Examination(asked.backend, asked.device, seconds, started=time.time())

    try:
        if asked.nnodes == 1:
            return True, on_ranks(examine, _nproc(asked), own, how(), timeout=2 * _SECONDS)[0]
        with seats_among(_nproc(asked), asked.nnodes, asked.rdzv, asked.rdzv_key, _say) as seats:
            found = on_seats(examine, seats, own, how(), timeout=2 * _SECONDS_BETWEEN)[0]
        if seats.first_rank == 0:
            return True, found
        _say("the findings are told on the machine of rank 0")
        return False, own
    except CrewFailed as error:
        return True, [*own, rendezvous_failed(error)]


def _examine_as_rank(asked: Asked, place: Place, own: list[Finding]) -> tuple[bool, list[Finding]]:
    """In the world of torchrun or mpirun: the first rank tells, or each machine for itself if they do not meet."""
    from rung.doctor.ranks import Examination, examine, rendezvous_failed

    take_share_of_cores(place)
    seconds = _SECONDS if place.is_one_machine else _SECONDS_BETWEEN
    try:
        found = examine(own, Examination(asked.backend, asked.device, seconds))
    except Exception as error:
        return place.local_rank == 0, [*own, rendezvous_failed(error)]
    return place.is_main, found


def _nproc(asked: Asked) -> int:
    import torch

    gpus = torch.cuda.device_count() if asked.device != "cpu" and asked.backend != "gloo" else 0
    return asked.nproc or gpus or 2


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _tell(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        content = {"verdict": worst(findings), "checks": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    console = Console(file=sys.stdout, highlight=False, markup=False)
    width = max(len(finding.check) for finding in findings)
    for finding in fold(findings):
        where = f" [{finding.where}]" if finding.where else ""
        verdict = (f"{finding.verdict:<9}", _STYLES[finding.verdict])
        row = Text.assemble(verdict, (f" {finding.check:<{width}}  ", "bold"), f"{finding.found}{where}")
        console.print(row, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{'':<9} {'':<{width}}  fix: {finding.fix}"), soft_wrap=True)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _STYLES}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
