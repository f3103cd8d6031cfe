"""Copies of a model that compute parts of a batch at the same time, in one process: threads on the CPU, or GPUs.

Both do what `nn.DataParallel` does, in each forward and backward: scatter the inputs, broadcast the parameters, gather
the outputs on device 0; scatter the gradients of the outputs, reduce those of the parameters. On GPUs it is that class
itself. Without GPUs it would only call the model, so there the five exchanges are made here, between a copy of the
model for each thread (one module in two threads gives wrong numbers).
"""

from __future__ import annotations

import copy
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

from rung.errors import ModelError
from rung.order import mix
from rung.parallel.activation import Around, checkpoint_again
from rung.runtime.base import Traffic
from rung.runtime.draws import Streams
from rung.runtime.pieces import Nested, cut_rows, num_bytes, piece_sizes, refuse_different_parts

Compute = Callable[[nn.Module, Any], Any]  # a model and what it is given -> its output


class Exchanges:
    """What device 0 sends and gets, by kind, and the most it held of outputs. Device 0 sends itself nothing."""

    FORWARD = ("scatter inputs", "broadcast parameters", "gather outputs")
    BACKWARD = ("scatter output gradients", "reduce gradients")

    def __init__(self) -> None:
        self.traffic = {name: Traffic() for name in (*self.FORWARD, *self.BACKWARD)}
        self.output_bytes = 0
        self.output_gradient_bytes = 0

    def count(self, name: str, bytes_of_each: Sequence[int]) -> None:
        """One message to or from every other device. In evaluation there is no backward; it is counted as one kind."""
        if not torch.is_grad_enabled() and name in self.FORWARD:
            name = "evaluation"
        if bytes_of_each:
            self.traffic.setdefault(name, Traffic()).add(sum(bytes_of_each), len(bytes_of_each))


@dataclass(frozen=True)
class Settings:
    """What replicas need to know of the run. `recomputes` is the mode of activation checkpointing."""

    name: str  # of the strategy
    recomputes: str = "none"
    recomputing: Around | None = None  # what is around it, besides random numbers


class Replicas(Protocol):
    notes: list[str]

    def outputs(self, given: Any, num_rows: int) -> Any:
        """The output of the whole batch, on device 0."""
        ...

    def backward(self) -> None:
        """After the loss has given gradients to what `outputs` returned: on to the parameters on device 0."""
        ...

    def reached(self) -> set[int] | None:
        """Parameters, by identity, that got a gradient since the last call; None where their `grad` tells."""
        ...

    def copied_bytes(self) -> int:
        """What the copies keep between steps."""
        ...


