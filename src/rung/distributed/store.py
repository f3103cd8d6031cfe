"""Opens the store of a job, through which its ranks rendezvous; every value is signed with the key of their world.

Rung's launcher serves the store, and passes its address and the key in the environment. Ranks that another program has
started use the store of torchrun, or else one that rank 0 serves. They learn its address over MPI where MPI is used,
on one machine from a private file, and under Slurm from the name of the first machine; in all other cases the user has
to export it. These ranks derive the key of their world from the shared key and a nonce of rank 0.
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

from rung.distributed.job_key import derive_key, new_nonce, shared_key, user_folder
from rung.distributed.mpi import backend
from rung.distributed.signed_store import LOOPBACK, SignedStore, join_store, serve_store
from rung.errors import EnvironmentProblem
from rung.system.launcher_env import (
    LauncherRank,
    SlurmStep,
    environment_rank,
    environment_size,
    environment_world_key,
    has_store,
    is_in_environment,
    mpi_or_slurm_rank,
    set_environment_world_key,
    slurm_step,
    store_address,
)
from rung.system.network import UNASSIGNED_ADDRESS, address_among_others, address_towards, answers, slurm_address
from rung.system.processes import is_running, machine_name

if TYPE_CHECKING:
    from mpi4py import MPI

_RENDEZVOUS_SECONDS = 300.0  # ranks load the task and import torch first, some of them from a slow disk
_POLL_SECONDS = 0.02


def job_store(*, over_mpi: bool) -> SignedStore | None:
    """The store of this process's job; None for a process that no launcher has started."""
    place = mpi_or_slurm_rank()
    if place is None and not has_store():
        return None
    if (key := environment_world_key()) is not None:
        with backend.leaving_on_error():
            return _of_world(_open(place, over_mpi), key)
    store = open_store(place, over_mpi=over_mpi, key=shared_key())
    set_environment_world_key(store.key)
    return store


def open_store(place: LauncherRank | None, *, over_mpi: bool, key: str) -> SignedStore:
    """Open the store of a job, with a key for this world that is derived from the shared `key`. All ranks call it; a
    store that rank 0 serves lives as long as the object. `place` may be None if torch's variables are set."""
    with backend.leaving_on_error():
        store = _open(place, over_mpi)
        if has_store() or place is None:
            rank, size = environment_rank(), environment_size()
        else:
            rank, size = place.rank, place.size
        return _of_world(store, _make_world_key(SignedStore(store, key), rank, size))


def _of_world(store: TCPStore, key: str) -> SignedStore:
    # torchrun keeps its store across restarts: new ranks must not read the values of earlier ones.
    return SignedStore(PrefixStore(f"world-{derive_key(key, 'name')[:16]}", store), key)


def _make_world_key(store: SignedStore, rank: int, size: int) -> str:
    """A new key for this world, derived from a nonce of rank 0. Every rank publishes a nonce of its own, and rank 0
    writes its nonce under that name, so that a replayed answer of an earlier job has another name. Rank 0 answers until
    all ranks have confirmed, since it may see nonces of earlier ranks first."""
    nonce = new_nonce()
    if rank != 0:
        store.set(f"nonce/{rank}", nonce)
        try:
            main = store.get(f"answer/{nonce}").decode()
        except RuntimeError:
            raise EnvironmentProblem(
                f"rank {rank} got no answer from rank 0 through the store at {store.host}:{store.port}. See the output "
                "of rank 0; if another program listens there, export another MASTER_PORT."
            ) from None
        store.add(f"heard/{main}", 1)
        return derive_key(store.key, f"world of ranks {main}")
    answered: dict[int, bytes] = {}
    deadline = time.monotonic() + _RENDEZVOUS_SECONDS
    while (heard := store.add(f"heard/{nonce}", 0)) < size - 1:
        if time.monotonic() > deadline:
            raise _missing_ranks(heard + 1, size)
        for other in range(1, size):
            if store.check([f"nonce/{other}"]) and (theirs := store.get(f"nonce/{other}")) != answered.get(other):
                store.set(f"answer/{theirs.decode()}", nonce)
                answered[other] = theirs
        time.sleep(_POLL_SECONDS)
    return derive_key(store.key, f"world of ranks {nonce}")


def _missing_ranks(joined: int, size: int) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"{joined} of {size} ranks joined within {_RENDEZVOUS_SECONDS:.0f} s; see the output of the others."
    )


def _open(place: LauncherRank | None, over_mpi: bool) -> TCPStore:
    if has_store() or place is None:
        host, port, is_kept = store_address()
        if port == 0:
            raise EnvironmentProblem(
                "MASTER_PORT=0 is in the environment, which names no port at which ranks could find the store. Export "
                "a free port, as in MASTER_PORT=29500, or start torchrun with --standalone."
            )
        if is_kept or environment_rank() != 0:
            return join_store(host, port, seconds=_RENDEZVOUS_SECONDS)
        return _serve(host, port)
    if over_mpi:
        return _store_over_mpi(place, backend.start())
    if place.is_one_machine:
        return _store_from_file(place)
    if (step := slurm_step()) is not None and step.place == place:
        return _store_at_slurm_head(step)
    if backend.is_installed():
        return _store_over_mpi(place, backend.start())
    raise EnvironmentProblem(
        f"{place.size} ranks on several machines have no address at which to rendezvous. Either install mpi4py (pip "
        "install 'rung[mpi]'), over which rank 0 sends its address, or give it: mpirun -x MASTER_ADDR=HOST -x "
        "MASTER_PORT=29500 ..., with the host of rank 0."
    )


