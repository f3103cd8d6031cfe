"""ddp+ps: dense layers under DDP among the trainers, the task's `remote` modules on servers.

On a trainer, the forward of a remote module is an RPC to its server, and so is its backward. The server keeps the graph
of each call and runs backward on it when all trainers have finished, in the order of trainers and calls, so that the
sums do not depend on timing. It then updates its modules, while the trainers update their dense layers, and releases
the trainers.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future

from rung.data.pytree import map_tensors, tensors_in
from rung.distributed.rpc import async_execution, served
from rung.distributed.world import World
from rung.errors import ModelError, TaskError, nearest
from rung.parallel.batchnorm import batch_norms
from rung.parallel.dropout import NoDropout
from rung.parallel.gradients import GradientFigures, global_norm, gradient_figures
from rung.parallel.materialize import Weights
from rung.runtime.base import Runtime, Traffic
from rung.runtime.context import RuntimeContext
from rung.runtime.mesh import mesh_parts
from rung.runtime.parameter_server.base import ServerRuntime, num_bytes, on_host, place_by_size, trainer_weights
from rung.runtime.step import StepParts, StepRuntime
from rung.runtime.update import OptimizerUpdate, norm_over_ranks
from rung.spec.task import Task

_Key = tuple[int, int]  # trainer, and the number of its call


def place_modules(model: nn.Module, task: Task, num_servers: int) -> dict[str, int]:
    """The server of each module that the task's `remote` patterns name."""
    known = [name for name, _ in model.named_modules() if name]
    chosen: list[str] = []
    for pattern in task.remote_patterns():
        matching = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise TaskError(f"{task.name}: remote names {pattern!r}, no module of the model.{nearest(pattern, known)}")
        chosen += matching
    for name in chosen:
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise TaskError(f"{task.name}: remote names both {outer!r} and {name!r}, which is a part of it. Keep one.")
        if batch_norms(model.get_submodule(name)):
            raise ModelError(
                f"{name} holds a batch norm, which needs the statistics of a whole batch; a server sees one trainer's "
                "part at a time. Name only modules without batch norm in remote."
            )
    sizes = {name: sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters()) for name in chosen}
    return place_by_size(sizes, num_servers)


def build(context: RuntimeContext) -> Runtime:
    return (
        module_server(context) if context.world.role.is_server else StepRuntime(context, module_trainer_parts(context))
    )


def place(weights: Weights, world: World, task: Task) -> tuple[dict[str, int], dict[str, int]]:
    """Keep storage for this rank's own tensors. Returns the servers of tensors, and those of modules."""
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
    if world.role.is_server:
        weights.keep_only(lambda name: places.get(name) == world.rank)
    else:
        weights.keep_only(lambda name: name not in places)
    return places, modules


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


# -- the server ------------------------------------------------------------------------------------------------------