class ThreadReplicas:
    """On the CPU. The model itself is replica 0, as under `nn.DataParallel`, so what forward changes in it stays."""

    def __init__(
        self, model: nn.Module, compute: Compute, num_replicas: int, exchanges: Exchanges, settings: Settings
    ) -> None:
        self._compute, self._exchanges, self._name = compute, exchanges, settings.name
        self._copies = [_Copy(model) for _ in range(num_replicas - 1)]
        self.models = [model, *(each.model for each in self._copies)]
        self._streams = Streams(
            num_replicas, recomputes=settings.recomputes != "none", inside=settings.recomputing or nullcontext
        )
        self.notes = self._streams.notes
        for replica, stream in zip(self.models, self._streams.each, strict=True):
            checkpoint_again(replica, settings.recomputes, stream.again, keep_generators=False)
        self._lanes = _open_lanes(num_replicas)
        self._parts: list[list[Tensor]] = []  # outputs of each replica, with their graphs
        self._joined: list[Tensor] = []  # outputs on device 0, without
        self._sizes: list[int] = []

    def copied_bytes(self) -> int:
        return sum(num_bytes([*each.model.parameters(), *each.model.buffers()]) for each in self._copies)

    def outputs(self, given: Any, num_rows: int) -> Any:
        nested = Nested(given)
        nested.refuse_uncuttable(num_rows, self._name)
        sizes = piece_sizes(num_rows, len(self.models))
        columns = [cut_rows(tensor, sizes) for tensor in nested.tensors]
        pieces = [list(row) for row in zip(*columns, strict=True)]
        has_backward = torch.is_grad_enabled()

        def run(number: int) -> tuple[Nested, int]:
            """In a thread, which shares neither the mode of autograd nor that of random numbers with this one."""
            drawing = self._streams.of(number) if has_backward else nullcontext()
            with torch.set_grad_enabled(has_backward), drawing:
                sent, piece = 0, pieces[number]
                if number > 0:
                    sent = self._copies[number - 1].refresh()
                    piece = [tensor.clone() for tensor in piece]
                found = Nested(self._compute(self.models[number], nested.around(piece)))
            found.refuse_unjoinable(sizes[number], self._name)
            return found, sent

        with self._streams.forward() if has_backward else nullcontext():
            results = self._in_lanes(run, len(sizes))
        parts = [found for found, _ in results]
        refuse_different_parts(parts, sizes, self._name)
        self._exchanges.count("scatter inputs", [num_bytes(piece) for piece in pieces[1:]])
        self._exchanges.count("broadcast parameters", [sent for _, sent in results[1:]])
        self._exchanges.count("gather outputs", [num_bytes(part.tensors) for part in parts[1:]])
        joined = [_join(same) for same in zip(*(part.tensors for part in parts), strict=True)]
        self._exchanges.output_bytes = max(self._exchanges.output_bytes, num_bytes(joined))
        if has_backward:
            self._parts, self._joined, self._sizes = [part.tensors for part in parts], joined, sizes
        return parts[0].around(joined)

    def backward(self) -> None:
        """Each replica's own backward, in its thread; one backward over all of them would run in one thread."""
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

        sent = self._in_lanes(run, len(sizes))
        self._exchanges.count("scatter output gradients", sent[1:])
        used = self._copies[: len(sizes) - 1]
        self._exchanges.count("reduce gradients", [each.give_gradients() for each in used])

    def reached(self) -> None:
        return None

    def in_each_thread(self, run: Callable[[], Any]) -> None:
        """For whoever watches: what is on in one thread is not on in others."""
        self._in_lanes(lambda number: run(), len(self._lanes))

    def _in_lanes(self, run: Callable[[int], Any], count: int) -> list[Any]:
        running = [self._lanes[number].start(run, number) for number in range(count)]
        errors = [future.exception() for future in running]  # all have ended before anyone is told
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in running]


class GpuReplicas:
    """`nn.DataParallel` on GPUs. Its exchanges are counted by the shapes that pass, its failures told as they were."""

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        devices: Sequence[torch.device],
        exchanges: Exchanges,
        settings: Settings,
    ) -> None:
        self._model, self._exchanges, self._name = model, exchanges, settings.name
        self._devices = [device.index for device in devices]
        self._computing = _Computing(model, compute, settings.name)
        self._parallel = _DataParallel(self._computing, self._devices, settings)
        self.notes: list[str] = []

    def outputs(self, given: Any, num_rows: int) -> Any:
        nested = Nested(given)
        nested.refuse_uncuttable(num_rows, self._name)
        sizes = piece_sizes(num_rows, len(self._devices))
        if torch.is_grad_enabled():
            self._seed_others()
        self._computing.begin(nested, sizes)
        try:
            joined = self._parallel(*nested.tensors)
        except Exception:
            # torch raises another in its place, with the text of the first and not its frames.
            for error in self._computing.errors:
                if error is not None:
                    raise error from None
            raise
        self._count(nested.tensors, joined, sizes)
        output = self._computing.found[0].around(joined)
        self._computing.begin(None, [])
        return output

    def _seed_others(self) -> None:
        """Device 0's random numbers are part of a checkpoint. Those of the others follow from the process's."""
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
        """Nothing is left: the graph goes through all replicas."""

    def reached(self) -> set[int] | None:
        """The reduction of `nn.DataParallel` gives zeros where there was no gradient. With one device there is none."""
        reached, self._parallel.reached = self._parallel.reached, set()
        return reached if len(self._devices) > 1 else None

    def copied_bytes(self) -> int:
        return 0  # a replica lives as long as its forward and backward


