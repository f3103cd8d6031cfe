"""The few shims torch needs to run a training step in a pretend world: fake process group, fake tensors.

Private parts of torch that training leans on are touched here and nowhere else (the launcher has its own, in
`launch/agent.py`). Each shim says what torch would do and why that needs real data.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
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


class _FixedBuckets:
    """DDP's reducer, without the rebuild of its buckets after the first step: that reads tensors in C++."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def adapt_ddp(ddp: DistributedDataParallel, size: int) -> None:
    """Let DDP's C++ reducer work on fake tensors: the all-reduce is issued from Python, the buckets stay."""

    # DDP compares these annotations with the real types, so they must not be strings.
    def all_reduce(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        buffer.div_(size)
        dist.all_reduce(buffer)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    ddp.register_comm_hook(None, all_reduce)
    ddp.reducer = _FixedBuckets(ddp.reducer)  # type: ignore[assignment]
