"""A rank's view of the job: its number, device, process groups and mesh, in a real job or in a dry run.

Code above takes a `World` and need not know which of the two it is: the differences are in `World.tensors`, in ddp.py
and in the shims of fake_world.py.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rung.distributed import fake_world
from rung.distributed.collectives import gather_json, start_gather
from rung.distributed.cuda_emulation import like_cuda
from rung.distributed.devices import choose_backend, choose_device, choose_devices
from rung.distributed.mpi import BACKEND as MPI_BACKEND
from rung.distributed.mpi import backend as mpi
from rung.distributed.signed_store import SignedStore
from rung.distributed.store import job_store
from rung.distributed.tensors import Tensors
from rung.distributed.torch_private import flatten
from rung.errors import EnvironmentProblem, StrategyError
from rung.spec.abilities import can, optional_ranks, why_not
from rung.spec.strategy import Layout, expert_axes
from rung.system.launcher_env import (
    environment_local_rank,
    environment_local_size,
    environment_rank,
    environment_size,
    external_attempt,
)
from rung.system.processes import wait_for_idle_threads

if TYPE_CHECKING:  # most jobs use no RPC, and the import is slow
    from rung.distributed.rpc import Calls


@dataclass(frozen=True)
class RankRole:
    """What the layout makes of one rank."""

    data_rank: int  # which share of the batch it reads, of `layout.num_data_ranks`
    stage: int  # its place in the pipeline
    counts_loss: bool  # ranks that share samples have the same loss, and one of them, on the last stage, counts it
    is_server: bool  # keeps parameters for others and computes no loss


@dataclass
class World:
    """One rank's view of the job."""

    layout: Layout
    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    mesh: DeviceMesh | None
    timeout: datetime.timedelta = datetime.timedelta(minutes=10)  # of a collective
    devices: tuple[torch.device, ...] = ()  # of the replicas in this process, under dp
    device_type: str = ""  # that decisions go by, "cpu" or "cuda"; a dry run on the CPU may be about a GPU
    is_dry_run: bool = False  # one rank alone, whose collectives return at once
    trainers: dist.ProcessGroup | None = field(default=None, repr=False)  # all ranks but the servers, if there are any
    fake_mode: InitVar[Any] = None
    tensors: Tensors = field(init=False, repr=False)
    role: RankRole = field(init=False)
    samples_mesh: DeviceMesh | None = None  # of who reads what, where ranks of the data axes share samples
    experts_mesh: DeviceMesh | None = None  # of who holds which experts, where ranks of the data axes share them out
    _data_mesh: DeviceMesh | None = field(default=None, repr=False)
    _calls: Calls | None = field(default=None, repr=False)

    def __post_init__(self, fake_mode: Any) -> None:
        layout, rank = self.layout, self.rank
        self.device_type = self.device_type or self.device.type
        self.tensors = Tensors(self.device, fake_mode, has_values=not self.is_dry_run)
        stage = layout.coordinates(rank)["pp"]
        self.role = RankRole(layout.data_rank(rank), stage, layout.counts_loss(rank), layout.is_server(rank))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def has_source(self) -> bool:
        """Whether this rank makes the seeded weights itself; the others receive them."""
        return self.is_main or self.size == 1

    @property
    def has_peers(self) -> bool:
        """Whether this rank exchanges anything with others."""
        return self.size > 1 and not self.is_dry_run

    @property
    def trains_on_gpu(self) -> bool:
        """Whether kernels run on a GPU: then memory is pinned, and copies have a stream of their own."""
        return self.device.type == "cuda" and not self.is_dry_run

    @property
    def calls(self) -> Calls:
        """Calls between processes, under the strategies over RPC."""
        assert self._calls is not None, "this strategy makes no calls between processes"
        return self._calls

    def axis(self, *names: str) -> DeviceMesh:
        """The sub-mesh of some axes; `cp` are ranks that share samples, `samples` those that do not; `ep` ones that
        share out experts. Made outside fake tensors, because a mesh holds a real one."""
        mesh = self.samples_mesh if {"cp", "samples"} & set(names) else self.mesh
        if {"ep", "expert_replicate", "expert_shard"} & set(names):
            mesh = self.experts_mesh
        assert mesh is not None, "this layout has no such axis"
        with self._outside_fakes():
            return mesh[names if len(names) > 1 else names[0]]

    def _outside_fakes(self) -> AbstractContextManager[Any]:
        return fake_world.outside_fakes() if self.is_dry_run else nullcontext()

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that read different samples of one batch, and hold the same part of the model and of sequences."""
        return self.axis("samples").get_group() if self.samples_mesh is not None else self.gradient_group

    @property
    def gradient_group(self) -> dist.ProcessGroup:
        """The ranks that compute gradients of the same part of the model, which are averaged."""
        if self.trainers is not None:
            return self.trainers
        if not self.layout.is_composed:
            group = dist.group.WORLD
            assert group is not None
            return group
        names = [name for name in ("dp_replicate", "dp_shard") if self.layout.axes[name] > 1]
        if len(names) < 2:
            return self.axis(names[0] if names else "dp_shard").get_group()
        if self._data_mesh is None:
            with self._outside_fakes():
                self._data_mesh = flatten(self.axis("dp_replicate", "dp_shard"), "dp")
        return self._data_mesh.get_group()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, on every rank. They travel through host memory."""
        return start_gather(values, self.size)()

    def gather_objects(self, value: Any) -> list[Any]:
        """A JSON value of every rank, on every rank; of this rank alone in a dry run."""
        return gather_json(value) if self.has_peers else [value]

    def host_group(
        self, timeout: datetime.timedelta | None = None, ranks: Sequence[int] | None = None
    ) -> dist.ProcessGroup:
        """A new group for host memory, of all ranks or some, so that its messages do not mix with the training. All
        ranks call it."""
        backend = self.backend if self.backend == MPI_BACKEND else "gloo"
        group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=timeout or self.timeout)
        return group

    def barrier(self) -> None:
        if self.has_peers:
            dist.all_reduce(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        if self._calls is not None:
            # Under ps-async trainers may be gone already; the others have agreed to end.
            self._calls.abandon() if optional_ranks(self.layout) else self._calls.close()
        if dist.is_initialized():
            # A worker of gloo lets go of a collective's tensors after the call has returned, for which it needs
            # Python's lock. If the interpreter ends first, the worker aborts the process.
            wait_for_idle_threads("pt_gloo_runloop")
            dist.destroy_process_group()
        fake_world.forget_meshes()


@contextlib.contextmanager
def open_world(
    layout: Layout,
    *,
    device: str = "auto",
    backend: str = "auto",
    timeout_seconds: int = 600,
    rpc_host: str | None = None,
) -> Iterator[World]:
    """Join the job that the launcher (Rung's own, torchrun, ...) described in the environment.

    Under ps-async the group is that of the servers. A trainer is in no group and only makes calls, so that the others
    survive its end.
    """
    rank, size = environment_rank(), environment_size()
    local_rank, local_size = environment_local_rank(), environment_local_size()
    if size != layout.num_ranks:
        raise EnvironmentProblem(
            f"{layout.name} needs {layout.num_ranks} processes, but the environment says WORLD_SIZE={size}."
        )
    where = choose_device(device, backend, local_rank, local_size)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if not layout.is_distributed:
        devices = choose_devices(layout, device, backend) if layout.kind == "dp" else ()
        yield World(layout, rank, size, local_rank, where, "none", None, devices=devices)
        return
    name = choose_backend(backend, where, layout)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    number = next(_worlds)
    num_processes, joins = size, layout.kind != "ps-async" or layout.is_server(rank)
    if layout.kind == "ps-async":
        size = layout.servers if joins else 1
    with mpi.leaving_on_error():
        if name == MPI_BACKEND:
            mpi.register()
        store = job_store(over_mpi=name == MPI_BACKEND)
        if joins:
            _join_group(name, store, rank, size, timeout, number)
        world = World(layout, rank, size, local_rank, where, name, None, timeout=timeout)
        if layout.kind == "mesh":
            world.mesh = _make_mesh(layout, where)
            world.samples_mesh = _make_samples_mesh(layout, where)
            world.experts_mesh = _make_experts_mesh(layout, where)
        elif layout.servers and layout.kind != "ps-async":
            world.trainers = dist.new_group(list(range(layout.servers, size)), timeout=timeout)
        if can(layout, "rpc"):
            from rung.distributed.rpc import Calls  # slow to load, and most jobs use no RPC

            threads = max(32, 2 * num_processes + 8)  # a waiting call holds one
            assert store is not None, "a strategy over RPC has several processes"
            world._calls = Calls(
                rank, num_processes, store, number, host=rpc_host, timeout_seconds=timeout_seconds, threads=threads
            )
        yield world
    # Not after an error: destroying a group whose peers are gone can block, and the process is about to end.
    world.close()


# Counts the worlds of this process. All ranks open them together, so the number names the keys of each in the store.
_worlds = itertools.count()


def _join_group(
    backend: str, store: SignedStore | None, rank: int, size: int, timeout: datetime.timedelta, number: int
) -> None:
    # The store still holds the addresses of an earlier world, or from before torchrun restarted the ranks.
    prefix = f"world-{external_attempt()}-{number}"
    kept: Any = store if store is not None else dist.HashStore()  # type: ignore[attr-defined]
    named = dist.PrefixStore(prefix, kept)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=timeout)