class ModuleEndpoint:
    """Handles the trainers' calls to a server."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context, self._num_trainers = context, context.world.layout.num_data_ranks
        self._open: dict[_Key, list[Tensor]] = {}  # inputs that need a gradient, then results
        self._gradients: dict[_Key, list[Tensor | None]] = {}  # of the results
        self._finished: list[Future[None]] = []
        self._changed = threading.Condition()
        self._modes = threading.Lock()

    def forward(self, path: str, key: _Key, training: bool, drops: bool, inputs: Any, wants: list[bool]) -> Any:
        """A module's result for a trainer. `drops`: with dropout. `wants`: which tensors of the inputs need a gradient;
        empty in evaluation, which keeps no graph."""
        context = self._context
        args, kwargs = map_tensors(inputs, lambda t: t.to(context.world.device))
        tensors = tensors_in((args, kwargs))
        wanted = [tensor.requires_grad_() for tensor, wants_it in zip(tensors, wants, strict=False) if wants_it]
        module = context.model.get_submodule(path)
        with self._modes:  # trainers change mode in step, so the first call of a phase switches it for all
            if module.training != training:
                module.train(training)
        # RPC threads do not inherit the thread-local modes of the loop.
        dropout = context.without_dropout() if drops else NoDropout()
        with torch.set_grad_enabled(training), context.autocast(), context.default_type(), dropout:
            result = module(*args, **kwargs)
        if training:
            with self._changed:
                self._open[key] = [*wanted, *(t for t in tensors_in(result) if t.is_floating_point())]
        return map_tensors(result, on_host)

    def backward(self, key: _Key, num_inputs: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Take the gradients of a call's results, return those of its inputs. `collect` computes the parameters'."""
        with self._changed:
            self._gradients[key] = gradients
            inputs, results = self._open[key][:num_inputs], self._open[key][num_inputs:]
        if not inputs:
            return []
        pairs = _with_gradients(results, gradients)
        found = torch.autograd.grad(
            [r for r, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True, allow_unused=True
        )  # `collect` runs backward on the same graph again
        return [None if g is None else on_host(g) for g in found]

    def finish(self) -> Future[None]:
        """Note that a trainer has finished its step. The future resolves after this server's update."""
        future: Future[None] = Future()
        with self._changed:
            self._finished.append(future)
            self._changed.notify()
        return future

    def collect(self, parameters: list[nn.Parameter]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: len(self._finished) == self._num_trainers)
            calls, gradients_of = self._open, self._gradients
            self._open, self._gradients = {}, {}
        for key in sorted(gradients_of):
            gradients = gradients_of[key]
            results = calls[key][len(calls[key]) - len(gradients) :]
            # Trainers scale their losses by their number, because DDP averages the dense gradients.
            pairs = [(r, g / self._num_trainers) for r, g in _with_gradients(results, gradients)]
            if pairs and parameters:  # else all of the server's modules are frozen
                torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs], inputs=parameters)
        self._context.unused.check(set())

    def answer(self, parameters: list[nn.Parameter]) -> None:
        with self._changed:
            futures, self._finished = self._finished, []
        for future in futures:
            future.set_result(None)

    def share(self, parameters: list[nn.Parameter]) -> None:
        self._context.world.barrier()  # trainers call the modules here


