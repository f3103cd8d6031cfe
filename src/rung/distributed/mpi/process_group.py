"""The operations of a process group over an MPI communicator.

Data travels as bytes, and half types are reduced in fp32. MPI counts elements in an `int`, and some libraries also the
bytes of a message: larger tensors go in parts. A reduce-scatter is an exchange of parts and torch's own reduction over
them, because MPI's brings everything to one rank first. Contiguous tensors are read and written in place.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from rung.distributed.mpi import BACKEND
from rung.distributed.mpi.datatypes import Reduction, memory, num_bytes, reduction
from rung.distributed.mpi.progress import MpiWork, Progress


def make_group(world: MPI.Intracomm, progress: Progress, options: Any, _: Any = None) -> MpiGroup:
    """The backend's constructor of groups. torch calls it on the members of a new group only."""
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))  # empty for all ranks
    communicator = world.Create_group(world.group.Incl(ranks))
    return MpiGroup(communicator, progress, options.timeout, options.group_id)


@dataclass
class _Begun:
    """A started operation: its MPI requests, the functions to run after them, and the memory that they need."""

    requests: list[MPI.Request] = field(default_factory=list)
    endings: list[Callable[[], None]] = field(default_factory=list)
    holds: list[Any] = field(default_factory=list)

    def bring_back(self, buffer: Tensor, target: Tensor) -> None:
        """Copy the buffer into the target at the end, unless both are the same memory."""
        self.holds += [buffer, target]
        if buffer.data_ptr() != target.data_ptr():
            self.endings.append(partial(_put, buffer, target))


# Any: by the stubs, each method has further overloads, which only C++ calls.
_ProcessGroup: Any = dist.ProcessGroup


