"""The few shims torch needs to run a training step in a pretend world: fake process group, fake tensors.

Private parts of torch that training leans on are touched here and nowhere else (the launcher has its own, in
`launch/agent.py`). Each shim says what torch would do and why that needs real data.
"""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
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
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    sys.excepthook = hook  # torch would put the pretended rank before every line of an error


@contextlib.contextmanager
def fake_tensors(mode: FakeTensorMode) -> Iterator[None]:
    """Tensors with shape, type and storage identity, but no data. Re-entrant."""
    if is_faking():
        yield
        return
    with mode:
        yield


_imagining = threading.local()


@contextlib.contextmanager
def imagined(mode: FakeTensorMode) -> Iterator[None]:
    """Fake tensors that stand for nothing, for looking ahead: also in a pretend world no memory is meant by them."""
    before = is_imagining()
    _imagining.now = True
    try:
        with fake_tensors(mode):
            yield
    finally:
        _imagining.now = before


def is_imagining() -> bool:
    return getattr(_imagining, "now", False)


def is_faking() -> bool:
    """Whether tensors that are made now hold no data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def adds_gradients(args: tuple[Any, ...]) -> bool:
    """Whether this is autograd's own sum of two gradients of one tensor, the first of which nobody else holds.

    It then adds in place, unless a mode watches it. To be asked inside such a mode.
    """
    if torch.is_grad_enabled() or len(args) != 2 or torch._C._current_autograd_node() is None:
        return False
    first, second = args
    if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
        return False
    storage = first.untyped_storage()
    return (
        bool(first.is_contiguous())
        and first._use_count() == _HELD_BY_CALL
        and torch._C._storage_Use_Count(storage._cdata) == 2  # by the tensor, and by `storage` here
    )


_HELD_BY_CALL = 4  # references to an argument of an operation that autograd calls, while a mode looks at it


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


@contextlib.contextmanager
def around_shape_inference(around: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """While inside, `around` is entered whenever DTensor works out a result's shape, on whole and imaginary tensors."""
    kind: Any = type(DTensor._op_dispatcher.sharding_propagator)
    infer = kind._propagate_tensor_meta_non_cached

    @functools.wraps(infer)
    def inferred(*args: Any, **kwargs: Any) -> Any:
        with around():
            return infer(*args, **kwargs)

    kind._propagate_tensor_meta_non_cached = inferred
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = infer


class _Chunks:
    """The pieces of a tensor along a dimension, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


@contextlib.contextmanager
def chunks_on_demand() -> Iterator[None]:
    """While inside, FSDP makes a view of its own shard of a parameter, and not one of every rank's."""
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    cut = module._chunk_with_empty
    module._chunk_with_empty = lambda tensor, num_chunks, dim: _Chunks(tensor, num_chunks, dim)
    try:
        yield
    finally:
        module._chunk_with_empty = cut


class Streams:
    """Which stream of the device is current, as a number. 0 is the one that computes."""

    def __init__(self) -> None:
        self.current = 0
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def number(self, stream: Any) -> int:
        if stream is None:
            return 0
        if id(stream) not in self._numbers:
            self._kept.append(stream)  # so that no other gets its identity
            self._numbers[id(stream)] = len(self._kept)
        return self._numbers[id(stream)]


@contextlib.contextmanager
def watch_streams(streams: Streams) -> Iterator[None]:
    """While inside, note which stream FSDP has chosen. The CPU has the functions for that, and they do nothing."""
    choose = torch.cpu.stream

    @contextlib.contextmanager
    def chosen(stream: Any) -> Iterator[None]:
        before, streams.current = streams.current, streams.number(stream)
        try:
            yield
        finally:
            streams.current = before

    torch.cpu.stream = chosen
    try:
        yield
    finally:
        torch.cpu.stream = choose


class _Done:
    """An all-reduce that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([self._tensor])
        return done


@contextlib.contextmanager
def results_of_all_reduces() -> Iterator[None]:
    """While inside, an all-reduce that is not waited for has a future with its result: a fake group's has none."""
    reduce: Any = dist.all_reduce

    @functools.wraps(reduce)
    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = reduce(tensor, *args, async_op=async_op, **kwargs)
        return _Done(tensor) if async_op else work

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = reduce


@contextlib.contextmanager
def when_autocast_ends(function: Callable[[], None]) -> Iterator[None]:
    """While inside, `function` is called whenever autocast drops the casts that it has kept."""
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        clear()
        function()

    torch.clear_autocast_cache = cleared
    try:
        yield
    finally:
        torch.clear_autocast_cache = clear


def end_pass(module: FSDPModule) -> None:
    """In the middle of a forward pass FSDP would keep what it has gathered, also when an error has ended that pass."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one
    for group in groups:
        if group is not None:
            group._training_state = TrainingState.IDLE


class _Reducer:
    """DDP's reducer, but that it rebuilds its buckets from Python: in C++ it would read tensors."""

    def __init__(self, reducer: Any, rebuild: Callable[[], bool]) -> None:
        self._reducer = reducer
        self._rebuild_buckets = rebuild

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def adapt_ddp(
    ddp: DistributedDataParallel, size: int, reduce_in: torch.dtype | None = None, *, has_storage: bool = False
) -> None:
    """Let DDP's C++ reducer work with a fake group, which has no results for it: all-reduces are issued from Python.

    On fake tensors, without storage, its buckets are rebuilt from Python, too.
    """

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
    if has_storage:
        return
    private: Any = ddp
    parameters, is_sparse = private._build_params_for_reducer()
    arrived: list[int] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: arrived.append(index))
        for index, parameter in enumerate(parameters)
    ]

    def rebuild() -> bool:
        """As the reducer does once, before its second step: buckets in the order in which gradients arrived."""
        if not handles or ddp.find_unused_parameters or len(set(arrived)) < len(parameters):
            return False
        for handle in handles:
            handle.remove()
        handles.clear()
        order = list(dict.fromkeys(arrived))
        # The old buckets go before the new ones come, as in C++.
        private.reducer._remove_autograd_hooks()
        private.reducer._reducer = private.reducer = private.logger = None
        with _buckets_in_order(parameters, is_sparse, order, private.bucket_bytes_cap):
            private._ddp_init_helper(
                parameters, is_sparse, private._build_debug_param_to_name_mapping(parameters), False
            )
        ddp.register_comm_hook(None, all_reduce)
        private.reducer = _Reducer(private.reducer, rebuild)
        return True

    private.reducer = _Reducer(private.reducer, rebuild)


@contextlib.contextmanager
def _buckets_in_order(parameters: list[Any], is_sparse: list[bool], order: list[int], cap: int) -> Iterator[None]:
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assigned(*_: Any) -> tuple[list[list[int]], list[int]]:
        first = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        ordered = [parameters[index] for index in order]
        buckets, limits = assign(ordered, [first, cap], [is_sparse[index] for index in order], order)
        return list(reversed(buckets)), list(reversed(limits))  # the caller turns them round

    dist._compute_bucket_assignment_by_size = assigned  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = assign  # type: ignore[attr-defined]
