"""ps-async on a trainer's side: ask for an errand, pull, compute, push; until there is nothing more to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rung.batches import Batches
from rung.parallel.gradients import clip
from rung.runtime import async_server as there
from rung.runtime.mesh import MeshRuntime
from rung.runtime.office import TRAIN, Errand
from rung.runtime.parameter_server import Gradients
from rung.runtime.servers import on_host
from rung.windows import Window


class AsyncTrainer(MeshRuntime):
    """Computes whole steps with parameters of the servers'. It has no optimizer state and joins no collective."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        for group in self.optimizer.param_groups:
            group["params"] = []
        servers = range(self.world.layout.servers)
        places = self.spread.places
        self._parameters: list[list[nn.Parameter]] = [
            [p for name, p in self._trainable if places[name] == server] for server in servers
        ]
        self._buffers = [buffer for _, buffer in self.model.named_buffers()]
        self._gradients: list[Gradients] = []

    def work(self, batches: Batches, make_evaluation: Callable[[], Batches] | None) -> str:
        """Run errands until sent home. Returns the servers' last word: finished, or stopped."""
        calls, rank = self.world.calls, self.world.rank
        evaluation: Batches | None = None
        for server in range(self.world.layout.servers):
            calls.call(server, there.wait_for_opening)
        while True:
            self._status.phase("reading data")
            errand: Errand | str = calls.call(0, there.ask, rank)
            if isinstance(errand, str):
                with contextlib.suppress(RuntimeError):  # the server may be gone before its answer is here
                    calls.call(0, there.goodbye, rank)
                return errand
            self._pull(errand.version)
            if errand.kind == TRAIN:
                self._status.step(errand.number)
                (window,) = self.place([batches.window(errand.number)])
                self._compute(errand, window)
            else:
                assert make_evaluation is not None
                self._status.phase("evaluating")
                evaluation = evaluation or make_evaluation()
                calls.call(0, there.deliver, errand.ticket, self._measure(evaluation.window(errand.number)))

    def _compute(self, errand: Errand, window: Window) -> None:
        calls = self.world.calls
        result = self.step(window, want_norm=True)
        self._status.phase("update")
        # What the first server gets makes it count, so the others come before.
        left = [
            calls.start(server, there.leave, errand.ticket, gradients)
            for server, gradients in enumerate(self._gradients)
            if server > 0
        ]
        for answer in left:
            answer.wait()
        assert result.grad_norm is not None
        content = {
            "gradients": self._gradients[0],
            "buffers": [on_host(buffer) for buffer in self._buffers],
            "loss": on_host(result.loss_share),
            "norm": on_host(result.grad_norm),
        }
        calls.call(0, there.deliver, errand.ticket, content)  # too late, perhaps: then it was given to another

    def _update(self, want_norm: bool) -> Tensor | None:
        """Not here: the servers update. The gradient is clipped, since all of it is on this rank."""
        parameters = [p for _, p in self._trainable]
        norm = self._norm(parameters)
        if self.config.clip is not None:
            clip(parameters, self.config.clip, norm)
        self._gradients = [[None if p.grad is None else on_host(p.grad) for p in own] for own in self._parameters]
        for parameter in parameters:
            parameter.grad = None
        self.num_updates += 1
        return norm

    @torch.no_grad()
    def _pull(self, version: int) -> None:
        calls = self.world.calls
        answers = [calls.start(server, there.pull, version) for server in range(self.world.layout.servers)]
        for server, (own, answer) in enumerate(zip(self._parameters, answers, strict=True)):
            values = answer.wait()
            targets = [*own, *self._buffers] if server == 0 else own
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

    @torch.no_grad()
    def _measure(self, window: Window) -> dict[str, tuple[float, float]]:
        self.model.eval()
        (placed,) = self.place([window])
        sums: dict[str, tuple[float, float]] = {}
        with self._default_type():
            for measured in self._measure_window(placed):
                for name, (total, count) in measured.items():
                    known = sums.get(name, (0.0, 0.0))
                    sums[name] = known[0] + total.item(), known[1] + count.item()
        return sums
