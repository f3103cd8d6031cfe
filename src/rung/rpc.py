"""Calls between the processes of a job: the one module that knows torch's RPC.

RPC carries pickled calls, and calls of torch's own operators, and TensorPipe, which is below it, asks nobody who they
are. So it listens on loopback unless a host is given, connections of others than the ranks are kept out by a
ConnectionFilter, and every pickle carries a signature with the key of the job, which is checked before it is read.
Nothing is encrypted. TensorPipe is in maintenance mode; all that Rung needs of it is here alone.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed.autograd as distributed_autograd
from torch import Tensor
from torch.distributed import register_rendezvous_handler, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import api, internal
from torch.futures import Future

from rung.connection_filter import ConnectionFilter
from rung.environment import environment_local_size, environment_size, outside_attempt
from rung.errors import EnvironmentProblem
from rung.network import interface_of
from rung.signed_store import SignedStore

_SHUTDOWN_SECONDS = 30
_opened = itertools.count()  # the worlds of this process
_LOOPBACK = "lo"
_CALL = "rpc"  # what a call is signed as; no name in the store


class Calls:
    """One process's way to call functions in the others. All processes of the job open it together."""

    def __init__(
        self, rank: int, size: int, store: SignedStore, *, host: str | None, timeout_seconds: float, threads: int = 32
    ) -> None:
        """`threads` answer calls: a call that waits inside its function holds one of them."""
        self.rank, self.size = rank, size
        self.interface = _choose_interface(host)
        # TensorPipe asks the host's name for its address otherwise, and listens wherever that leads.
        os.environ["TP_SOCKET_IFNAME"] = self.interface
        # torch takes the store from a rendezvous alone, whose scheme can be registered once.
        scheme = f"rung{id(store)}"
        register_rendezvous_handler(scheme, lambda *_, **__: iter([(store, rank, size)]))  # type: ignore[no-untyped-call]
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads,
            rpc_timeout=timeout_seconds,
            init_method=f"{scheme}://",
            # One TCP port. By default there are 16 more, and Unix sockets without a filter, and it is no quicker.
            _transports=["uv"],
            _channels=["basic"],
        )
        _sign_calls(store)
        self._filter = ConnectionFilter(rank, size, store, f"rpc-{outside_attempt()}-{next(_opened)}")
        store.before_set = self._filter.guard
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a device map, which there is none of
                rpc.init_rpc(_name(rank), rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
            for answer in [self.start(other, _answer) for other in range(size)]:
                answer.wait()
            self._filter.seal(timeout_seconds)
        except RuntimeError as error:
            if (reason := self._filter.failure()) is not None:
                raise reason from error
            raise
        finally:
            store.before_set = None
            self._filter.end()

    def describe(self) -> str:
        where = "loopback" if self.interface == _LOOPBACK else f"interface {self.interface}"
        if self._filter.problem:
            return (
                f"rpc: listens on {where}, where it keeps nobody out ({self._filter.problem}): whoever reaches it "
                "reads and writes your files"
            )
        return f"rpc: listens on {where}, for the ranks of this job alone; what they send is not encrypted"

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Begin to call a function in another process. The future holds its result, or the error it raised."""
        found: Future[Any] = rpc.rpc_async(_name(rank), function, args=args)
        return found

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.start(rank, function, *args).wait()

    def close(self) -> None:
        """By all processes, in good order. Where one is gone, nobody waits for it: see `abandon`."""
        rpc.shutdown(timeout=_SHUTDOWN_SECONDS)

    def abandon(self) -> None:
        """End without the others."""
        rpc.shutdown(graceful=False)


def _answer() -> None:
    """Called by each rank on each, itself among them, so that all are connected before others are shut out."""


class _SigningPickler(internal._InternalRPCPickler):
    """torch's pickler for calls and results, with a signature in front that is checked before anything is unpickled."""

    def __init__(self, store: SignedStore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store

    def serialize(self, value: Any) -> tuple[bytes, list[Tensor]]:
        content, tensors = super().serialize(value)  # type: ignore[no-untyped-call]
        return self._store.sign(_CALL, content), tensors

    def deserialize(self, signed: bytes, tensors: list[Tensor]) -> Any:
        return super().deserialize(self._store.verify(_CALL, signed), tensors)  # type: ignore[no-untyped-call]


def _sign_calls(store: SignedStore) -> None:
    """Whatever sends and receives Python objects over RPC in this process, torch's own code in C++ included."""
    internal._internal_rpc_pickler = api._default_pickler = _SigningPickler(store)


# A function so marked returns a future, and answers its call when that is done; no thread waits for it meanwhile.
answers_later = rpc.functions.async_execution


def autograd_context() -> AbstractContextManager[int]:
    """While it is open, calls from this thread carry what backward needs, and so do the calls that these make.

    The number tells the context in all processes. Gradients are kept in it, not in the parameters.
    """
    context: AbstractContextManager[int] = distributed_autograd.context()
    return context


def backward(context: int, losses: list[Tensor]) -> None:
    """From these losses through every process that had a part in them. Each call of the context must be part of it:
    one whose result no loss depends on is waited for without end."""
    try:
        distributed_autograd.backward(context, losses)  # type: ignore[attr-defined]
    except RuntimeError as error:
        found = re.search(r".*Error on Node (\d+): (.*)", str(error), re.DOTALL)
        if found is None:
            raise
        rank, cause = found.groups()
        if cause.strip() == "python_error":
            cause = "an error in Python code, of which distributed autograd tells no more. Under pp it has a traceback."
        raise RuntimeError(f"backward failed on rank {rank}: {cause}") from error


def gradients(context: int) -> dict[Tensor, Tensor]:
    """What backward has found for tensors of this process."""
    found: dict[Tensor, Tensor] = distributed_autograd.get_gradients(context)  # type: ignore[attr-defined]
    return found


def answer_first(received: Tensor) -> None:
    """Let backward send the gradient of what this tensor came with as soon as it is known, and then do other things.

    The engine takes the youngest operation first, by numbers that each thread counts for itself. What was received was
    numbered by a thread of the RPC's, and would come last.
    """
    assert received.grad_fn is not None
    received.grad_fn._set_sequence_nr(2**63)  # type: ignore[attr-defined]


def refer_to(value: Any) -> Any:
    """A reference that may be sent to other processes, and tells them who has the value."""
    return rpc.RRef(value)


def distributed_optimizer(make: Callable[[list[Any]], Any], references: list[Any]) -> Any:
    """torch's DistributedOptimizer: its `step(context)` puts the context's gradients into parameters, and takes a step,
    in every process that one of the references points to. There, `make` is called for an optimizer, with what they
    refer to."""
    from torch.distributed.optim import DistributedOptimizer  # takes half a second

    # It advises optimizers in TorchScript, which would not be the task's own.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    return DistributedOptimizer(make, references)  # type: ignore[no-untyped-call]


def _name(rank: int) -> str:
    return f"rank-{rank}"


def _choose_interface(host: str | None) -> str:
    """The interface of an address or a name of one; that of the machines' own network; else loopback."""
    if host is None:
        is_one_machine = environment_local_size() == environment_size()
        return _LOOPBACK if is_one_machine else os.environ.get("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if os.path.exists(f"/sys/class/net/{host}"):
        return host
    found = interface_of(host)
    if found is None:
        known = ", ".join(sorted(os.listdir("/sys/class/net")))
        raise EnvironmentProblem(
            f"rpc_host={host} is neither an address nor an interface of this machine. Interfaces here: {known}."
        )
    return found