class MpiGroup(_ProcessGroup):  # type: ignore[misc]
    """A torch.distributed process group: every method starts an operation and returns at once."""

    MOST_BYTES = 2**30  # in one call of MPI

    def __init__(self, communicator: MPI.Intracomm, progress: Progress, timeout: datetime.timedelta, name: str) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator, self._progress, self._timeout, self._name = communicator, progress, timeout, name
        # A communicator of its own for internal exchanges, whose messages must not match the user's send and recv.
        self._exchanges = communicator.Dup()
        for each in (self._communicator, self._exchanges):
            each.Set_errhandler(MPI.ERRORS_RETURN)  # raise exceptions instead of aborting the process

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:  # FSDP2 and DTensor need it
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    # -- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        begun = _Begun()
        for tensor in tensors:
            how = self._reduction(opts, tensor, "all_reduce")
            self._reduce_everywhere(begun, how, _as(how.dtype, tensor), tensor)
        return self._follow("all_reduce", begun, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        """An all-reduce that leaves the other ranks' tensors unchanged: MPI's own goes in rounds of a few kilobytes."""
        begun = _Begun()
        (tensor,) = tensors
        how = self._reduction(opts, tensor, "reduce")
        if self.rank() == opts.rootRank:
            self._reduce_everywhere(begun, how, _as(how.dtype, tensor), tensor)
        else:
            self._reduce_everywhere(begun, how, _as(how.dtype, tensor.clone()))
        return self._follow("reduce", begun, tensors)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> MpiWork:
        """Rank r's output is the reduction of all ranks' r-th parts."""
        begun = _Begun()
        for output, parts in zip(outputs, inputs, strict=True):
            how = self._reduction(opts, output, "reduce_scatter")
            rows = output.new_empty((self.size(), output.numel()))
            self._exchange(begun, [_dense(part) for part in parts], list(rows))
            begun.endings.append(partial(self._reduce_rows, how, rows, output))
            begun.holds.append(rows)
        return self._follow("reduce_scatter", begun, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.reduce_scatter([output], [self._rows(input)], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        return self.reduce_scatter(outputs, [self._rows(tensor) for tensor in inputs], opts)

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._follow("barrier", _Begun([self._communicator.Ibarrier()]), [])

    # -- data movement -----------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        begun = _Begun()
        for tensor in tensors:
            buffer = _dense(tensor)
            begun.requests += self._broadcast(buffer, opts.rootRank)
            begun.bring_back(buffer, tensor)
        return self._follow("broadcast", begun, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        """Ranks' tensors may differ in size."""
        begun = _Begun()
        for targets, own in zip(outputs, inputs, strict=True):
            rows = _in_a_row(targets)
            self._gather_everywhere(begun, _dense(own), rows)
            for row, target in zip(rows, targets, strict=True):
                begun.bring_back(row, target)
        return self._follow("all_gather", begun, outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        """Here each list of `outputs` has all tensors of one rank."""
        return self.allgather([list(of_ranks) for of_ranks in zip(*outputs, strict=True)], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        begun = _Begun()
        for output, own in zip(outputs, inputs, strict=True):
            buffer = _dense(output)
            self._gather_everywhere(begun, _dense(own), self._rows(buffer))
            begun.bring_back(buffer, output)
        return self._follow("all_gather", begun, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        begun = _Begun()
        sent: list[Tensor | None] = [None] * self.size()
        sent[opts.rootRank] = _dense(inputs[0])
        targets = outputs[0] if self.rank() == opts.rootRank else []
        received = [_dense(target) for target in targets]
        self._exchange(begun, sent, received or [None] * self.size())
        for buffer, target in zip(received, targets, strict=True):
            begun.bring_back(buffer, target)
        return self._follow("gather", begun, outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        begun = _Begun()
        sent = [_dense(part) for part in inputs[0]] if self.rank() == opts.rootRank else []
        received: list[Tensor | None] = [None] * self.size()
        received[opts.rootRank] = buffer = _dense(outputs[0])
        self._exchange(begun, sent or [None] * self.size(), received)
        begun.bring_back(buffer, outputs[0])
        return self._follow("scatter", begun, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        begun = _Begun()
        received = [_dense(target) for target in outputs]
        self._exchange(begun, [_dense(part) for part in inputs], received)
        for buffer, target in zip(received, outputs, strict=True):
            begun.bring_back(buffer, target)
        return self._follow("all_to_all", begun, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> MpiWork:
        begun = _Begun()
        own, buffer = _dense(input), _dense(output)
        self._exchange(
            begun,
            list(torch.split(own, input_sizes)) if input_sizes else self._rows(own),
            list(torch.split(buffer, output_sizes)) if output_sizes else self._rows(buffer),
        )
        begun.bring_back(buffer, output)
        return self._follow("all_to_all", begun, [output])

    # -- point to point ----------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int = 0) -> MpiWork:
        buffer = _dense(tensors[0])
        requests = [self._communicator.Isend(part, destination, tag) for part in self._byte_parts(buffer)]
        return self._follow(f"send to rank {destination}", _Begun(requests, holds=[buffer]), tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> MpiWork:
        return self._receive(tensors, source, tag, f"recv from rank {source}")

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MpiWork:
        if num_bytes(tensors[0]) > self.MOST_BYTES:
            raise RuntimeError(
                f"mpi: recv from any rank takes up to {self.MOST_BYTES:,} bytes, not {num_bytes(tensors[0]):,}: "
                "larger tensors come in parts, which could be of different ranks. Name the source."
            )
        return self._receive(tensors, MPI.ANY_SOURCE, tag, "recv from any rank")

    def _receive(self, tensors: list[Tensor], source: int, tag: int, operation: str) -> MpiWork:
        buffer = _dense(tensors[0])
        begun = _Begun([self._communicator.Irecv(part, source, tag) for part in self._byte_parts(buffer)])
        begun.bring_back(buffer, tensors[0])
        return self._follow(operation, begun, tensors)

    # Other names of the same operations, most of them of torch 2.11.
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- calls of MPI ------------------------------------------------------------------------------------------------

    def _follow(self, operation: str, begun: _Begun, result: list[Any]) -> MpiWork:
        what = f"{operation} on rank {self.rank()} of {self.size()} (group {self._name})"
        return self._progress.follow(
            MpiWork(
                what,
                begun.requests,
                result,
                progress=self._progress,
                timeout=self._timeout,
                endings=begun.endings,
                holds=begun.holds,
            )
        )

    def _reduction(self, opts: Any, tensor: Tensor, operation: str) -> Reduction:
        return reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM, tensor.dtype, operation)

    def _reduce_everywhere(self, begun: _Begun, how: Reduction, buffer: Tensor, target: Tensor | None = None) -> None:
        begun.holds.append(buffer)
        for start, count in self._parts(buffer):
            part = [memory(buffer, start, count), count, how.datatype]
            begun.requests.append(self._communicator.Iallreduce(MPI.IN_PLACE, part, how.op))
        if target is not None:
            begun.endings.append(partial(self._store_result, how, buffer, target))

    def _store_result(self, how: Reduction, buffer: Tensor, target: Tensor) -> None:
        with _writing(buffer, target):
            _put(how.finish(buffer, self.size()), target)

    def _reduce_rows(self, how: Reduction, rows: Tensor, target: Tensor) -> None:
        self._store_result(how, how.over_rows(rows.to(how.dtype)), target)

    def _rows(self, tensor: Tensor) -> list[Tensor]:
        """The parts of a tensor that belong to each rank."""
        if tensor.numel() % self.size():
            raise RuntimeError(f"mpi: {tensor.numel()} elements cannot be cut into {self.size()} equal parts")
        return list(_dense(tensor).view(self.size(), tensor.numel() // self.size()))

    def _parts(self, tensor: Tensor) -> Iterator[tuple[int, int]]:
        """Start and count of parts of at most MOST_BYTES."""
        most = max(1, self.MOST_BYTES // tensor.itemsize)
        for start in range(0, tensor.numel(), most):
            yield start, min(most, tensor.numel() - start)

    def _byte_parts(self, tensor: Tensor) -> Iterator[list[Any]]:
        flat = tensor.view(-1).view(torch.uint8)
        for start, count in self._parts(flat):
            yield [memory(flat, start, count), count, MPI.BYTE]

    def _broadcast(self, buffer: Tensor, root: int) -> list[MPI.Request]:
        return [self._communicator.Ibcast(part, root) for part in self._byte_parts(buffer)]

    def _gather_everywhere(self, begun: _Begun, own: Tensor, rows: Sequence[Tensor]) -> None:
        """All-gather each rank's tensor into its row. The rows are adjacent in memory."""
        begun.holds += [own, rows]
        sizes = [num_bytes(row) for row in rows]
        if sizes[self.rank()] != num_bytes(own):
            raise RuntimeError(
                f"mpi: all_gather on rank {self.rank()}: the input has {num_bytes(own)} bytes, but its part of the "
                f"output {sizes[self.rank()]}"
            )
        _put(own, rows[self.rank()])
        if sum(sizes) > self.MOST_BYTES:
            begun.requests += [request for root, row in enumerate(rows) for request in self._broadcast(row, root)]
        elif sum(sizes):
            # Empty rows have no address.
            whole = MPI.buffer.fromaddress(next(row.data_ptr() for row in rows if row.numel()), sum(sizes))
            if len(set(sizes)) == 1:
                request = self._communicator.Iallgather(MPI.IN_PLACE, [whole, sizes[0], MPI.BYTE])
            else:
                starts = [0, *itertools.accumulate(sizes[:-1])]
                request = self._communicator.Iallgatherv(MPI.IN_PLACE, [whole, sizes, starts, MPI.BYTE])
            begun.requests.append(request)

    def _exchange(self, begun: _Begun, sent: Sequence[Tensor | None], received: Sequence[Tensor | None]) -> None:
        """Send a part to each rank and receive one from each; None where there is none. The own part is copied."""
        begun.holds += [sent, received]
        own, target = sent[self.rank()], received[self.rank()]
        if own is not None and target is not None:
            _put(own, target)
        # Each rank starts with its neighbour, so that not all send to the same rank first.
        others = [(self.rank() + distance) % self.size() for distance in range(1, self.size())]
        for rank in reversed(others):
            if (place := received[rank]) is not None:
                begun.requests += [self._exchanges.Irecv(part, rank) for part in self._byte_parts(place)]
        for rank in others:
            if (part := sent[rank]) is not None:
                begun.requests += [self._exchanges.Isend(each, rank) for each in self._byte_parts(part)]


def _dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else a contiguous copy. Raises if it is not dense in host memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        kind = f"tensors on {tensor.device.type}" if tensor.device.type != "cpu" else "sparse, conj or neg tensors"
        raise RuntimeError(f"mpi: takes dense tensors in host memory, not {kind}")
    return tensor.detach().contiguous()


def _as(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return _dense(tensor).to(dtype)


def _put(value: Tensor, target: Tensor) -> None:
    if value.data_ptr() != target.data_ptr() and value.numel():
        with _writing(value, target):
            target.copy_(value.view(target.shape))


@contextlib.contextmanager
def _writing(*tensors: Tensor) -> Iterator[None]:
    """The modes needed to write to the tensors: this may run in another thread than made them."""
    with torch.inference_mode(any(tensor.is_inference() for tensor in tensors)), torch.no_grad():
        yield


def _in_a_row(targets: Sequence[Tensor]) -> list[Tensor]:
    """The tensors themselves if they are adjacent in memory, else adjacent buffers of their sizes."""
    ends = [target.data_ptr() + num_bytes(target) for target in targets]
    if all(target.is_contiguous() for target in targets) and all(
        target.data_ptr() == end for target, end in zip(targets[1:], ends, strict=False)
    ):
        return [_dense(target) for target in targets]
    sizes = [target.numel() for target in targets]
    return list(torch.split(targets[0].new_empty(sum(sizes)), sizes))
