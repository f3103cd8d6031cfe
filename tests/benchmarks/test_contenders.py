"""The contenders of the speed benchmark do the same job, and a library that owns its loop stops between blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.cases import find_cases
from benchmarks.contenders import CONTENDERS, can_take, missing_package
from benchmarks.contenders.common import LOG_EVERY, Stopwatch
from benchmarks.contenders.loop_thread import LoopThread
from benchmarks.measure import Plan, measure

CPU = torch.device("cpu")


def started(read_loss: Callable[[int], float], num_reads: int = 100) -> tuple[LoopThread, list[int]]:
    """A library's loop that reads a loss `num_reads` times, and the reads it has begun."""
    thread, begun = LoopThread(CPU), []

    def loop() -> None:
        for read in range(num_reads):
            begun.append(read)
            thread.after_steps(read_loss(read))

    thread.start(loop)
    return thread, begun


def test_a_loop_takes_the_steps_of_a_block_and_waits() -> None:
    thread, begun = started(float)
    assert begun == []
    stopwatch = Stopwatch(CPU)
    assert thread.run(2 * LOG_EVERY, stopwatch) == 0.5
    assert stopwatch.seconds_per_step(LOG_EVERY, 2 * LOG_EVERY) > 0
    assert begun == [0, 1]
    assert thread.run(LOG_EVERY, Stopwatch(CPU)) == 2
    assert begun == [0, 1, 2]


def test_an_error_in_the_loop_is_raised_by_run() -> None:
    def fail_later(read: int) -> float:
        if read == 1:
            raise ArithmeticError("the loss is not a number")
        return 1.0

    thread, _ = started(fail_later)
    assert thread.run(LOG_EVERY, Stopwatch(CPU)) == 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed after step 0 of the block") as failed:
            thread.run(LOG_EVERY, Stopwatch(CPU))
        assert str(failed.value.__cause__) == "the loss is not a number"


def test_a_loop_that_ends_is_an_error() -> None:
    thread, _ = started(float, num_reads=1)
    with pytest.raises(RuntimeError, match=f"failed after step {LOG_EVERY} of the block") as failed:
        thread.run(2 * LOG_EVERY, Stopwatch(CPU))
    assert str(failed.value.__cause__) == "the loop ended by itself"


def test_a_loop_stops_only_where_the_loss_is_read() -> None:
    with pytest.raises(ValueError, match=f"every {LOG_EVERY} steps; not after 5"):
        LoopThread(CPU).run(5, Stopwatch(CPU))


@pytest.mark.parametrize("name", ["mlp", pytest.param("mlp-ddp2", marks=pytest.mark.slow)])
def test_all_contenders_learn_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # `measure` sets it for its ranks
    case = next(case for case in find_cases("cpu", [False]) if case.name == name)
    contenders = tuple(name for name in CONTENDERS if missing_package(name) is None and can_take(name, case))
    losses = measure(Plan(case, contenders, steps=300, repeats=1, threads=1)).mean_loss
    assert losses == pytest.approx(dict.fromkeys(contenders, losses["hand"]), rel=0.05)