@contextlib.contextmanager
def open_fake_world(layout: Layout, *, rank: int = 0, device: str = "cpu", fake: bool = True) -> Iterator[World]:
    """One rank of a job of any size, alone in this process.

    Collectives return at once. With `fake`, tensors hold no data either; without, they are real, so that the memory
    of one rank of a large job can be measured on one device. Fake tensors lie on the CPU whatever `device` says, and
    everything is decided as it would be there.
    """
    reason = why_not(layout, "plan")
    if reason is not None:
        raise StrategyError(reason)
    where = torch.device(device, 0) if device == "cuda" and not fake else torch.device("cpu")
    mesh = samples_mesh = experts_mesh = None
    if layout.is_distributed:
        fake_world.open_fake_group(rank, layout.num_ranks)
        mesh = _make_mesh(layout, where)
        samples_mesh = _make_samples_mesh(layout, where)
        experts_mesh = _make_experts_mesh(layout, where)
    mode = fake_world.new_fake_mode() if fake else None
    world = World(
        layout, rank, layout.num_ranks, 0, where, "fake", mesh, device_type=device, is_dry_run=True, fake_mode=mode
    )
    world.samples_mesh, world.experts_mesh = samples_mesh, experts_mesh
    try:
        with (
            warnings.catch_warnings(),
            fake_world.real_meshes() if fake else nullcontext(),
            fake_world.chunks_on_demand() if fake else nullcontext(),
            like_cuda() if fake and device == "cuda" else nullcontext(),
        ):
            # Linear layers return views of fake tensors, and no code outside writes into them.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
            yield world
    finally:
        world.close()


def _make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    axes = {name: size for name, size in layout.axes.items() if size > 1 or name.startswith("dp_")}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _make_samples_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """The same ranks in the same order, with the data axes divided by who reads the same samples."""
    if layout.cp == 1:
        return None
    sizes = (layout.pp, layout.num_data_ranks, layout.cp, layout.tp)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "samples", "cp", "tp"))


def _make_experts_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    if layout.ep == 1:
        return None
    axes = expert_axes(layout)
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
