"""Calls between the processes of a job: the only module that uses torch's RPC.

RPC carries pickled calls and calls of torch's own operators, and TensorPipe, below it, authenticates no peer. So it
listens on loopback unless a host is given, a ConnectionFilter admits only the connections of the job's ranks, and every
pickle carries a signature with the job's key, which is verified before unpickling. Nothing is encrypted. TensorPipe is
in maintenance mode; everything that Rung needs of it is here.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed.autograd as distributed_autograd
from torch import Tensor
from torch.distributed import register_rendezvous_handler, rpc  # type: ignore[attr-defined]
from torch.distributed.rpc import api, internal
from torch.futures import Future

from rung.distributed.connection_filter import ConnectionFilter
from rung.distributed.signed_store import SignedStore
from rung.errors import EnvironmentProblem
from rung.system.launcher_env import environment_local_size, environment_size, external_attempt
from rung.system.network import interface_of

_SHUTDOWN_SECONDS = 30
_LOOPBACK = "lo"
_CALL = "rpc"  # the name that a call's signature covers; no key of the store
# Objects that RPC functions use in this process, by name: a called function gets plain values and finds them here.
_endpoints: dict[str, Any] = {}
_endpoints_changed = threading.Condition()


class Calls:
    """Calls functions in the job's other processes. All processes of the job open it together."""

    def __init__(
        self,
        rank: int,
        size: int,
        store: SignedStore,
        world_number: int,
        *,
        host: str | None,
        timeout_seconds: float,
        threads: int = 32,
    ) -> None:
        """`threads` execute calls: a call that blocks inside its function holds one of them. `world_number`
        distinguishes the worlds of this process."""
        self.rank, self.size = rank, size
        self.interface = _choose_interface(host)
        # Otherwise TensorPipe resolves the host's name and listens at whatever address that gives.
        os.environ["TP_SOCKET_IFNAME"] = self.interface
        # init_rpc takes a store only from a rendezvous handler, and a scheme can be registered once: one per store.
        scheme = f"rung{id(store)}"
        register_rendezvous_handler(scheme, lambda *_, **__: iter([(store, rank, size)]))  # type: ignore[no-untyped-call]
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads,
            rpc_timeout=timeout_seconds,
            init_method=f"{scheme}://",
            # One TCP port. The defaults add 16 more and Unix sockets, which have no filter, and are no faster.
            _transports=["uv"],
            _channels=["basic"],
        )
        _sign_calls(store)
        self._filter = ConnectionFilter(rank, size, store, f"rpc-{external_attempt()}-{world_number}")
        store.before_set = self._filter.guard
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about missing device maps: tensors go through host memory
                rpc.init_rpc(_name(rank), rank=rank, world_size=size, rpc_backend_options=options)  # type: ignore[no-untyped-call]
            # Every rank calls every rank, itself included: all are connected before the filter is sealed.
            for answer in [self.start(other, _no_op) for other in range(size)]:
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
                f"rpc: listens on {where} without a connection filter ({self._filter.problem}): any process that "
                "reaches the port can read and write your files"
            )
        return f"rpc: listens on {where}, for the ranks of this job only; messages are not encrypted"

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Call a function in another process. The future holds its result, or the error it raised."""
        found: Future[Any] = rpc.rpc_async(_name(rank), function, args=args)
        return found

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return self.start(rank, function, *args).wait()

    def serve(self, name: str, endpoint: Any) -> None:
        """Register `endpoint` for the functions that others call here, until `close` or `abandon`."""
        with _endpoints_changed:
            _endpoints[name] = endpoint
            _endpoints_changed.notify_all()

    def close(self) -> None:
        """Shut down together with all processes. If one is gone, use `abandon`: this would wait for it."""
        rpc.shutdown(timeout=_SHUTDOWN_SECONDS)
        _endpoints.clear()

    def abandon(self) -> None:
        """Shut down without waiting for the others."""
        rpc.shutdown(graceful=False)
        _endpoints.clear()


def served(name: str) -> Any:
    """The endpoint registered by `Calls.serve` in this process; waits for it, since a caller may be built earlier."""
    with _endpoints_changed:
        _endpoints_changed.wait_for(lambda: name in _endpoints)
        return _endpoints[name]


def _no_op() -> None:
    pass


class _SigningPickler(internal._InternalRPCPickler):
    """torch's pickler for calls and results, with a signature in front that is verified before unpickling."""

    def __init__(self, store: SignedStore) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store = store

    def serialize(self, value: Any) -> tuple[bytes, list[Tensor]]:
        content, tensors = super().serialize(value)  # type: ignore[no-untyped-call]
        return self._store.sign(_CALL, content), tensors

    def deserialize(self, signed: bytes, tensors: list[Tensor]) -> Any:
        return super().deserialize(self._store.verify(_CALL, signed), tensors)  # type: ignore[no-untyped-call]


