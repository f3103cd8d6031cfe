"""The world a rank lives in: its number, its device, its process group and mesh; real or pretended.

Code above takes a `World` and cannot tell whether it is real: the differences (which tensors, how a value reaches the
host, what DDP needs) are methods of it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rung import fakes
from rung.environment import (
    environment_local_rank,
    environment_local_size,
    environment_rank,
    environment_size,
    outside_attempt,
)
from rung.errors import EnvironmentProblem, StrategyError
from rung.like_cuda import like_cuda
from rung.mpi import library as mpi
from rung.processes import num_cores
from rung.signed_store import SignedStore
from rung.store import job_store
from rung.strategy import Layout

if TYPE_CHECKING:  # most jobs make no calls, and the import takes its time
    from rung.rpc import Calls


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
    pretend: bool = False
    timeout: datetime.timedelta = datetime.timedelta(minutes=10)  # of a collective
    devices: tuple[torch.device, ...] = ()  # of the replicas in this process, under dp
    stands_for: str | None = None  # the type of device that a pretend world is about, if it is not `device`'s
    proofs: dict[Any, Any] = field(default_factory=dict, repr=False)  # which layers of a block can be cut together
    wrap_block: Callable[[nn.Module], None] | None = field(default=None, repr=False)  # around each block's own forward
    _fake_mode: Any = field(default=None, repr=False)
    _data_mesh: DeviceMesh | None = field(default=None, repr=False)
    _trainers: dist.ProcessGroup | None = field(default=None, repr=False)
    _calls: Calls | None = field(default=None, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device_type(self) -> str:
        """What decisions look at: "cpu" or "cuda"."""
        return self.stands_for or self.device.type

    @property
    def has_source(self) -> bool:
        """Whether this rank makes the seeded weights itself; the others are given them."""
        return self.is_main or self.size == 1

    @property
    def has_storage(self) -> bool:
        """Whether tensors hold data here. Without, there is no memory to save by building a model piece by piece."""
        return self._fake_mode is None

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads, of `layout.num_data_ranks`."""
        return self.layout.data_rank(self.rank)

    @property
    def stage(self) -> int:
        """Which of the pipeline's ranks this one is."""
        return self.layout.coordinates(self.rank)["pp"]

    @property
    def counts_loss(self) -> bool:
        """Whether this rank tells the loss of its share: tensor ranks all have it, and only the last stage has it."""
        return self.layout.counts_loss(self.rank)

    @property
    def calls(self) -> Calls:
        """How processes call each other, under the strategies over RPC."""
        assert self._calls is not None, "this strategy makes no calls between processes"
        return self._calls

    @property
    def is_server(self) -> bool:
        """Whether this rank keeps parameters for others and computes no loss."""
        return self.layout.is_server(self.rank)

    def axis(self, *names: str) -> DeviceMesh:
        """The sub-mesh of some axes. Called outside fake tensors, because meshes hold real ones."""
        assert self.mesh is not None, "a layout without communication has no mesh"
        with fakes.outside_fakes() if self.pretend else nullcontext():
            return self.mesh[names if len(names) > 1 else names[0]]

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks that read different samples of one batch, and hold the same part of the model."""
        if self._trainers is not None:
            return self._trainers
        if not self.layout.is_composed:
            group = dist.group.WORLD
            assert group is not None
            return group
        names = [name for name in ("dp_replicate", "dp_shard") if self.layout.axes[name] > 1]
        if len(names) < 2:
            return self.axis(names[0] if names else "dp_shard").get_group()
        if self._data_mesh is None:
            with fakes.outside_fakes() if self.pretend else nullcontext():
                self._data_mesh = self.axis("dp_replicate", "dp_shard")._flatten("dp")
        return self._data_mesh.get_group()

    @property
    def data_source(self) -> int:
        """The global rank of the first among `data_group`."""
        return dist.get_global_rank(self.data_group, 0)

    @property
    def fake_mode(self) -> Any:
        """The mode of this world's tensors where they hold no data, else None."""
        return self._fake_mode

    def tensors(self) -> AbstractContextManager[Any]:
        """Around materialising and stepping: nothing in the real world, fake tensors in a pretend one."""
        return fakes.fake_tensors(self._fake_mode) if self._fake_mode is not None else nullcontext()

    def replicate(
        self, module: torch.nn.Module, *, find_unused: bool, reduce_in: torch.dtype | None = None
    ) -> DistributedDataParallel:
        """Real DDP over all ranks that compute. The weights are equal already, so nothing is broadcast again.

        `reduce_in` is the type of gradients on their way, where a hook will see to that: a pretended DDP has its own.
        """
        with warnings.catch_warnings():
            # `broadcast_buffers` is deprecated in torch 2.13 for a name that 2.11 does not have.
            warnings.simplefilter("ignore", FutureWarning)
            ddp = DistributedDataParallel(
                module,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused,
                process_group=self._trainers,
            )
        if self.pretend:
            fakes.adapt_ddp(ddp, self.size, reduce_in, has_storage=self.has_storage)
        elif not find_unused:
            _order_buckets(ddp)
        return ddp

    def place(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor of the batch on this rank's device. `dtype` applies to floating types alone."""
        if self._fake_mode is not None:
            tensor = self._fake_mode.from_tensor(tensor)
        wanted = tensor.dtype
        if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            wanted = dtype.to_complex() if tensor.is_complex() else dtype
        return tensor.to(device=self.device, dtype=wanted, non_blocking=True)

    def read(self, tensors: Sequence[torch.Tensor]) -> list[float]:
        """Scalars of one type brought to the host in one transfer. Waits for the device."""
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
        """Start to bring scalars to the host; the call returned waits for them and for no later work of the device."""
        if not tensors:
            return list
        if self.pretend:
            return lambda: [math.nan] * len(tensors)
        stacked = torch.stack(list(tensors)).detach().to(torch.float64)
        if self.device.type != "cuda":
            return stacked.tolist
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True).copy_(stacked, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def values() -> list[float]:
            arrived.synchronize()
            found: list[float] = host.tolist()
            return found

        return values

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of every rank, on every rank. They travel through host memory."""
        if self.size == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own)
        return [row.tolist() for row in everyone]

    def gather_objects(self, value: Any) -> list[Any]:
        """A JSON value of every rank, on every rank; of this rank alone in a pretend world."""
        return [value] if self.size == 1 or self.pretend else gather_json(value)

    def host_group(self) -> dist.ProcessGroup:
        """A new group of all ranks for host memory, so that what is sent there does not mix with the training."""
        group: dist.ProcessGroup = dist.new_group(backend=self.host_backend, timeout=self.timeout)
        return group

    @property
    def host_backend(self) -> str:
        """What carries messages from host memory beside the training: MPI where it carries everything, else gloo."""
        return self.backend if self.backend == mpi.BACKEND else "gloo"

    def barrier(self) -> None:
        if self.size > 1 and not self.pretend:
            dist.all_reduce(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        if self._calls is not None:
            # Under ps-async some may be gone, and all have said goodbye to each other.
            self._calls.abandon() if self.layout.kind == "ps-async" else self._calls.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        fakes.forget_meshes()


def gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """A value of every rank of a group, on every rank. As JSON, which torch's own `all_gather_object` is not: it
    unpickles what arrives, and connections between ranks carry no proof of who sent it. Tuples become lists."""
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
    largest = max(int(size) for size in sizes)
    rows = [torch.zeros(largest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, torch.cat([own, own.new_zeros(largest - own.numel())]), group=group)
    return [json.loads(row[: int(size)].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


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

    Under ps-async the world is that of the servers: trainers, each a world of its own, only make calls, so that the
    end of one is nobody else's.
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
    num_processes, joins = size, layout.kind != "ps-async" or layout.is_server(rank)
    if layout.kind == "ps-async":
        size = layout.servers if joins else 1
    with mpi.leaving_on_error():
        if name == mpi.BACKEND:
            mpi.register()
        store = job_store(over_mpi=name == mpi.BACKEND)
        if joins:
            _join_group(name, store, rank, size, timeout)
        world = World(layout, rank, size, local_rank, where, name, None, timeout=timeout)
        if layout.kind == "mesh":
            world.mesh = _make_mesh(layout, where)
        elif layout.servers and layout.kind != "ps-async":
            world._trainers = dist.new_group(list(range(layout.servers, size)), timeout=timeout)
        if layout.uses_rpc:
            from rung.rpc import Calls

            threads = max(32, 2 * num_processes + 8)  # a call that waits holds one
            assert store is not None, "a strategy over RPC has several processes"
            world._calls = Calls(
                rank, num_processes, store, host=rpc_host, timeout_seconds=timeout_seconds, threads=threads
            )
        yield world
    # No goodbye after an error: destroying a group whose peers are gone can block, and the process is about to end.
    world.close()


_num_joined = 0  # groups that this process has been in


def _order_buckets(ddp: DistributedDataParallel) -> None:
    """Let DDP order its buckets now, by a backward in which gradients are zero, rather than after the first step.

    DDP reduces the first step in buckets of its own guess, and orders them anew by when gradients came in it. Where an
    element lies in a bucket decides in which order three or more ranks add it up. A run that is resumed has its first
    step later, and would end with other bits.
    """
    if any(getattr(module, "sparse", False) for module in ddp.modules()):
        return  # DDP knows which gradients are sparse, and refuses others
    module, parameters = ddp.module, [p for p in ddp.module.parameters() if p.requires_grad]

    def touch_all(_: int) -> torch.Tensor:  # DDP on a GPU moves its arguments there, and fails without any
        sums = [parameter.sum() for parameter in parameters]
        real = [total.real if total.is_complex() else total for total in sums]
        return torch.stack([total.double() for total in real]).sum() * 0

    module.forward = touch_all
    try:
        ddp(0).backward()
    finally:
        del module.forward
    for parameter in parameters:
        parameter.grad = None


def _join_group(backend: str, store: SignedStore | None, rank: int, size: int, timeout: datetime.timedelta) -> None:
    global _num_joined
    # What the ranks told each other in an earlier world, or before torchrun started them again, is still in the store.
    prefix = f"world-{outside_attempt()}-{_num_joined}"
    _num_joined += 1
    kept: Any = store if store is not None else dist.HashStore()  # type: ignore[attr-defined]
    named = dist.PrefixStore(prefix, kept)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=named, rank=rank, world_size=size, timeout=timeout)


@contextlib.contextmanager
def pretend_world(
    layout: Layout, *, rank: int = 0, device: str = "cpu", fake: bool = True, proofs: dict[Any, Any] | None = None
) -> Iterator[World]:
    """One rank of a job of any size, alone in this process.

    Collectives return at once. With `fake`, tensors hold no data either; without, they are real, so that the memory
    of one rank of a large job can be measured on one device. Fake tensors lie on the CPU whatever `device` says, and
    everything is decided as it would be there. `proofs` are those of a world before, for the same task.
    """
    if layout.kind != "mesh":
        raise StrategyError(
            f"{layout.name} cannot be pretended: what it sends are calls of processes or threads, not collectives. "
            "Run it with `rung train`, or look at a strategy of the mesh such as ddp, fsdp or pp."
        )
    where = torch.device(device, 0) if device == "cuda" and not fake else torch.device("cpu")
    mesh = None
    if layout.is_distributed:
        fakes.open_fake_group(rank, layout.num_ranks)
        mesh = _make_mesh(layout, where)
    mode = fakes.new_fake_mode() if fake else None
    world = World(layout, rank, layout.num_ranks, 0, where, "fake", mesh, pretend=True, _fake_mode=mode)
    world.stands_for = device
    world.proofs = proofs if proofs is not None else {}
    try:
        with (
            fakes.real_meshes() if fake else nullcontext(),
            fakes.chunks_on_demand() if fake else nullcontext(),
            like_cuda() if fake and device == "cuda" else nullcontext(),
        ):
            yield world
    finally:
        world.close()


def _make_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    axes = {name: size for name, size in layout.axes.items() if size > 1 or name.startswith("dp_")}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


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
    """Where the replicas of dp are, one thread each; an error if the machine has too few."""
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
    """What torch calls it, where the machine has it and the layout can use it."""
    if backend == "mpi":
        # Of torch's own, one call at a time runs in a process, whichever its group: with several, ranks that begin
        # with different ones wait for each other for ever.
        uses_torch = dist.is_mpi_available() and layout is not None and layout.uses_ddp
        mpi.refuse_if_impossible(needs_library=not uses_torch)
        return "cpu:mpi" if uses_torch else mpi.BACKEND
    if backend == "nccl" and device.type != "cuda":
        raise EnvironmentProblem(
            "backend=nccl moves data between GPUs only, and this run is on the CPU. Use backend=gloo."
        )
    if device.type == "cpu" or backend == "gloo":
        return "gloo"
    # gloo beside NCCL carries what lives on the host: logged values and offloaded gradients.
    return "cpu:gloo,cuda:nccl"


def broadcast_from(source: int, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """The values of a (global) rank to all of its group, in place. As bytes: gloo does not know every type."""
    assert tensor.is_contiguous()
    dist.broadcast(tensor.detach().reshape(-1).view(torch.uint8), src=source, group=group)


def gather_flat(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The same-sized flat tensors of all ranks of a group, as rows."""
    everyone = own.new_empty(dist.get_world_size(group) * own.numel())
    # torch 2.13 renames the collective and warns about the old name, which is the only one that 2.11 has.
    collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    collective(everyone, own, group=group)
    return everyone.view(-1, own.numel())
