"""Which device and which backend a rank uses; an error where the machine does not have them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rung.distributed.mpi import BACKEND as MPI_BACKEND
from rung.distributed.mpi import backend as mpi
from rung.errors import EnvironmentProblem
from rung.spec.strategy import Layout
from rung.system.processes import num_cores


def choose_device(device: str, backend: str, local_rank: int, local_size: int) -> torch.device:
    """The device of one local rank; an error if the machine has none such."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if gpus == 0:
        raise EnvironmentProblem(
            "device=cuda was asked for, but torch sees no GPU here. Use device=cpu, or device=auto."
        )
    if backend == "mpi":
        raise EnvironmentProblem(
            "--backend mpi carries what lies in host memory, and this run is on a GPU. Use --backend nccl, which "
            "mpirun starts as well, or --set device=cpu."
        )
    if local_size > gpus and backend != "gloo":
        raise EnvironmentProblem(
            f"{local_size} processes on {gpus} GPU{'s' if gpus > 1 else ''}: NCCL takes one process a GPU. Use "
            f"--nproc {gpus}, or --set backend=gloo to let processes share a GPU, or --set device=cpu."
        )
    return torch.device("cuda", local_rank % gpus)


def choose_devices(layout: Layout, device: str, backend: str) -> tuple[torch.device, ...]:
    """The devices of dp's replicas, one thread each; an error if the machine has too few."""
    first = choose_device(device, backend, 0, 1)
    if first.type == "cpu":
        return (first,) * (layout.devices or max(2, num_cores()))
    gpus = torch.cuda.device_count()
    count = layout.devices or gpus
    if count > gpus and backend != "gloo":
        raise EnvironmentProblem(
            f"{layout.name} asks for {count} GPUs, and torch sees {gpus}. Use --strategy dp{gpus}, or --backend gloo "
            "to let replicas share a GPU, or --set device=cpu."
        )
    return tuple(torch.device("cuda", number % gpus) for number in range(count))


def choose_backend(backend: str, device: torch.device, layout: Layout | None = None) -> str:
    """The name of the backend in torch; an error if the machine or the layout cannot use it."""
    if backend == "mpi":
        # torch's own MPI backend runs one call at a time in a process, whichever its group: with several groups, ranks
        # that begin with different ones deadlock.
        uses_torch = dist.is_mpi_available() and layout is not None and layout.uses_ddp
        mpi.refuse_if_impossible(needs_library=not uses_torch)
        return "cpu:mpi" if uses_torch else MPI_BACKEND
    if backend == "nccl" and device.type != "cuda":
        raise EnvironmentProblem(
            "backend=nccl moves data between GPUs only, and this run is on the CPU. Use backend=gloo."
        )
    if device.type == "cpu" or backend == "gloo":
        return "gloo"
    # gloo beside NCCL carries tensors on the host: logged values and offloaded gradients.
    return "cpu:gloo,cuda:nccl"
