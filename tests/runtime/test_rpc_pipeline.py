"""The parts of a pipeline over RPC that need no other process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.errors import ConfigError
from rung.runtime.rpc_pipeline import StageEndpoint, StageLog, Update, _pass, _StageInput, _StageOutput
from rung.spec.compatibility import validate_config
from rung.spec.config import RunConfig
from rung.spec.strategy import parse


@pytest.mark.parametrize("giver_first", [True, False])
def test_giver_and_taker_meet_in_any_order_and_leave_nothing_behind(giver_first: bool) -> None:
    nobody: Any = None
    endpoint = StageEndpoint(nobody, nobody)
    message = [torch.ones(2)]
    if giver_first:
        endpoint.outgoing(7).set_result(message)
        future = endpoint.outgoing(7)
    else:
        future = endpoint.outgoing(7)
        assert not future.done()
        endpoint.outgoing(7).set_result(message)
    assert future.wait() is message
    assert not endpoint._outgoing


def test_backward_takes_micro_batches_in_reverse_whatever_comes_first() -> None:
    """The graph alone says so: here the losses are summed in the order that would be wrong."""
    stage_log, weight = StageLog(stage=1), torch.ones(3, requires_grad=True)
    token = torch.zeros((), requires_grad=True)
    losses = []
    for place in range(4):
        token, (x, mask) = _pass(
            _StageInput, stage_log, place, token, [torch.ones(3, requires_grad=True), torch.ones(3)]
        )
        assert x.requires_grad and not mask.requires_grad
        token, (loss,) = _pass(_StageOutput, stage_log, place, token, [(x * weight * mask).sum()])
        losses.append(loss)
    torch.autograd.backward(list(reversed(losses)))
    assert [(a.kind, a.stage, a.chunk) for a in stage_log.actions] == [("B", 1, chunk) for chunk in (3, 2, 1, 0)]
    assert weight.grad is not None and weight.grad.tolist() == [4, 4, 4]


def test_what_nothing_depends_on_is_answered_too() -> None:
    """Distributed autograd waits for an answer to everything that was sent: the arrival must be reached."""
    stage_log, received = StageLog(stage=0), torch.ones(3, requires_grad=True)
    answered = []
    token, (x,) = _pass(_StageInput, stage_log, 0, torch.zeros((), requires_grad=True), [received * 1])
    x.grad_fn.register_hook(lambda given, wanted: answered.append(True))
    token, (loss,) = _pass(_StageOutput, stage_log, 0, token, [torch.ones((), requires_grad=True) * 2])
    loss.backward()
    assert answered and received.grad is None


def test_an_update_takes_settled_gradients_and_keeps_its_error_for_the_loop() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    update = Update(torch.optim.SGD([parameter], lr=1.0))
    parameter.grad = torch.full((2,), 8.0)  # of the context, before it was clipped
    update.gradients = [(parameter, torch.full((2,), 0.5))]
    update.step()
    assert parameter.tolist() == [0.5, 0.5] and update.error is None

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("no")

    update = Update(Broken([parameter], lr=1.0))
    update.step()
    assert isinstance(update.error, ValueError)


def test_schedules_are_those_of_pp() -> None:
    layout = parse("rpc-pp", 2)
    validate_config(RunConfig(schedule="gpipe"), layout)
    with pytest.raises(ConfigError, match=r"all forwards, then all backwards\. For --schedule zb use pp2"):
        validate_config(RunConfig(schedule="zb"), layout)
    with pytest.raises(ConfigError, match="bf16"):
        validate_config(RunConfig(precision="fp16"), layout)
