"""ddp+ps: dense layers under DDP among the trainers, the task's `remote` modules on servers.

To a trainer a remote module is a call: what it is given goes to its server, and what comes back goes on. In backward
the gradient of that goes the same way. The server keeps the graph of each call and walks through it when all trainers
are done, in the order of trainers and calls, so that the sums do not depend on who was first. Then it updates, as the
trainers update their dense layers, and lets them go on.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rung.errors import ModelError, TaskError, nearest
from rung.nested import map_tensors, tensors_in
from rung.parallel.batchnorm import batch_norms
from rung.parallel.materialize import Weights
from rung.rpc import answers_later
from rung.runtime.base import Traffic
from rung.runtime.forward import autocast, default_type
from rung.runtime.mesh import MeshRuntime
from rung.runtime.servers import ServerRuntime, add_squares, collect_weights, num_bytes, on_host, place_by_size
from rung.task import Task
from rung.world import World

_Key = tuple[int, int]  # trainer, and the number of its call


def place_modules(model: nn.Module, task: Task, num_servers: int) -> dict[str, int]:
    """The server of each module that the task wants there."""
    known = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for pattern in task.remote_patterns():
        matching = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise TaskError(f"{task.name}: remote names {pattern!r}, which the model has not.{nearest(pattern, known)}")
        chosen += matching
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise TaskError(f"{task.name}: remote names both {outer!r} and {name!r}, which is a part of it. Keep one.")
        if batch_norms(model.get_submodule(name)):
            raise ModelError(
                f"{name} holds a batch norm, whose statistics are those of a whole batch; a server sees one trainer's "
                "part at a time. Name only parts without batch norm in remote."
            )
    sizes = {name: sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters()) for name in chosen}
    return place_by_size(sizes, num_servers)


def keep_own_modules(weights: Weights, world: World, task: Task) -> tuple[dict[str, int], dict[str, int]]:
    """Let this rank have storage for what is its own. Returns the servers of tensors, and those of modules."""
    model = weights.model
    assert model is not None
    modules = place_modules(model, task, world.layout.servers)
    home = {id(t): s for name, s in modules.items() for t in _tensors(model.get_submodule(name))}
    for owner_name, owner in model.named_modules():
        if not any(owner_name == name or owner_name.startswith(f"{name}.") for name in modules):
            for key, parameter in owner.named_parameters(recurse=False):
                if id(parameter) in home:
                    raise ModelError(
                        f"{owner_name}.{key} is also a parameter of a remote module; it cannot be in both places. "
                        "Make both remote, or neither."
                    )
    names = [*model.named_parameters(), *model.named_buffers()]
    places = {name: home[id(tensor)] for name, tensor in names if id(tensor) in home}
    if world.is_server:
        weights.keep_only(lambda name: places.get(name) == world.rank)
    else:
        weights.keep_only(lambda name: name not in places)
    return places, modules


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


# -- the server ------------------------------------------------------------------------------------------------------


class Desk:
    """Where the calls of trainers arrive at a server."""

    def __init__(self, runtime: RemoteServer) -> None:
        self._runtime, self._num_trainers = runtime, runtime.world.layout.num_data_ranks
        self._open: dict[_Key, list[Tensor]] = {}  # results whose gradients may come
        self._given: dict[_Key, list[Tensor | None]] = {}
        self._finished: list[Future[None]] = []
        self._changed = threading.Condition()
        self._modes = threading.Lock()

    def forward(self, path: str, key: _Key, training: bool, inputs: Any, wants: list[bool]) -> Any:
        """A module's result on a trainer's behalf. `wants`: which tensors of the inputs need a gradient; empty where
        the trainer evaluates, and nothing is kept."""
        runtime = self._runtime
        args, kwargs = map_tensors(inputs, lambda t: t.to(runtime.world.device))
        tensors = tensors_in((args, kwargs))
        wanted = [tensor.requires_grad_() for tensor, wants_it in zip(tensors, wants, strict=False) if wants_it]
        module = runtime.model.get_submodule(path)
        with self._modes:  # trainers go through the same phases, so this changes once and for all of them
            if module.training != training:
                module.train(training)
        with torch.set_grad_enabled(training), runtime.computing():
            result = module(*args, **kwargs)
        if training:
            with self._changed:
                self._open[key] = [*wanted, *(t for t in tensors_in(result) if t.is_floating_point())]
        return map_tensors(result, on_host)

    def backward(self, key: _Key, num_inputs: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """What a trainer's backward came to. Gradients of the inputs are computed now, those of parameters later."""
        with self._changed:
            self._given[key] = gradients
            inputs, results = self._open[key][:num_inputs], self._open[key][num_inputs:]
        if not inputs:
            return []
        pairs = [(r, g.to(r.device)) for r, g in zip(results, gradients, strict=True) if g is not None]
        found = torch.autograd.grad(
            [r for r, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )
        return [None if g is None else on_host(g) for g in found]

    def finish(self) -> Future[None]:
        """A trainer is done with this step. The future is done when this server is, too."""
        future: Future[None] = Future()
        with self._changed:
            self._finished.append(future)
            self._changed.notify()
        return future

    def collect(self) -> None:
        """Once all trainers are done: leave in each parameter the gradient of the global loss."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._finished) == self._num_trainers)
            opened, given = self._open, self._given
            self._open, self._given = {}, {}
        for key in sorted(given):
            gradients = given[key]
            results = opened[key][len(opened[key]) - len(gradients) :]
            # Trainers scale their losses up, because DDP averages what they reduce among themselves.
            pairs = [
                (r, g.to(r.device) / self._num_trainers)
                for r, g in zip(results, gradients, strict=True)
                if g is not None
            ]
            torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs], inputs=self._runtime.own_parameters())

    def let_go(self) -> None:
        with self._changed:
            futures, self._finished = self._finished, []
        for future in futures:
            future.set_result(None)


_desk: Desk | None = None  # of this process; calls find it here


def _at_desk() -> Desk:
    assert _desk is not None, "servers are built before trainers call"
    return _desk


def forward_there(path: str, key: _Key, training: bool, inputs: Any, wants: list[bool]) -> Any:
    return _at_desk().forward(path, key, training, inputs, wants)


def backward_there(key: _Key, num_inputs: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
    return _at_desk().backward(key, num_inputs, gradients)


@answers_later  # type: ignore[untyped-decorator]
def finish_there() -> Future[None]:
    return _at_desk().finish()


class RemoteServer(ServerRuntime):
    """Keeps some of the remote modules, with their optimizer state."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        global _desk
        self._desk = _desk = Desk(self)
        self.notes.append(self.world.calls.describe())
        self.world.barrier()  # no trainer may call before

    def own_parameters(self) -> list[nn.Parameter]:
        return self._own

    def computing(self) -> Any:
        return _Computing(self)

    def _collect(self) -> None:
        self._desk.collect()
        self._unused.check(set())

    def _answer(self) -> None:
        self._desk.let_go()


class _Computing:
    """The types that this run computes in, around a call on a thread of the RPC's."""

    def __init__(self, runtime: MeshRuntime) -> None:
        config = runtime.config
        self._contexts = [autocast(config, runtime.world.device)]
        if config.precision == "fp64":
            self._contexts.append(default_type(torch.float64))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


# -- the trainer -----------------------------------------------------------------------------------------------------


class _Through(torch.autograd.Function):
    """A call that autograd sees as one operation."""

    @staticmethod
    def forward(ctx: Any, remote: RemoteModule, inputs: Any, box: list[Any], anchor: Tensor, *tensors: Tensor) -> Any:
        ctx.remote, ctx.wants = remote, list(ctx.needs_input_grad[4:])
        ctx.key, result = remote.send(inputs, ctx.wants)
        ctx.set_materialize_grads(False)
        results = tensors_in(result)
        ctx.is_float = [t.is_floating_point() for t in results]
        box.append(result)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = [g for g, counts in zip(gradients, ctx.is_float, strict=True) if counts]
        found = iter(ctx.remote.send_back(ctx.key, sum(ctx.wants), given))
        return (None, None, None, None, *(next(found) if wanted else None for wanted in ctx.wants))


class RemoteModule:
    """Stands for the forward of a module that lives on a server."""

    def __init__(self, runtime: RemoteTrainer, path: str, server: int) -> None:
        self._runtime, self._path, self._server = runtime, path, server
        self._module = runtime.model.get_submodule(path)
        # Something that needs a gradient, or autograd would leave out a call that is given only numbers of rows.
        self._anchor = torch.zeros((), requires_grad=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (args, kwargs)
        if not (torch.is_grad_enabled() and self._module.training):
            return self.send(inputs, [])[1]
        box: list[Any] = []
        results = iter(_Through.apply(self, inputs, box, self._anchor, *tensors_in(inputs)))  # type: ignore[no-untyped-call]
        return map_tensors(box[0], lambda _: next(results))

    def send(self, inputs: Any, wants: list[bool]) -> tuple[_Key, Any]:
        return self._runtime.call_module(self._server, self._path, self._module.training, inputs, wants)

    def send_back(self, key: _Key, num_inputs: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        return self._runtime.call_backward(self._server, key, num_inputs, gradients)


class RemoteTrainer(MeshRuntime):
    """Dense layers under DDP; the others are calls."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self._number = 0
        self._pending: list[Future[Any]] = []
        self._traffic = {"lookups": Traffic(), "results": Traffic(), "gradients": Traffic()}
        for path, server in self.spread.remote.items():
            module: Any = self.model.get_submodule(path)
            module.forward = RemoteModule(self, path, server)
        self.world.barrier()  # the servers are ready

    def call_module(self, server: int, path: str, training: bool, inputs: Any, wants: list[bool]) -> tuple[_Key, Any]:
        self._number += 1
        key = self.world.data_rank, self._number
        sent = map_tensors(inputs, on_host)
        self._traffic["lookups"].add(num_bytes(tensors_in(sent)))
        with self._clock.waiting():
            result = self.world.calls.call(server, forward_there, path, key, training, sent, wants)
        self._traffic["results"].add(num_bytes(tensors_in(result)))
        return key, map_tensors(result, lambda t: t.to(self.world.device))

    def call_backward(
        self, server: int, key: _Key, num_inputs: int, gradients: list[Tensor | None]
    ) -> list[Tensor | None]:
        given = [None if g is None else on_host(g) for g in gradients]
        self._traffic["gradients"].add(num_bytes(given))
        answer = self.world.calls.start(server, backward_there, key, num_inputs, given)
        if not num_inputs:
            self._pending.append(answer)
            return []
        return [None if g is None else g.to(self.world.device) for g in answer.wait()]

    def _settle(self) -> None:
        super()._settle()
        with self._clock.waiting():
            for answer in self._pending:
                answer.wait()
        self._pending = []

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Dense layers are alike on all trainers: one of them counts."""
        own = super()._norm(parameters)
        return add_squares(own if self.world.data_rank == 0 else torch.zeros_like(own), self.world)

    def _update(self, want_norm: bool) -> Tensor | None:
        servers = range(self.world.layout.servers)
        done = [self.world.calls.start(server, finish_there) for server in servers]
        norm = super()._update(want_norm)
        with self._clock.waiting():
            for answer in done:
                answer.wait()
        return norm

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._share_buffers()
        return collect_weights(self.model, self.world, self.spread.places)

    def traffic(self) -> dict[str, Traffic]:
        return self._traffic