def _store_at_slurm_head(step: SlurmStep) -> TCPStore:
    """A store on Slurm's first machine, at a port computed from the numbers of job and step."""
    place = step.place
    if place.is_main and place.node not in ("", step.head) and not is_in_environment("MASTER_ADDR"):
        raise EnvironmentProblem(
            f"rank 0 is on {place.node}, but the others connect to the first machine of this Slurm step, {step.head}. "
            "Leave out --distribution=arbitrary, or export MASTER_ADDR with the machine of rank 0."
        )
    host = slurm_address(step.head)
    if not place.is_main:
        return join_store(host, step.port, seconds=_RENDEZVOUS_SECONDS)
    return _serve(host, step.port)


def _serve(host: str, port: int) -> TCPStore:
    """Rank 0's store, on the interface of this machine with the address `host`."""
    try:
        return serve_store(address_among_others(host, port)[0], port)
    except OSError as error:
        raise EnvironmentProblem(
            f"rank 0 cannot listen at port {port} of {host} for the other ranks: {error.strerror}. Export another "
            "port, as in MASTER_PORT=29500."
        ) from None


def _store_over_mpi(place: LauncherRank, world: MPI.Intracomm) -> TCPStore:
    # A blocking barrier of MPI spins on a core, which ranks that are still importing may need.
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(_POLL_SECONDS)
    names = backend.gather_texts(world, socket.gethostname())
    if place.is_main:
        store = serve_store(_address(names, place))
        backend.gather_texts(world, json.dumps([store.host, store.port]))
        return store
    address, port = json.loads(backend.gather_texts(world, "")[0])
    if answers(address, port, seconds=5.0):
        return join_store(address, port)
    raise EnvironmentProblem(
        f"rank {place.rank} on {socket.gethostname()} does not reach rank 0 at port {port} of {address}. Is there a "
        "firewall between them? Or export MASTER_ADDR and MASTER_PORT, with an address of rank 0 that all reach."
    )


def _address(names: list[str], place: LauncherRank) -> str:
    """Where rank 0 serves the store: its address towards the other machines, or else of the default route."""
    if place.is_one_machine:
        return LOOPBACK
    for name in (*dict.fromkeys(names[1:]), UNASSIGNED_ADDRESS):
        with contextlib.suppress(EnvironmentProblem):  # not every name resolves everywhere
            if not (found := address_towards(name, 1)).startswith("127."):
                return found
    return address_among_others(names[0], 1)[0]


def _store_from_file(place: LauncherRank) -> TCPStore:
    path = _address_file(place)
    if place.is_main:
        store = serve_store(LOOPBACK)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"port": store.port, "pid": os.getpid()}))
        partial.rename(path)  # atomically: the others may read it at any moment
        store.add("met", 1)
        deadline = time.monotonic() + _RENDEZVOUS_SECONDS
        while (joined := store.add("met", 0)) < place.size:  # adding 0 reads the counter
            if time.monotonic() > deadline:
                raise _missing_ranks(joined, place.size)
            time.sleep(_POLL_SECONDS)
        path.unlink(missing_ok=True)
        return store
    deadline = time.monotonic() + _RENDEZVOUS_SECONDS
    while time.monotonic() < deadline:
        try:
            address = json.loads(path.read_text())
        except FileNotFoundError:
            address = None
        if address is not None and is_running(address["pid"]):  # else a killed job has left the file
            store = join_store(LOOPBACK, address["port"])
            store.add("met", 1)
            return store
        time.sleep(_POLL_SECONDS)
    raise EnvironmentProblem(
        f"rank {place.rank} waited {_RENDEZVOUS_SECONDS:.0f} s for rank 0, which wrote no address to {path}."
    )


def _address_file(place: LauncherRank) -> Path:
    """The file with the port of rank 0's store, the same for all ranks of a machine. Its folder must be private: the
    writer of the file decides which store the ranks join. Another user can create the first folder beforehand; the
    second may be on a disk that several machines share."""
    folders = [Path(tempfile.gettempdir()) / f"rung-{os.getuid()}", user_folder() / machine_name()]
    found = next((folder for folder in folders if _is_private(folder)), None)
    if found is None:
        raise EnvironmentProblem(
            f"{folders[0]} and {folders[1]} are not directories that this user alone can write to: others could "
            "pretend to be rank 0. Remove one of them, or export another TMPDIR."
        )
    if found != folders[0] and place.is_main:
        warnings.warn(f"{folders[0]} is open to other users: ranks rendezvous through {found}", stacklevel=2)
    name = f"{place.launcher}-{place.job}-{place.size}"
    return found / hashlib.sha256(name.encode()).hexdigest()[:20]


def _is_private(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()  # not `stat`: a link could lead to another of this user's folders
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False
