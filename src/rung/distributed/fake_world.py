"""Shims for a dry run of a training step: a fake process group, fake tensors, and what torch lacks for them.

torch has no public interface for either, nor for the places where DTensor, FSDP and DDP read real data. Each shim says
what torch would do, and why that needs data.
"""

import contextlib
import functools
import importlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._mode_utils import no_dispatch

from rung.distributed.known_indices import KnownIndices

# What an operation raises whose result would depend on the values of fake tensors.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


@contextlib.contextmanager
def patched(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a class or module while inside."""
    kept = {name: vars(owner).get(name) or getattr(owner, name) for name in replacements}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(owner, name, original)


def open_fake_group(rank: int, size: int) -> None:
    """A process group in which every collective returns at once and moves nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    sys.excepthook = hook  # torch's own puts the rank of this group before every line of an error


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
    """Fake tensors for looking ahead, as the forward tracer does. A dry run does not count their memory either."""
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
    """Whether tensors that are made now hold no data. torch has no public function for it."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def device_of(tensor: torch.Tensor) -> torch.device:
    """`tensor.device`, which is an operation of its own for a fake tensor, and asked for more often than all others."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def numbers_in_words() -> Iterator[None]:
    """While inside, a fake number in an f-string is read as `item()` reads it, where torch would write its type."""

    def written(tensor: torch.Tensor, form: str) -> str:
        return format(tensor.item(), form) if tensor.dim() == 0 else object.__format__(tensor, form)

    FakeTensor.__format__ = written  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__format__


def adds_gradients(args: tuple[Any, ...]) -> bool:
    """Whether this is autograd's own sum of two gradients of one tensor, and the first has no other reference.

    Without a dispatch mode, autograd then adds in place. Call it inside such a mode.
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


_HELD_BY_CALL = 4  # references to an argument of an operation that autograd calls, inside a dispatch mode


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """torch's fake tensors, and an operation whose fake form refuses what its kernels compute.

    While it `learns_indices`, integers and truth values have values: models decide by them, for instance whether a mask
    hides anything, or which rows an expert gets; these are taken to choose evenly. Neither this nor `pretends_draws`
    while a model is cut: what is computed then must hold for other values, too.
    """

    pretends_values = False
    pretends_draws = False
    learns_indices = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.indices = KnownIndices()

    def from_tensor(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> FakeTensor:
        fake = super().from_tensor(tensor, *args, **kwargs)
        if self.learns_indices and not is_fake(tensor):
            with no_dispatch():
                self.indices.learn(fake, tensor.detach().clone())  # a model may write into it
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = self.indices
        if func is torch.ops.aten._local_scalar_dense.default:
            if (known := indices.get(args[0])) is not None:
                with no_dispatch():
                    return known.item()
            if self.pretends_values:
                return 1.0 if args[0].is_floating_point() else 1
        is_draw = func in (torch.ops.aten.rand.default, torch.ops.aten.rand.generator)
        if self.pretends_draws and is_draw and math.prod(args[0]) == 1:
            # A model that drops whole layers reads such a number, and torch computes with the values of constants.
            drawn = super().__torch_dispatch__(func, types, args, kwargs or {})
            cast(Any, drawn).constant = torch.full((), 0.5).expand(args[0]).clone()
            return drawn
        if func is torch.ops.aten.addmm.dtype_out:
            return (kwargs or {})["out"]  # torch 2.11 decomposes it and takes the type for the factor `beta`
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            with self:
                return _grouped_product(*args, **(kwargs or {}))
        try:
            found = super().__torch_dispatch__(func, types, args, kwargs or {})
        except NEEDS_VALUES:
            if not self.learns_indices:
                raise
            with self:
                found = indices.result_of(func, args, kwargs or {}, self.from_tensor)
            if found is NotImplemented:
                raise
            return found
        if self.learns_indices or indices.has_any:
            indices.follow(func, args, kwargs or {}, found, learns=self.learns_indices)
        if self.learns_indices:
            indices.choose_evenly(func, args, found)
        return found


@contextlib.contextmanager
def known_indices(mode: Any) -> Iterator[None]:
    """Within the context, integers and truth values have values, and transformers decides by them as in training: it
    leaves masks out that hide nothing, but not where it is told that tensors are fake."""

    def has_no_values(value: Any) -> bool:
        return isinstance(value, FakeTensor) and mode.indices.get(value) is None

    module = sys.modules.get("transformers.utils.import_utils")
    asks = module is not None and hasattr(module, "is_fake_tensor")
    mode.learns_indices = True
    try:
        with patched(module, is_fake_tensor=has_no_values) if asks else contextlib.nullcontext():
            yield
    finally:
        mode.learns_indices = False


@contextlib.contextmanager
def known_table(mode: Any) -> Iterator[None]:
    """While inside, where DDP is built, integers keep values: DDP's reducer, in C++, writes into a table which
    parameters were used, copies it, and reads it back."""
    before = mode.learns_indices, mode.indices.learns_empty
    mode.learns_indices = mode.indices.learns_empty = True
    try:
        yield
    finally:
        mode.learns_indices, mode.indices.learns_empty = before


@contextlib.contextmanager
def pretended_values(mode: Any) -> Iterator[None]:
    """Within the context, the value of a fake scalar is 1: for optimizers that read norms, as Adafactor does. They
    scale by them, and do the same operations whatever they are."""
    mode.pretends_values = True
    try:
        yield
    finally:
        mode.pretends_values = False


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of a grouped matrix product: the groups are ranges of the one matrix, or of the inner dimension.

    torch's fake form accepts bfloat16 only, and transformers computes its experts with this operation in any type.
    """
    shape = [*left.shape[:-1], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif left.dim() == 3 and right.dim() == 2:
        shape = shape[1:]
    return left.new_empty(shape, dtype=out_dtype)


def new_fake_mode() -> FakeTensorMode:
    return _FakeMode(allow_non_fake_inputs=True)


def outside_fakes() -> AbstractContextManager[Any]:
    """For code that needs real data inside a dry run: meshes, the order of samples."""
    return unset_fake_temporarily()


def forget_meshes() -> None:
    """Clear DTensor's cache of sharding decisions: a new mesh may equal one of a closed world, whose groups ended."""
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


def real_meshes() -> AbstractContextManager[None]:
    """While inside, a mesh computes with real tensors. FSDP joins meshes while it shards fake parameters."""

    def real(method: Any) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return method(*args, **kwargs)

        return run

    found = {name: vars(DeviceMesh)[name] for name in _MESH_METHODS if name in vars(DeviceMesh)}
    replaced = {
        name: staticmethod(real(method.__func__)) if isinstance(method, staticmethod) else real(method)
        for name, method in found.items()
    }
    return patched(DeviceMesh, **replaced)


def around_shape_inference(
    around: Callable[[], AbstractContextManager[Any]],
) -> AbstractContextManager[None]:
    """While inside, `around` is entered whenever DTensor infers the shape of a result, from unsharded fake tensors."""
    kind: Any = type(DTensor._op_dispatcher.sharding_propagator)
    infer = kind._propagate_tensor_meta_non_cached

    @functools.wraps(infer)
    def inferred(*args: Any, **kwargs: Any) -> Any:
        with around():
            return infer(*args, **kwargs)

    return patched(kind, _propagate_tensor_meta_non_cached=inferred)


class _Chunks:
    """The chunks of a tensor along a dimension, each made on access."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // count)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


def chunks_on_demand() -> AbstractContextManager[None]:
    """While inside, FSDP makes a view of its own shard of a parameter, and not one of every rank's."""
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    return patched(module, _chunk_with_empty=lambda tensor, num_chunks, dim: _Chunks(tensor, num_chunks, dim))


class StreamWatch:
    """The number of the current stream of the device; 0 is the one that computes."""

    def __init__(self) -> None:
        self.current = 0
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []

    def number(self, stream: Any) -> int:
        if stream is None:
            return 0
        if id(stream) not in self._numbers:
            self._kept.append(stream)  # so that its id is not reused
            self._numbers[id(stream)] = len(self._kept)
        return self._numbers[id(stream)]


def watch_streams(streams: StreamWatch) -> AbstractContextManager[None]:
    """While inside, record which stream FSDP has chosen. On the CPU the functions for that do nothing else."""

    @contextlib.contextmanager
    def chosen(stream: Any) -> Iterator[None]:
        before, streams.current = streams.current, streams.number(stream)
        try:
            yield
        finally:
            streams.current = before

    return patched(torch.cpu, stream=chosen)


class _FinishedWork:
    """The handle of an all-reduce that has finished."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([self._tensor])
        return done


def results_of_all_reduces() -> AbstractContextManager[None]:
    """While inside, an asynchronous all-reduce has a future with its result. That of a fake group has none."""
    reduce: Any = dist.all_reduce

    @functools.wraps(reduce)
    def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = reduce(tensor, *args, async_op=async_op, **kwargs)
        return _FinishedWork(tensor) if async_op else work

    return patched(dist, all_reduce=all_reduce)


def when_autocast_ends(function: Callable[[], None]) -> AbstractContextManager[None]:
    """While inside, `function` is called whenever autocast clears its cache of casts."""
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        clear()
        function()

    return patched(torch, clear_autocast_cache=cleared)


def end_pass(module: FSDPModule) -> None:
    """Let FSDP reshard after an error in a forward pass: inside a pass it would keep the gathered parameters."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.11 has one
    for group in groups:
        if group is not None:
            group._training_state = TrainingState.IDLE


class _Reducer:
    """DDP's reducer, except that it rebuilds its buckets in Python: the C++ code would read tensors."""

    def __init__(self, reducer: Any, rebuild: Callable[[], bool]) -> None:
        self._reducer = reducer
        self._rebuild_buckets = rebuild

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def adapt_ddp(
    ddp: DistributedDataParallel, size: int, reduce_in: torch.dtype | None = None, *, has_storage: bool = False
) -> None:
    """Make DDP's C++ reducer work with a fake group, whose work has no future: a hook issues all-reduces in Python.

    For fake tensors, which have no storage, buckets are rebuilt in Python, too.
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


def _buckets_in_order(
    parameters: list[Any], is_sparse: list[bool], order: list[int], cap: int
) -> AbstractContextManager[None]:
    assign: Any = dist._compute_bucket_assignment_by_size  # type: ignore[attr-defined]

    def assigned(*_: Any) -> tuple[list[list[int]], list[int]]:
        first = dist._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        ordered = [parameters[index] for index in order]
        buckets, limits = assign(ordered, [first, cap], [is_sparse[index] for index in order], order)
        return list(reversed(buckets)), list(reversed(limits))  # the caller reverses them

    return patched(dist, _compute_bucket_assignment_by_size=assigned)
