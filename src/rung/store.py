"""The store of a job, in which its ranks find each other; every value in it is signed with the key of their world.

The launcher serves it and says where, in the environment, and gives the ranks their key. For ranks that other programs
have started, rank 0 serves it: torchrun says where. Otherwise it travels over MPI itself where MPI is used; ranks of
one machine find it in a file that only they know of; those of several know the first machine if Slurm has started them,
and else have no way to ask each other without MPI: the user has to say it. These ranks make the key of their world from
the one that they share and from a nonce of rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import stat
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rung.environment import (
    Place,
    Step,
    environment_rank,
    environment_size,
    environment_world_key,
    has_store,
    is_in_environment,
    set_environment_world_key,
    silent_place,
    slurm_step,
    store_address,
)
from rung.errors import EnvironmentProblem
from rung.job_key import derive_key, new_nonce, shared_key, user_folder
from rung.mpi import library
from rung.network import address_among_others, address_towards, answers, slurm_address
from rung.processes import is_running, machine_name
from rung.signed_store import LOOPBACK, SignedStore, join_store, serve_store

if TYPE_CHECKING:
    from mpi4py import MPI

_SOMEWHERE = "192.0.2.1"  # nobody's address; the way to it is the default route
_MEET_SECONDS = 300.0  # ranks read the task and import torch before they come here, some of them on a slow disk
_LOOK_SECONDS = 0.02


def job_store(*, over_mpi: bool) -> SignedStore | None:
    """The store of the job that this process is part of; None for one process that nobody launched."""
    place = silent_place()
    if place is None and not has_store():
        return None
    if (key := environment_world_key()) is not None:
        with library.leaving_on_error():
            return _of_world(_open(place, over_mpi), key)
    store = open_store(place, over_mpi=over_mpi, key=shared_key())
    set_environment_world_key(store.key)
    return store


def open_store(place: Place | None, *, over_mpi: bool, key: str) -> SignedStore:
    """The store of a job, with a key for this world alone that is derived from the shared `key`. All ranks call it;
    rank 0's lives as long as the object. `place` may be None where the environment says all that is needed."""
    with library.leaving_on_error():
        store = _open(place, over_mpi)
        if has_store() or place is None:
            rank, size = environment_rank(), environment_size()
        else:
            rank, size = place.rank, place.size
        return _of_world(store, _make_world_key(SignedStore(store, key), rank, size))


def _of_world(store: TCPStore, key: str) -> SignedStore:
    # torchrun keeps one store while it starts the ranks again: they must not find what earlier ones left there.
    return SignedStore(PrefixStore(f"world-{derive_key(key, 'name')[:16]}", store), key)


def _make_world_key(store: SignedStore, rank: int, size: int) -> str:
    """A key that no process had before. Rank 0 chooses a nonce, from which it is derived, and tells it to each rank in
    answer to a nonce of that rank's own: an answer of an earlier job, which a stranger may have put back, has another
    name. Rank 0 answers until all ranks have heard it, since it may first see what earlier ranks asked."""
    nonce = new_nonce()
    if rank != 0:
        store.set(f"nonce/{rank}", nonce)
        try:
            main = store.get(f"answer/{nonce}").decode()
        except RuntimeError:
            raise EnvironmentProblem(
                f"rank {rank} did not hear from rank 0 through the store at {store.host}:{store.port}. See its output; "
                "or another program listens there, and the ranks of this job need another MASTER_PORT."
            ) from None
        store.add(f"heard/{main}", 1)
        return derive_key(store.key, f"world of ranks {main}")
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + _MEET_SECONDS
    while (heard := store.add(f"heard/{nonce}", 0)) < size - 1:
        if time.monotonic() > deadline:
            raise EnvironmentProblem(f"{heard + 1} of {size} ranks came within {_MEET_SECONDS:.0f} s; see the others.")
        for other in range(1, size):
            if store.check([f"nonce/{other}"]) and (asked := store.get(f"nonce/{other}")) != answered.get(other):
                store.set(f"answer/{asked.decode()}", nonce)
                answered[other] = asked
        time.sleep(_LOOK_SECONDS)
    return derive_key(store.key, f"world of ranks {nonce}")


