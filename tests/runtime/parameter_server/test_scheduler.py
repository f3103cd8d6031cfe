"""Who computes which window under ps-async, how late a gradient can become, and where a lost trainer's work goes."""

from __future__ import annotations

import random

import pytest

from rung.runtime.parameter_server.scheduler import EVALUATE, TRAIN, NoTrainers, WorkItem, WorkResult, WorkScheduler


def scheduler(trainers: int = 3, staleness: int = 4, applied: int = 0) -> tuple[WorkScheduler, list[int]]:
    discarded: list[int] = []
    return WorkScheduler(
        list(range(trainers)), staleness=staleness, applied=applied, discard=discarded.append
    ), discarded


def asked(place: WorkScheduler, trainer: int) -> WorkItem | str | None:
    future = place.ask(trainer)
    return future.value() if future.done() else None


def test_windows_are_handed_out_in_order_and_up_to_the_limit() -> None:
    place, _ = scheduler(staleness=9, applied=5)
    assert asked(place, 0) is None, "nothing may be computed before the servers say how far"
    place.pause_dispatch()
    futures = {trainer: place.ask(trainer) for trainer in range(3)}
    deliver_first(place, futures, limit=7)
    assert [futures[t].value().number for t in (0, 1)] == [6, 7]
    assert not futures[2].done(), "the window after the limit stays"


def deliver_first(place: WorkScheduler, futures: dict[int, object], limit: int) -> None:
    """`take` waits for a delivery, so let one come before it returns."""
    import threading

    taken: list[WorkResult] = []
    thread = threading.Thread(target=lambda: taken.append(place.take(limit)))
    thread.start()
    while not futures[0].done():  # type: ignore[attr-defined]
        pass
    place.deliver(futures[0].value().ticket, "gradient")  # type: ignore[attr-defined]
    thread.join(5)
    assert taken[0].content == "gradient"


@pytest.mark.parametrize("staleness", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_no_gradient_is_later_than_the_bound_whatever_the_order(staleness: int, seed: int) -> None:
    """Trainers come back in any order, some die, and every window is applied once."""
    rng = random.Random(seed)
    place, _ = scheduler(trainers=4, staleness=staleness)
    place._limit = 60
    at: dict[int, WorkItem] = {}
    waiting = {t: place.ask(t) for t in range(4)}
    applied, late = [], []
    while len(applied) < 60:
        for trainer in [t for t, f in waiting.items() if f.done()]:
            at[trainer] = waiting.pop(trainer).value()
        if len(applied) == 30 and len(place.alive) == 4 and len(at) > 1:
            lost = rng.choice(sorted(at))
            place.remove_trainer(lost)
            del at[lost]
            continue
        assert at, "somebody always can go on"
        trainer = rng.choice(sorted(at))
        item = at.pop(trainer)
        assert place.deliver(item.ticket, None)
        delivery = place.take(60)
        applied.append(delivery.item.number)
        late.append(delivery.staleness)
        place.applied(delivery)
        waiting[trainer] = place.ask(trainer)
    assert sorted(applied) == list(range(1, 61))
    assert max(late) <= staleness
    assert place.is_consistent
    if staleness == 0:
        assert applied == list(range(1, 61))


def test_what_a_lost_trainer_was_at_goes_to_another_and_its_late_push_is_refused() -> None:
    place, discarded = scheduler()
    place._limit = 10
    first = asked(place, 0)
    assert isinstance(first, WorkItem) and (first.kind, first.number) == (TRAIN, 1)
    assert not place.is_consistent
    place.remove_trainer(0)
    second = asked(place, 1)
    assert isinstance(second, WorkItem) and second.number == 1 and second.ticket != first.ticket
    assert discarded == [first.ticket]
    assert not place.deliver(first.ticket, "too late")
    assert place.deliver(second.ticket, "in time")


def test_what_was_delivered_before_a_trainer_died_counts() -> None:
    place, discarded = scheduler()
    place._limit = 10
    item = asked(place, 0)
    assert isinstance(item, WorkItem)
    assert place.deliver(item.ticket, "gradient")
    place.remove_trainer(0)
    assert discarded == []
    assert place.take(10).content == "gradient"


def test_evaluations_are_handed_out_and_repeated_where_a_trainer_is_lost() -> None:
    import threading

    place, _ = scheduler(trainers=2)
    results: list[dict[int, object]] = []
    thread = threading.Thread(target=lambda: results.append(place.measure([1, 2])))
    waiting = [place.ask(0), place.ask(1)]
    thread.start()
    one, two = (future.wait() for future in waiting)
    assert {one.kind, two.kind} == {EVALUATE} and {one.number, two.number} == {1, 2}
    place.remove_trainer(0)
    place.deliver(two.ticket, "b")
    again = place.ask(1).wait()
    assert again.number == one.number
    place.deliver(again.ticket, "a")
    thread.join(5)
    assert results == [{one.number: "a", two.number: "b"}]


def test_without_a_trainer_nobody_waits_for_ever() -> None:
    place, _ = scheduler(trainers=1)
    place.remove_trainer(0)
    with pytest.raises(NoTrainers, match="none is left"):
        place.take(5)


def test_the_last_word_reaches_those_who_wait_and_those_who_come() -> None:
    place, _ = scheduler(trainers=2)
    waiting = place.ask(0)
    place.acknowledge_exit(0)
    place.acknowledge_exit(1)
    place.close("finished", 1.0)
    assert waiting.value() == "finished"
    assert asked(place, 1) == "finished"
