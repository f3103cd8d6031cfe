"""Where ranks that others than Rung have started find each other: rank 0 keeps a store, and its address reaches them.

torchrun says it in the environment. Otherwise it travels over MPI itself where MPI is used; ranks of one
machine find it in a file that only they know of; those of several know the first machine if Slurm has started them, and
else have no way to ask each other without MPI: the user has to say it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rung.environment import Place, Step, has_store, is_in_environment, slurm_step, store_address
from rung.errors import EnvironmentProblem
from rung.mpi import library
from rung.network import address_towards, answers, slurm_address
from rung.processes import is_running

if TYPE_CHECKING:
    from mpi4py import MPI

_LOOPBACK = "127.0.0.1"
_SOMEWHERE = "192.0.2.1"  # nobody's address; the way to it is the default route
_MEET_SECONDS = 300.0  # ranks read the task and import torch before they come here, some of them on a slow disk
_LOOK_SECONDS = 0.02


def open_store(place: Place, *, over_mpi: bool) -> TCPStore:
    """The store of the job. All ranks call it; rank 0's lives as long as the object."""
    with library.leaving_on_error():
        return _open(place, over_mpi)


def _open(place: Place, over_mpi: bool) -> TCPStore:
    if has_store():
        host, port, is_kept = store_address()
        return TCPStore(host, port, None, place.is_main and not is_kept, wait_for_workers=False, multi_tenant=True)
    if over_mpi:
        return _meet_over_mpi(place, library.start())
    if place.is_one_machine:
        return _meet_in_file(place)
    if (step := slurm_step()) is not None and step.place == place:
        return _meet_at_head(step)
    if library.is_installed():
        return _meet_over_mpi(place, library.start())
    raise EnvironmentProblem(
        f"{place.size} ranks on several machines do not know where to meet. Either install mpi4py (pip install "
        "'rung[mpi]'), over which rank 0 can tell its address, or say it: mpirun -x MASTER_ADDR=HOST -x "
        "MASTER_PORT=29500 ..., with the host of rank 0."
    )


def _meet_at_head(step: Step) -> TCPStore:
    """On Slurm's first machine, at a port that follows from the numbers of job and step."""
    place = step.place
    if place.is_main and place.node not in ("", step.head) and not is_in_environment("MASTER_ADDR"):
        raise EnvironmentProblem(
            f"rank 0 is on {place.node}, and the first machine of this Slurm step is {step.head}, where the others "
            "look for it. Leave out --distribution=arbitrary, or export MASTER_ADDR with the machine of rank 0."
        )
    host = slurm_address(step.head)
    if not place.is_main:
        return TCPStore(host, step.port, None, False, timeout=timedelta(seconds=_MEET_SECONDS))
    try:
        return TCPStore(host, step.port, None, True, wait_for_workers=False)
    except RuntimeError as error:
        raise EnvironmentProblem(
            f"port {step.port} of {step.head}, where the ranks of this Slurm step meet, cannot be listened at: "
            f"{str(error).splitlines()[0]} Export another one: MASTER_PORT=29500."
        ) from None


def _meet_over_mpi(place: Place, world: MPI.Intracomm) -> TCPStore:
    # MPI's own way of waiting takes a core, which ranks that are still importing may need.
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(_LOOK_SECONDS)
    names = world.allgather(socket.gethostname())
    if place.is_main:
        store = _listen()
        world.bcast((_addresses(names, place), store.port))
        return store
    addresses, port = world.bcast(None)
    for address in addresses:
        if answers(address, port, seconds=5.0):
            return TCPStore(address, port, None, False)
    raise EnvironmentProblem(
        f"rank {place.rank} on {socket.gethostname()} does not reach rank 0 at port {port} of {', '.join(addresses)}. "
        "Is there a firewall between them?"
    )


def _addresses(names: list[str], place: Place) -> list[str]:
    """Under what rank 0 may be reached: the addresses from which it reaches the others or the world, and its name."""
    if place.is_one_machine:
        return [_LOOPBACK]
    found = []
    for name in (*dict.fromkeys(names[1:]), _SOMEWHERE):
        with contextlib.suppress(EnvironmentProblem):  # not every name resolves everywhere
            found.append(address_towards(name, 1))
    return [address for address in dict.fromkeys([*found, names[0]]) if not address.startswith("127.")]


def _meet_in_file(place: Place) -> TCPStore:
    path = _meeting_file(place)
    if place.is_main:
        store = _listen()
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"port": store.port, "pid": os.getpid()}))
        partial.rename(path)
        store.add("met", 1)
        deadline = time.monotonic() + _MEET_SECONDS
        while (met := store.add("met", 0)) < place.size:
            if time.monotonic() > deadline:
                raise EnvironmentProblem(
                    f"{met} of {place.size} ranks came within {_MEET_SECONDS:.0f} s; see the others."
                )
            time.sleep(_LOOK_SECONDS)
        path.unlink(missing_ok=True)
        return store
    deadline = time.monotonic() + _MEET_SECONDS
    while time.monotonic() < deadline:
        try:
            told = json.loads(path.read_text())
        except FileNotFoundError:
            told = None
        if told is not None and is_running(told["pid"]):  # and not left by a job that was killed here
            store = TCPStore(_LOOPBACK, told["port"], None, False)
            store.add("met", 1)
            return store
        time.sleep(_LOOK_SECONDS)
    raise EnvironmentProblem(f"rank {place.rank} waited {_MEET_SECONDS:.0f} s for rank 0 to come; it said nothing.")


def _meeting_file(place: Place) -> Path:
    """A file in a folder of this user's own: whoever writes it decides whom the ranks talk to."""
    folder = Path(tempfile.gettempdir()) / f"rung-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
        raise EnvironmentProblem(f"{folder} is open to other users, who could pretend to be rank 0. Remove it.")
    name = f"{place.launcher}-{place.job}-{place.size}"
    return folder / hashlib.sha256(name.encode()).hexdigest()[:20]


def _listen() -> TCPStore:
    return TCPStore(_LOOPBACK, 0, None, True, wait_for_workers=False)
