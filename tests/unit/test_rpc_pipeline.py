"""The parts of a pipeline over RPC that need no other process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rung.agreement import refuse_contradictions
from rung.config import RunConfig
from rung.errors import ConfigError
from rung.runtime.rpc_pipeline import Journal, Station, Update, _Arrival, _Departure, _pass
from rung.strategy import parse


@pytest.mark.parametrize("giver_first", [True, False])
def test_giver_and_taker_meet_in_any_order_and_leave_nothing_behind(giver_first: bool) -> None:
    nobody: Any = None
    station = Station(nobody, nobody)
    handed_on = [torch.ones(2)]
    if giver_first:
        station.handed_on(7).set_result(handed_on)
        future = station.handed_on(7)
    else:
        future = station.handed_on(7)
        assert not future.done()
        station.handed_on(7).set_result(handed_on)
    assert future.wait() is handed_on
    assert not station._handed_on


def test_backward_takes_micro_batches_in_reverse_whatever_comes_first() -> None:
    """The graph alone says so: here the losses are summed in the order that would be wrong."""
    journal, weight = Journal(stage=1), torch.ones(3, requires_grad=True)
    token = torch.zeros((), requires_grad=True)
    losses = []
    for place in range(4):
        token, (x, mask) = _pass(_Arrival, journal, place, token, [torch.ones(3, requires_grad=True), torch.ones(3)])
        assert x.requires_grad and not mask.requires_grad
        token, (loss,) = _pass(_Departure, journal, place, token, [(x * weight * mask).sum()])
        losses.append(loss)
    torch.autograd.backward(list(reversed(losses)))
    assert [(a.kind, a.stage, a.chunk) for a in journal.actions] == [("B", 1, chunk) for chunk in (3, 2, 1, 0)]
    assert weight.grad is not None and weight.grad.tolist() == [4, 4, 4]


def test_what_nothing_depends_on_is_answered_too() -> None:
    """Distributed autograd waits for an answer to everything that was sent: the arrival must be reached."""
    journal, received = Journal(stage=0), torch.ones(3, requires_grad=True)
    answered = []
    token, (x,) = _pass(_Arrival, journal, 0, torch.zeros((), requires_grad=True), [received * 1])
    x.grad_fn.register_hook(lambda given, wanted: answered.append(True))
    token, (loss,) = _pass(_Departure, journal, 0, token, [torch.ones((), requires_grad=True) * 2])
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
    refuse_contradictions(RunConfig(schedule="gpipe"), layout)
    with pytest.raises(ConfigError, match=r"all forwards, then all backwards\. For --schedule zb use pp2"):
        refuse_contradictions(RunConfig(schedule="zb"), layout)
    with pytest.raises(ConfigError, match="bf16"):
        refuse_contradictions(RunConfig(precision="fp16"), layout)
