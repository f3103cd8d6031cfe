"""Replicas of a model that compute parts of a batch in parallel, in one process: on CPU threads or on GPUs.

Each forward scatters the inputs, broadcasts the parameters and gathers the outputs on device 0; each backward scatters
the gradients of the outputs and reduces those of the parameters. On GPUs `nn.DataParallel` does it. On the CPU that
class only calls the module, so the five transfers are made here, between one copy of the model per thread (one module
called from two threads gives wrong numbers).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rung.data.permutation import mix
from rung.distributed.torch_private import buffers_of, foreach_add_, foreach_copy_
from rung.errors import ModelError
from rung.parallel.activation import Around, checkpoint_again
from rung.parallel.model_copy import copy_model
from rung.runtime.base import Traffic
from rung.runtime.data_parallel.rng_streams import RngStreams
from rung.runtime.data_parallel.scatter import Nested, cut_rows, num_bytes, piece_sizes, validate_same_form

Compute = Callable[[nn.Module, Any], Any]  # (model, input) -> output


class TransferCounts:
    """Messages of device 0 with the other devices, by kind, and the most bytes of outputs that it held."""

    FORWARD = ("scatter inputs", "broadcast parameters", "gather outputs")
    BACKWARD = ("scatter output gradients", "reduce gradients")

    def __init__(self) -> None:
        self.traffic = {name: Traffic() for name in (*self.FORWARD, *self.BACKWARD)}
        self.output_bytes = 0
        self.output_gradient_bytes = 0

    def count(self, name: str, bytes_of_each: Sequence[int]) -> None:
        """Count one message for each other device. Those of an evaluation count as one kind."""
        if not torch.is_grad_enabled() and name in self.FORWARD:
            name = "evaluation"
        if bytes_of_each:
            self.traffic.setdefault(name, Traffic()).add(sum(bytes_of_each), len(bytes_of_each))


@dataclass(frozen=True)
class ReplicaSettings:
    name: str  # of the strategy
    recomputes: str = "none"  # the mode of activation checkpointing
    recomputing: Around | None = None  # entered around a recomputation, besides the random numbers


class Replicas(Protocol):
    notes: list[str]

    def outputs(self, given: Any, num_rows: int) -> Any:
        """The output of the whole batch, on device 0."""
        ...

    def backward(self) -> None:
        """Carry the gradients of what `outputs` returned on to the parameters on device 0."""
        ...

    def reached(self) -> set[int] | None:
        """Ids of the parameters that got a gradient since the last call; None where `grad is None` shows it."""
        ...

    def copied_bytes(self) -> int:
        """Bytes that the copies keep between steps."""
        ...


class ThreadReplicas:
    """Replicas on CPU threads. The model itself is replica 0, as in `nn.DataParallel`: it keeps changes by forward."""

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        num_replicas: int,
        exchanges: TransferCounts,
        settings: ReplicaSettings,
    ) -> None:
        self._compute, self._exchanges, self._name = compute, exchanges, settings.name
        self._copies = [_ReplicaCopy(model) for _ in range(num_replicas - 1)]
        self.models = [model, *(each.model for each in self._copies)]
        self._streams = RngStreams(
            num_replicas, recomputes=settings.recomputes != "none", inside=settings.recomputing or nullcontext
        )
        self.notes = self._streams.notes
        for replica, stream in zip(self.models, self._streams.each, strict=True):
            checkpoint_again(replica, settings.recomputes, stream.again, keep_generators=False)
        self._threads = _start_threads(num_replicas)
        self._parts: list[list[Tensor]] = []  # outputs of each replica, with their graphs
        self._joined: list[Tensor] = []  # the same concatenated, detached
        self._sizes: list[int] = []

    def copied_bytes(self) -> int:
        return sum(num_bytes([*each.model.parameters(), *each.model.buffers()]) for each in self._copies)

    def outputs(self, given: Any, num_rows: int) -> Any:
        nested = Nested(given)
        nested.validate_input(num_rows, self._name)
        sizes = piece_sizes(num_rows, len(self.models))
        columns = [cut_rows(tensor, sizes) for tensor in nested.tensors]
        pieces = [list(row) for row in zip(*columns, strict=True)]
        has_backward = torch.is_grad_enabled()

        def run(number: int) -> tuple[Nested, int]:
            # In a replica's thread: grad mode and torch function modes are thread-local.
            drawing = self._streams.of(number) if has_backward else nullcontext()
            with torch.set_grad_enabled(has_backward), drawing:
                sent, piece = 0, pieces[number]
                if number > 0:
                    sent = self._copies[number - 1].refresh()
                    piece = [tensor.clone() for tensor in piece]
                found = Nested(self._compute(self.models[number], nested.rebuild(piece)))
            found.validate_output(sizes[number], self._name)
            return found, sent

        with self._streams.forward() if has_backward else nullcontext():
            results = self._in_threads(run, len(sizes))
        parts = [found for found, _ in results]
        validate_same_form(parts, sizes, self._name)
        self._exchanges.count("scatter inputs", [num_bytes(piece) for piece in pieces[1:]])
        self._exchanges.count("broadcast parameters", [sent for _, sent in results[1:]])
        self._exchanges.count("gather outputs", [num_bytes(part.tensors) for part in parts[1:]])
        joined = [_join(same) for same in zip(*(part.tensors for part in parts), strict=True)]
        self._exchanges.output_bytes = max(self._exchanges.output_bytes, num_bytes(joined))
        if has_backward:
            self._parts, self._joined, self._sizes = [part.tensors for part in parts], joined, sizes
        return parts[0].rebuild(joined)

    def backward(self) -> None:
        """Run each replica's backward in its thread; one backward over all graphs would run in one thread."""
        parts, joined, sizes = self._parts, self._joined, self._sizes
        self._parts, self._joined = [], []
        gradients = [None if tensor.grad is None else cut_rows(tensor.grad, sizes) for tensor in joined]
        whole = num_bytes(tensor.grad for tensor in joined if tensor.grad is not None)
        self._exchanges.output_gradient_bytes = max(self._exchanges.output_gradient_bytes, whole)

        def run(number: int) -> int:
            pairs = [
                (output, gradient[number] if number == 0 else gradient[number].clone())
                for output, gradient in zip(parts[number], gradients, strict=True)
                if gradient is not None and output.requires_grad
            ]
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
            return num_bytes(gradient for _, gradient in pairs)

        sent = self._in_threads(run, len(sizes))
        self._exchanges.count("scatter output gradients", sent[1:])
        used = self._copies[: len(sizes) - 1]
        self._exchanges.count("reduce gradients", [each.reduce_gradients() for each in used])

    def reached(self) -> None:
        return None

    def in_each_thread(self, run: Callable[[], Any]) -> None:
        """Call `run` in every replica's thread, to enter or leave thread-local modes there."""
        self._in_threads(lambda number: run(), len(self._threads))

    def _in_threads(self, run: Callable[[int], Any], count: int) -> list[Any]:
        running = [self._threads[number].start(run, number) for number in range(count)]
        errors = [future.exception() for future in running]  # wait for all before raising
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in running]