def _with_gradients(results: list[Tensor], gradients: list[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The results through which something is trained, with their gradients."""
    pairs = zip(results, gradients, strict=True)
    return [(r, g.to(r.device)) for r, g in pairs if g is not None and r.requires_grad]


def _endpoint() -> ModuleEndpoint:
    endpoint: ModuleEndpoint = served("ddp+ps")
    return endpoint


def forward_there(path: str, key: _Key, training: bool, drops: bool, inputs: Any, wants: list[bool]) -> Any:
    return _endpoint().forward(path, key, training, drops, inputs, wants)


def backward_there(key: _Key, num_inputs: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
    return _endpoint().backward(key, num_inputs, gradients)


@async_execution  # type: ignore[untyped-decorator]
def finish_there() -> Future[None]:
    return _endpoint().finish()


def module_server(context: RuntimeContext) -> ServerRuntime:
    """Holds some of the remote modules, with their optimizer state."""
    endpoint = ModuleEndpoint(context)
    context.world.calls.serve("ddp+ps", endpoint)
    return ServerRuntime(context, endpoint)


# -- the trainer -----------------------------------------------------------------------------------------------------


class _RemoteCall(torch.autograd.Function):
    """The remote forward and backward as one autograd operation."""

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
    """Replaces the forward of a module whose parameters are on a server."""

    def __init__(self, calls: ModuleCalls, module: nn.Module, path: str, server: int) -> None:
        self._calls, self._module, self._path, self._server = calls, module, path, server
        # An input that requires a gradient: without one, autograd would skip calls with integer inputs only (lookups).
        self._anchor = torch.zeros((), requires_grad=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = (args, kwargs)
        if not (torch.is_grad_enabled() and self._module.training):
            return self.send(inputs, [])[1]
        box: list[Any] = []
        results = iter(_RemoteCall.apply(self, inputs, box, self._anchor, *tensors_in(inputs)))  # type: ignore[no-untyped-call]
        return map_tensors(box[0], lambda _: next(results))

    def send(self, inputs: Any, wants: list[bool]) -> tuple[_Key, Any]:
        return self._calls.call_module(self._server, self._path, self._module.training, inputs, wants)

    def send_back(self, key: _Key, num_inputs: int, gradients: list[Tensor | None]) -> list[Tensor | None]:
        return self._calls.call_backward(self._server, key, num_inputs, gradients)


class ModuleCalls:
    """The calls of one trainer to its remote modules."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context, self._world = context, context.world
        self._number = 0
        self._pending: list[Future[Any]] = []
        self.traffic = {"lookups": Traffic(), "results": Traffic(), "gradients": Traffic()}
        for path, server in context.parallel.remote.items():
            module: Any = context.model.get_submodule(path)
            module.forward = RemoteModule(self, module, path, server)

    def call_module(self, server: int, path: str, training: bool, inputs: Any, wants: list[bool]) -> tuple[_Key, Any]:
        self._number += 1
        key = self._world.role.data_rank, self._number
        sent = map_tensors(inputs, on_host)
        self.traffic["lookups"].add(num_bytes(tensors_in(sent)))
        with self._context.clock.waiting():
            drops = not self._context.is_probing
            result = self._world.calls.call(server, forward_there, path, key, training, drops, sent, wants)
        self.traffic["results"].add(num_bytes(tensors_in(result)))
        return key, map_tensors(result, lambda t: t.to(self._world.device))

    def call_backward(
        self, server: int, key: _Key, num_inputs: int, gradients: list[Tensor | None]
    ) -> list[Tensor | None]:
        given = [None if g is None else on_host(g) for g in gradients]
        self.traffic["gradients"].add(num_bytes(given))
        answer = self._world.calls.start(server, backward_there, key, num_inputs, given)
        if not num_inputs:
            self._pending.append(answer)  # nothing to wait for now: see `wait_for_backward`
            return []
        return [None if g is None else g.to(self._world.device) for g in answer.wait()]

    def wait_for_backward(self) -> None:
        with self._context.clock.waiting():
            for answer in self._pending:
                answer.wait()
        self._pending = []


class FinishStep:
    """Updates the dense layers here while the servers update the remote modules."""

    def __init__(self, context: RuntimeContext) -> None:
        self._context = context
        self._update = OptimizerUpdate(context, norm=self._norm)

    def __call__(self, want_norm: bool) -> Tensor | None:
        world = self._context.world
        done = [world.calls.start(server, finish_there) for server in range(world.layout.servers)]
        norm = self._update(want_norm)
        with self._context.clock.waiting():
            for answer in done:
                answer.wait()
        return norm

    def finish_probe(self) -> GradientFigures:
        """Let the servers compute the gradients of the remote modules; here are those of the dense layers."""
        world = self._context.world
        for done in [world.calls.start(server, finish_there) for server in range(world.layout.servers)]:
            done.wait()
        return gradient_figures(self._context.trainable, world.device)

    def _norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Dense layers are equal on all trainers: only the first adds theirs."""
        own, world = global_norm(parameters), self._context.world
        return norm_over_ranks(own if world.role.data_rank == 0 else torch.zeros_like(own), world)


def module_trainer_parts(context: RuntimeContext) -> StepParts:
    """DDP for the dense layers, RPC for the remote modules."""
    parts = mesh_parts(context)
    calls = ModuleCalls(context)
    parts.update = finish = FinishStep(context)
    parts.gradient_figures, parts.share_weights = finish.finish_probe, context.world.barrier
    parts.finalizers.append(calls.wait_for_backward)
    parts.named_weights = partial(trainer_weights, context)
    parts.traffic = lambda: calls.traffic
    context.world.barrier()  # until the servers' endpoints are registered
    return parts
