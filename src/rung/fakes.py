"""The few shims torch needs to run a training step in a pretend world: fake process group, fake tensors.

Private parts of torch that training leans on are touched here and nowhere else (the launcher has its own, in
`launch/agent.py`). Each shim says what torch would do and why that needs real data.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore


def open_fake_group(rank: int, size: int) -> None:
    """A process group in which every collective returns at once and moves nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextlib.contextmanager
def fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Tensors with shape, type and storage identity, but no data. Re-entrant."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        yield
        return
    with mode:
        yield


def new_fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def outside_fakes() -> contextlib.AbstractContextManager[Any]:
    """For code that needs real data inside a pretend step: meshes, the order of samples."""
    return unset_fake_temporarily()


def forget_meshes() -> None:
    """DTensor remembers how it spread operations, by meshes that look alike; those of a closed world are dead."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for clear in (
        getattr(propagator.propagate_op_sharding, "cache_clear", None),
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
    ):
        if clear is not None:
            clear()


_MESH_METHODS = (
    "__init__", "__getitem__", "_concatenate", "_flatten", "_unflatten", "get_coordinate", "_get_all_submeshes",
    "get_group", "get_local_rank", "size", "_create_sub_mesh", "_create_flatten_mesh", "from_group", "get_all_groups",
)  # fmt: skip


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """While inside, a mesh computes with real tensors. FSDP joins meshes in the middle of sharding, among fake ones."""
    kept = {name: DeviceMesh.__dict__[name] for name in _MESH_METHODS if name in DeviceMesh.__dict__}

    def real(method: Any) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return method(*args, **kwargs)

        return run

    for name, method in kept.items():
        static = isinstance(method, staticmethod)
        setattr(DeviceMesh, name, staticmethod(real(method.__func__)) if static else real(method))
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(DeviceMesh, name, method)


def end_pass(module: FSDPModule) -> None:
    """In the middle of a forward pass FSDP would keep what it has gathered, also when an error has ended that pass."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one
    for group in groups:
        if group is not None:
            group._training_state = TrainingState.IDLE


class _FixedBuckets:
    """DDP's reducer, without the rebuild of its buckets after the first step: that reads tensors in C++."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def adapt_ddp(ddp: DistributedDataParallel, size: int, reduce_in: torch.dtype | None = None) -> None:
    """Let DDP's C++ reducer work on fake tensors: the all-reduce is issued from Python, the buckets stay."""

    # DDP compares these annotations with the real types, so they must not be strings.
    def all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        sent = buffer.div_(size) if reduce_in is None else buffer.to(reduce_in).div_(size)
        dist.all_reduce(sent)
        if sent is not buffer:
            buffer.copy_(sent)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    ddp.register_comm_hook(None, all_reduce)
    ddp.reducer = _FixedBuckets(ddp.reducer)  # type: ignore[assignment]