class GpuReplicas:
    """`nn.DataParallel` on GPUs. Transfers are computed from shapes; a replica's own exception is raised."""

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        devices: Sequence[torch.device],
        exchanges: TransferCounts,
        settings: ReplicaSettings,
    ) -> None:
        self._model, self._exchanges, self._name = model, exchanges, settings.name
        self._devices = [device.index for device in devices]
        self._flat = _FlatModule(model, compute, settings.name)
        self._parallel = _DataParallel(self._flat, self._devices, settings)
        self.notes: list[str] = []

    def outputs(self, given: Any, num_rows: int) -> Any:
        nested = Nested(given)
        nested.validate_input(num_rows, self._name)
        sizes = piece_sizes(num_rows, len(self._devices))
        if torch.is_grad_enabled():
            self._seed_others()
        self._flat.begin(nested, sizes)
        try:
            joined = self._parallel(*nested.tensors)
        except Exception:
            # torch replaces the exception by one with its text but without its frames.
            for error in self._flat.errors:
                if error is not None:
                    raise error from None
            raise
        self._count(nested.tensors, joined, sizes)
        output = self._flat.found[0].rebuild(joined)
        self._flat.begin(None, [])
        return output

    def _seed_others(self) -> None:
        """Seed the other GPUs from the process's generator: a checkpoint holds only device 0's random state."""
        seed = int(torch.randint(2**62, ()))
        for index in set(self._devices[1:]) - {self._devices[0]}:
            torch.cuda.default_generators[index].manual_seed(mix(seed, index))

    def _count(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], sizes: list[int]) -> None:
        others, num_rows = sizes[1:], sum(sizes)
        kept = num_bytes([*self._model.parameters(), *self._model.buffers()])
        trained = num_bytes(p for p in self._model.parameters() if p.requires_grad)
        with_gradient = num_bytes(tensor for tensor in outputs if tensor.requires_grad)
        count, whole = self._exchanges.count, num_bytes(outputs)
        count("scatter inputs", [num_bytes(inputs) * rows // num_rows for rows in others])
        count("broadcast parameters", [kept] * len(others))
        count("gather outputs", [whole * rows // num_rows for rows in others])
        self._exchanges.output_bytes = max(self._exchanges.output_bytes, whole)
        if torch.is_grad_enabled():
            count("scatter output gradients", [with_gradient * rows // num_rows for rows in others])
            count("reduce gradients", [trained] * len(others))
            self._exchanges.output_gradient_bytes = max(self._exchanges.output_gradient_bytes, with_gradient)

    def backward(self) -> None:
        """Nothing to do: the graph of the gathered output goes through all replicas."""

    def reached(self) -> set[int] | None:
        """`nn.DataParallel` reduces a missing gradient to zeros. With one device it does not reduce."""
        reached, self._parallel.reached = self._parallel.reached, set()
        return reached if len(self._devices) > 1 else None

    def copied_bytes(self) -> int:
        return 0  # replicas are freed after backward


class _FlatModule(nn.Module):
    """The module that `nn.DataParallel` replicates: takes and returns flat tensors, for inputs of any nesting."""

    def __init__(self, model: nn.Module, compute: Compute, name: str) -> None:
        super().__init__()
        self.model = model
        self.number = 0  # of the replica
        self._compute, self._name = compute, name
        self.begin(None, [])

    def begin(self, given: Nested | None, sizes: list[int]) -> None:
        """Set the input of the next forward. Replicas share these lists; each writes its own element."""
        self._given, self._sizes = given, sizes
        self.found = [Nested(None) for _ in sizes]
        self.errors: list[Exception | None] = [None for _ in sizes]

    def validate_same_form(self) -> None:
        validate_same_form(self.found, self._sizes, self._name)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self._given is not None
        try:
            found = Nested(self._compute(self.model, self._given.rebuild(tensors)))
            found.validate_output(self._sizes[self.number], self._name)
        except Exception as error:
            self.errors[self.number] = error
            raise
        self.found[self.number] = found
        return tuple(found.tensors)


class _DataParallel(nn.DataParallel[_FlatModule]):
    """Numbers the replicas, and records which parameters get a gradient."""

    def __init__(self, module: _FlatModule, device_ids: list[int], settings: ReplicaSettings) -> None:
        super().__init__(module, device_ids=device_ids)
        self._settings = settings
        self.reached: set[int] = set()

    def replicate(self, module: _FlatModule, device_ids: Sequence[int | torch.device]) -> list[_FlatModule]:
        replicas = super().replicate(module, device_ids)
        for number, replica in enumerate(replicas):
            replica.number = number
            checkpoint_again(replica, self._settings.recomputes, self._settings.recomputing)
            for own, other in zip(module.modules(), replica.modules(), strict=True):
                if number > 0 and device_ids[number] == device_ids[0]:  # there torch may share replica 0's memory
                    for key, buffer in list(other.named_buffers(recurse=False, remove_duplicate=False)):
                        setattr(other, key, buffer.clone())
                for key, parameter in own.named_parameters(recurse=False, remove_duplicate=False):
                    if getattr(other, key).requires_grad:
                        getattr(other, key).register_hook(self._mark_reached(id(parameter)))
        return replicas

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        self.module.validate_same_form()
        return super().gather(outputs, output_device)

    def _mark_reached(self, parameter: int) -> Callable[[Tensor | None], None]:
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.reached.add(parameter)

        return hook


class _ReplicaCopy:
    """A copy of the model for one thread, and the transfers between the two."""

    def __init__(self, model: nn.Module) -> None:
        try:
            self.model = copy_model(model)
        except Exception as error:
            raise ModelError(
                f"dp needs a copy of the model for each thread, but this one cannot be copied: {error} "
                "Use ddp, where each process builds its own."
            ) from error
        self._parameters = list(zip(model.parameters(), self.model.parameters(), strict=True))
        self._modules = [
            (own, other, [key for key, value in vars(own).items() if type(value) in (bool, int, float)])
            for own, other in zip(model.modules(), self.model.modules(), strict=True)
        ]

    @torch.no_grad()
    def refresh(self) -> int:
        """Copy the model's parameters, buffers and plain attributes; returns the bytes copied."""
        originals: list[Tensor] = [own for own, _ in self._parameters]
        copies: list[Tensor] = [other for _, other in self._parameters]
        for own, other, plain in self._modules:
            vars(other).update({key: vars(own)[key] for key in plain if key in vars(own)})
            for key, buffer in buffers_of(own).items():  # read each time: forward may replace a buffer
                buffers_of(other)[key] = None if buffer is None else buffer.clone()
        foreach_copy_(copies, originals)
        return num_bytes([*copies, *self.model.buffers()])

    def reduce_gradients(self) -> int:
        """Add this copy's gradients to the model's; returns their bytes."""
        given = [(own, other) for own, other in self._parameters if other.grad is not None]
        count = num_bytes(other.grad for _, other in given if other.grad is not None)
        sums: list[Tensor] = []
        more: list[Tensor] = []
        for own, other in given:
            assert other.grad is not None
            if own.grad is None:
                own.grad = other.grad
            else:
                sums.append(own.grad)
                more.append(other.grad)
            other.grad = None
        if sums:
            foreach_add_(sums, more)
        return count


class _ReplicaThread:
    """A daemon thread that runs functions in order, and ends when this object is collected."""

    def __init__(self, number: int, num_threads: int) -> None:
        tasks: SimpleQueue[Any] = SimpleQueue()
        self._tasks = tasks
        Thread(target=_serve, args=(tasks, num_threads), name=f"rung-replica-{number}", daemon=True).start()
        weakref.finalize(self, tasks.put, None)

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, function, args))
        return future


def _serve(tasks: SimpleQueue[Any], num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # per thread, for this thread's operations
    while (task := tasks.get()) is not None:
        future, function, args = task
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args  # else they keep a step's tensors alive until the next task


def _start_threads(count: int) -> list[_ReplicaThread]:
    """One thread for each replica, which divide torch's intra-op threads among them."""
    own = torch.get_num_threads()
    threads = [_ReplicaThread(number, max(1, own // count)) for number in range(count)]
    for future in [thread.start(int) for thread in threads]:
        future.result()
    torch.set_num_threads(own)  # each call in a thread has also set the number of the process
    return threads


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the replicas' outputs, detached: the loss gets a graph of its own."""
    joined = torch.cat([part.detach() for part in parts]) if len(parts) > 1 else parts[0].detach()
    return joined.requires_grad_(any(part.requires_grad for part in parts))