def _sign_calls(store: SignedStore) -> None:
    """Replace the pickler of all RPCs in this process, those of torch's C++ code included. `init_rpc` takes none."""
    internal._internal_rpc_pickler = api._default_pickler = _SigningPickler(store)


# Decorates a function that returns a future: the call is answered when it resolves, and no RPC thread waits for it.
async_execution = rpc.functions.async_execution


def autograd_context() -> AbstractContextManager[int]:
    """While it is open, autograd records the calls from this thread, and the calls that these make.

    Gives the id of the context in all processes. Gradients accumulate in the context, not in the parameters.
    """
    context: AbstractContextManager[int] = distributed_autograd.context()
    return context


def backward(context: int, losses: list[Tensor]) -> None:
    """Run backward from these losses through every process. The losses must depend on the result of every call of the
    context: torch waits for the others without end."""
    try:
        distributed_autograd.backward(context, losses)  # type: ignore[attr-defined]
    except RuntimeError as error:
        found = re.search(r".*Error on Node (\d+): (.*)", str(error), re.DOTALL)
        if found is None:
            raise
        rank, cause = found.groups()
        if cause.strip() == "python_error":
            cause = "an error in Python code; distributed autograd drops its traceback. Run it under pp to see that."
        raise RuntimeError(f"backward failed on rank {rank}: {cause}") from error


def gradients(context: int) -> dict[Tensor, Tensor]:
    """The context's gradients of tensors of this process."""
    found: dict[Tensor, Tensor] = distributed_autograd.get_gradients(context)  # type: ignore[attr-defined]
    return found


def prioritize_backward(received: Tensor) -> None:
    """Let backward send the gradients of the message that `received` belongs to as soon as they are computed.

    The engine runs the operation with the highest sequence number first, and each thread counts its own. An RPC thread
    numbered the message's operation, which would run last. torch has no public way to set the number.
    """
    assert received.grad_fn is not None
    received.grad_fn._set_sequence_nr(2**63)  # type: ignore[attr-defined]


def remote_reference(value: Any) -> Any:
    """A reference to send to other processes, which names the owner of the value."""
    return rpc.RRef(value)


def distributed_optimizer(make: Callable[[list[Any]], Any], references: list[Any]) -> Any:
    """torch's DistributedOptimizer: `step(context)` sets the parameters' gradients from the context and steps, in every
    process that owns a reference. `make` is called there with the local values, and returns the optimizer."""
    from torch.distributed.optim import DistributedOptimizer  # takes half a second

    # It logs advice to use TorchScript optimizers, which would not be the task's own.
    logging.getLogger("torch.distributed.optim.optimizer").setLevel(logging.ERROR)
    return DistributedOptimizer(make, references)  # type: ignore[no-untyped-call]


def _name(rank: int) -> str:
    return f"rank-{rank}"


def _choose_interface(host: str | None) -> str:
    """The interface named by or carrying `host`; without one, the interface between the machines, or loopback."""
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