class _Computing(nn.Module):
    """What `nn.DataParallel` replicates: from tensors to tensors, so that any nest of them may go in and out."""

    def __init__(self, model: nn.Module, compute: Compute, name: str) -> None:
        super().__init__()
        self.model = model
        self.number = 0  # of a replica
        self._compute, self._name = compute, name
        self.begin(None, [])

    def begin(self, given: Nested | None, sizes: list[int]) -> None:
        """What is to be computed. Replicas share these, each with a place of its own."""
        self._given, self._sizes = given, sizes
        self.found = [Nested(None) for _ in sizes]
        self.errors: list[Exception | None] = [None for _ in sizes]

    def refuse_different_parts(self) -> None:
        refuse_different_parts(self.found, self._sizes, self._name)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        assert self._given is not None
        try:
            found = Nested(self._compute(self.model, self._given.around(tensors)))
            found.refuse_unjoinable(self._sizes[self.number], self._name)
        except Exception as error:
            self.errors[self.number] = error
            raise
        self.found[self.number] = found
        return tuple(found.tensors)


class _DataParallel(nn.DataParallel[_Computing]):
    """With replicas that know their number, and notice which parameters a gradient comes to."""

    def __init__(self, module: _Computing, device_ids: list[int], settings: Settings) -> None:
        super().__init__(module, device_ids=device_ids)
        self._settings = settings
        self.reached: set[int] = set()

    def replicate(self, module: _Computing, device_ids: Sequence[int | torch.device]) -> list[_Computing]:
        replicas = super().replicate(module, device_ids)
        for number, replica in enumerate(replicas):
            replica.number = number
            checkpoint_again(replica, self._settings.recomputes, self._settings.recomputing)
            for own, other in zip(module.modules(), replica.modules(), strict=True):
                if number > 0 and device_ids[number] == device_ids[0]:  # torch may give a replica there the same memory
                    other._buffers = {key: None if b is None else b.clone() for key, b in other._buffers.items()}
                for key, parameter in own._parameters.items():
                    if parameter is not None and getattr(other, key).requires_grad:
                        getattr(other, key).register_hook(self._note(id(parameter)))
        return replicas

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        self.module.refuse_different_parts()
        return super().gather(outputs, output_device)

    def _note(self, parameter: int) -> Callable[[Tensor | None], None]:
        def note(gradient: Tensor | None) -> None:
            if gradient is not None:
                self.reached.add(parameter)

        return note


class _Copy:
    """A copy of the model for one thread, and the exchanges between the two."""

    def __init__(self, model: nn.Module) -> None:
        try:
            self.model = copy.deepcopy(model)
        except Exception as error:
            raise ModelError(
                f"dp needs a copy of the model for each thread, and this one cannot be copied: {error} "
                "Use ddp, where each process builds its own."
            ) from error
        self._parameters = list(zip(model.parameters(), self.model.parameters(), strict=True))
        self._modules = [
            (own, other, [key for key, value in vars(own).items() if type(value) in (bool, int, float)])
            for own, other in zip(model.modules(), self.model.modules(), strict=True)
        ]

    @torch.no_grad()
    def refresh(self) -> int:
        """Become equal to the model; the bytes that it took."""
        originals: list[Tensor] = [own for own, _ in self._parameters]
        copies: list[Tensor] = [other for _, other in self._parameters]
        for own, other, plain in self._modules:
            vars(other).update({key: vars(own)[key] for key in plain if key in vars(own)})
            for key, buffer in own._buffers.items():  # which forward may have replaced
                other._buffers[key] = None if buffer is None else buffer.clone()
        torch._foreach_copy_(copies, originals)
        return num_bytes([*copies, *self.model.buffers()])

    def give_gradients(self) -> int:
        """Add this copy's gradients to the model's; their bytes."""
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
            torch._foreach_add_(sums, more)
        return count


class _Lane:
    """A thread that does one thing after another. It ends with the object; a process does not wait for it."""

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
    torch.set_num_threads(num_threads)  # of this thread's own operations
    while (task := tasks.get()) is not None:
        future, function, args = task
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)
        del task, future, function, args  # they hold a step's tensors


def _open_lanes(count: int) -> list[_Lane]:
    """Threads that share out those torch has for one operation."""
    own = torch.get_num_threads()
    lanes = [_Lane(number, max(1, own // count)) for number in range(count)]
    for future in [lane.start(int) for lane in lanes]:
        future.result()
    torch.set_num_threads(own)  # the last thread's number has become that of the process
    return lanes


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Outputs of replicas on device 0, where a graph of its own begins."""
    joined = torch.cat([part.detach() for part in parts]) if len(parts) > 1 else parts[0].detach()
    return joined.requires_grad_(any(part.requires_grad for part in parts))
