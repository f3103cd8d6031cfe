"""Runs the checks: on this machine, then on ranks that it starts or that another launcher has started."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from rung.hardware.doctor.finding import Finding
from rung.hardware.doctor.gpus import check_gpus, peer_access
from rung.hardware.doctor.machine import check_machine
from rung.hardware.doctor.options import DoctorOptions
from rung.hardware.doctor.ranks import RankCheckSettings, check_ranks, rendezvous_failed
from rung.launch.rendezvous.topology import take_share_of_cores
from rung.launch.spawn import RankFailedError, local_ranks_of_world, on_local_ranks, on_ranks
from rung.system.launcher_env import LauncherRank

_SECONDS = 60  # to form a group of the ranks of one machine
_MULTI_MACHINE_SECONDS = 300  # the same over several machines


def check_this_machine(options: DoctorOptions, place: LauncherRank | None) -> list[Finding]:
    """The findings on this machine; under torchrun or mpirun, only its first rank checks it."""
    if place is not None and place.local_rank != 0:
        return []
    nproc = _nproc(options) if place is None else place.local_size
    nnodes = options.nnodes if place is None else -(-place.size // place.local_size)
    found = check_machine(nproc=nproc, nnodes=nnodes, rdzv=options.rdzv, folder=Path(options.out))
    return [*found, *check_gpus(), *([peer_access()] if options.device != "cpu" else [])]


def check_with_ranks(options: DoctorOptions, local: list[Finding]) -> tuple[bool, list[Finding]]:
    """Start ranks and run their checks. Returns whether to print here, and the findings.

    The first machine prints the findings of all. The others print their own only if the ranks could not connect.
    """

    def settings_now() -> RankCheckSettings:
        """Called when the ranks start: `started` must not include the wait for other machines."""
        seconds = _SECONDS if options.nnodes == 1 else _MULTI_MACHINE_SECONDS
        return RankCheckSettings(options.backend, options.device, seconds, started=time.time())

    try:
        if options.nnodes == 1:
            return True, on_ranks(check_ranks, _nproc(options), local, settings_now(), timeout=2 * _SECONDS)[0]
        with local_ranks_of_world(_nproc(options), options.nnodes, options.rdzv, options.rdzv_key, _log) as local_ranks:
            timeout = 2 * _MULTI_MACHINE_SECONDS
            found = on_local_ranks(check_ranks, local_ranks, local, settings_now(), timeout=timeout)[0]
        if local_ranks.first_rank == 0:
            return True, found
        _log("the machine of rank 0 prints the findings")
        return False, local
    except RankFailedError as error:
        return True, [*local, rendezvous_failed(error)]


def check_as_rank(options: DoctorOptions, place: LauncherRank, local: list[Finding]) -> tuple[bool, list[Finding]]:
    """Run the checks as a rank of torchrun or mpirun. Rank 0 prints; if the ranks cannot connect, each machine does."""
    take_share_of_cores(place)
    seconds = _SECONDS if place.is_one_machine else _MULTI_MACHINE_SECONDS
    try:
        found = check_ranks(local, RankCheckSettings(options.backend, options.device, seconds))
    except Exception as error:
        return place.local_rank == 0, [*local, rendezvous_failed(error)]
    return place.is_main, found


def _nproc(options: DoctorOptions) -> int:
    gpus = torch.cuda.device_count() if options.device != "cpu" and options.backend != "gloo" else 0
    return options.nproc or gpus or 2


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")
