"""Who counts as slow, from everybody's seconds; and that measuring them leaves torch as it was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from rung.runtime import phases
from rung.runtime.phases import PhaseClock
from rung.spec.strategy import parse
from rung.train.heartbeat import PHASES, Peers, Straggler

USUAL = (0.001, 0.013, 0.02, 0.004)  # seconds by phase


def peers(strategy: str, size: int) -> Peers:
    return Peers(parse(strategy, size, size), size)


def table(size: int, exchanges: int = 6) -> Any:
    return np.tile(np.array(USUAL), (exchanges, size, 1))


def test_nobody_is_slow_among_equals() -> None:
    noise = 1 + 0.2 * np.random.default_rng(0).standard_normal((6, 4, 4))
    assert peers("ddp", 4).compare(table(4) * noise) == []


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_slow_rank_is_named_with_its_phase(phase: str, size: int) -> None:
    seconds = table(size)
    seconds[:, 1, PHASES.index(phase)] += 0.048
    (found,) = peers("ddp", size).compare(seconds)
    own = USUAL[PHASES.index(phase)]
    assert (found.rank, found.phase) == (1, phase)
    assert (found.seconds, found.others_seconds) == pytest.approx((own + 0.048, own))


def test_the_words() -> None:
    assert str(Straggler(2, "forward", 0.0612, 0.0128)) == "rank 2 is slow: 61 ms in forward, the others take 13 ms"
    assert str(Straggler(0, "data", 0.0123, 0.00016)) == "rank 0 is slow: 12 ms in data, the others take 0.2 ms"


def test_a_short_delay_is_not_worth_a_word() -> None:
    seconds = table(3)
    seconds[:, 1, 0] += 0.003
    assert peers("ddp", 3).compare(seconds) == []


def test_what_hardly_counts_in_a_long_step_is_not_worth_a_word() -> None:
    seconds = table(3)
    seconds[:, :, 2] = 1.0
    seconds[:, 1, 0] += 0.02
    assert peers("ddp", 3).compare(seconds) == []


def test_a_delay_now_and_then_is_not_slowness() -> None:
    seconds = table(3)
    seconds[::2, 1, 1] += 0.5
    assert peers("ddp", 3).compare(seconds) == []


def test_too_few_figures_say_nothing() -> None:
    seconds = table(3, exchanges=3)
    seconds[:, 1, 1] += 0.5
    assert peers("ddp", 3).compare(seconds) == []
    assert peers("ddp", 3).compare(np.array([])) == []


def test_who_waits_in_one_phase_for_what_it_saves_in_another_is_not_slow() -> None:
    """A wait that nobody measures, on a GPU: the others wait in backward for the rank whose forward is long."""
    seconds = table(3)
    seconds[:, 1, 1] += 0.05
    seconds[:, [0, 2], 2] += 0.05
    assert peers("ddp", 3).compare(seconds) == []


def test_ranks_of_a_stage_are_compared_with_each_other() -> None:
    seconds = table(4)
    seconds[:, 2:, 1] += 0.05  # the second stage has more to do
    assert peers("pp2,ddp", 4).compare(seconds) == []
    seconds[:, 3, 1] += 0.06
    assert [(slow.rank, slow.phase) for slow in peers("pp2,ddp", 4).compare(seconds)] == [(3, "forward")]


def test_stages_of_one_rank_each_may_differ_more() -> None:
    seconds = table(2)
    seconds[:, 1, 1] *= 2.2
    assert peers("pp", 2).compare(seconds) == []
    seconds[:, 1, 1] *= 2
    assert [(slow.rank, slow.phase) for slow in peers("pp", 2).compare(seconds)] == [(1, "forward")]


def test_one_process_has_no_peers() -> None:
    assert peers("single", 1).compare(table(1)) == []


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_torch_is_as_it_was_after_a_step_and_after_an_error() -> None:
    before = dist.Work.wait, functional.wait_tensor
    clock = PhaseClock(waits=True, functional_waits=True)
    clock.every_step = True
    for _ in range(2):
        with clock.begin(0.5):
            assert dist.Work.wait is not before[0] and functional.wait_tensor is not before[1]
            clock.enter("forward")
        assert (dist.Work.wait, functional.wait_tensor) == before
    with pytest.raises(ValueError, match="boom"), clock.begin(0.0):
        raise ValueError("boom")
    assert (dist.Work.wait, functional.wait_tensor) == before


def test_of_quick_steps_one_in_eight_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.runtime.phases._QUICK_SECONDS", math.inf)
    before = dist.Work.wait
    clock = PhaseClock(waits=True, functional_waits=True)
    measured = []
    for _ in range(17):
        with clock.begin(0.5):
            measured.append(dist.Work.wait is not before)
            clock.enter("forward")
        assert clock.seconds().keys() >= {"data"} and ("forward" in clock.seconds()) == measured[-1]
    assert measured == [step % 8 == 0 for step in range(17)]
    monkeypatch.setattr("rung.runtime.phases._QUICK_SECONDS", 0.0)  # every step is a slow one
    with clock.begin(0.5):
        assert dist.Work.wait is not before


def test_a_single_process_exchanges_nothing() -> None:
    before = dist.Work.wait
    clock = PhaseClock(waits=False, functional_waits=True)
    with clock.begin(0.25):
        assert dist.Work.wait is before
        clock.enter("forward")
        clock.enter("backward")
        clock.enter("forward")
        clock.enter("update")
    seconds = clock.seconds()
    assert seconds["data"] == 0.25
    assert all(seconds[phase] > 0 for phase in ("forward", "backward", "update"))


def test_phases_outside_of_a_step_do_not_count() -> None:
    clock = PhaseClock(waits=False, functional_waits=False)
    with clock.begin(0.0):
        clock.enter("forward")
    before = clock.seconds()
    clock.enter("forward")  # a pipeline that evaluates
    clock.enter("backward")
    assert clock.seconds() == before


def test_the_end_of_backward_is_marked_before_what_others_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DDP does: it queues its wait when a gradient is there."""
    clock = PhaseClock(waits=True, functional_waits=False)
    weight = torch.ones(3, requires_grad=True)
    order: list[str] = []
    queue = phases.call_after_backward
    monkeypatch.setattr(phases, "call_after_backward", lambda mark: queue(lambda: (order.append("ours"), mark())))
    engine: Any = torch.autograd.Variable._execution_engine
    weight.register_hook(lambda grad: engine.queue_callback(lambda: order.append("theirs")))
    with clock.begin(0.0):
        clock.enter("backward")
        loss = (weight * 2).sum()
        clock.follow_backward(loss, reduces=True)
        loss.backward()
        clock.reduced()
    assert order == ["ours", "theirs"]


def test_two_ranks_slow_in_two_phases_are_both_named_where_all_waits_are_known() -> None:
    seconds = table(2)
    seconds[:, 0, PHASES.index("backward")] += 0.2
    seconds[:, 1, PHASES.index("data")] += 0.15
    found = Peers(parse("ddp", 2, 2), 2, on_host=True).compare(seconds)
    assert [(slow.rank, slow.phase) for slow in found] == [(0, "backward"), (1, "data")]
    for unsure in (Peers(parse("ddp", 2, 2), 2), Peers(parse("tp2", 2, 2), 2, on_host=True)):
        assert unsure.compare(seconds) == [], "each may have waited for the other"