def _open(place: Place | None, over_mpi: bool) -> TCPStore:
    if has_store() or place is None:
        host, port, is_kept = store_address()
        if port == 0:
            raise EnvironmentProblem(
                "MASTER_PORT=0 is in the environment: ranks would not find the store. Export a free port, "
                "as in MASTER_PORT=29500, or start torchrun with --standalone."
            )
        if is_kept or environment_rank() != 0:
            return join_store(host, port, seconds=_MEET_SECONDS)
        return _serve(host, port)
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
        return join_store(host, step.port, seconds=_MEET_SECONDS)
    return _serve(host, step.port)


def _serve(host: str, port: int) -> TCPStore:
    """Rank 0's store, on the interface of this machine that the others know as `host`."""
    try:
        return serve_store(address_among_others(host, port)[0], port)
    except OSError as error:
        raise EnvironmentProblem(
            f"port {port} of {host}, where the ranks of this job meet, cannot be listened at: {error.strerror}. Export "
            "another one: MASTER_PORT=29500."
        ) from None


def _meet_over_mpi(place: Place, world: MPI.Intracomm) -> TCPStore:
    # MPI's own way of waiting takes a core, which ranks that are still importing may need.
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(_LOOK_SECONDS)
    names = library.gather_texts(world, socket.gethostname())
    if place.is_main:
        store = serve_store(_address(names, place))
        library.gather_texts(world, json.dumps([store.host, store.port]))
        return store
    address, port = json.loads(library.gather_texts(world, "")[0])
    if answers(address, port, seconds=5.0):
        return join_store(address, port)
    raise EnvironmentProblem(
        f"rank {place.rank} on {socket.gethostname()} does not reach rank 0 at port {port} of {address}. Is there a "
        "firewall between them? Or export MASTER_ADDR and MASTER_PORT, with an address of rank 0 that all reach."
    )


def _address(names: list[str], place: Place) -> str:
    """Where rank 0 serves the store: the address from which it reaches the other machines, or else the world."""
    if place.is_one_machine:
        return LOOPBACK
    for name in (*dict.fromkeys(names[1:]), _SOMEWHERE):
        with contextlib.suppress(EnvironmentProblem):  # not every name resolves everywhere
            if not (found := address_towards(name, 1)).startswith("127."):
                return found
    return address_among_others(names[0], 1)[0]


def _meet_in_file(place: Place) -> TCPStore:
    path = _meeting_file(place)
    if place.is_main:
        store = serve_store(LOOPBACK)
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
            store = join_store(LOOPBACK, told["port"])
            store.add("met", 1)
            return store
        time.sleep(_LOOK_SECONDS)
    raise EnvironmentProblem(f"rank {place.rank} waited {_MEET_SECONDS:.0f} s for rank 0 to come; it said nothing.")


def _meeting_file(place: Place) -> Path:
    """A file in a folder of this user's own: whoever writes it decides whom the ranks talk to. All ranks of a machine
    find the same one. Anybody can make the first folder beforehand; the second may be on a disk of several machines."""
    folders = [Path(tempfile.gettempdir()) / f"rung-{os.getuid()}", user_folder() / machine_name()]
    found = next((folder for folder in folders if _is_private(folder)), None)
    if found is None:
        raise EnvironmentProblem(
            f"{folders[0]} and {folders[1]} are not directories that this user alone can write to: others could "
            "pretend to be rank 0. Remove one of them, or export another TMPDIR."
        )
    if found != folders[0] and place.is_main:
        warnings.warn(f"{folders[0]} is open to other users: ranks find each other through {found}", stacklevel=2)
    name = f"{place.launcher}-{place.job}-{place.size}"
    return found / hashlib.sha256(name.encode()).hexdigest()[:20]


def _is_private(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()  # not `stat`: a link may lead to another folder of this user's
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
