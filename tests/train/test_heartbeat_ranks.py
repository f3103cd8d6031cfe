"""All ranks agree to stop in the same call, whoever was asked and when; and all know who is slow."""

from __future__ import annotations

import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rung.train.heartbeat
from rung.distributed.status_board import StatusBoard, StatusWriter
from rung.distributed.world import open_fake_world, open_world
from rung.spec.strategy import parse
from rung.train.heartbeat import Heartbeat
from tests.harness import on_ranks
from tests.marks import slow

LAG = 66  # calls from a request to the agreement, at most: as many as lie between two exchanges, and one to look


def beat_until_stopped(jobs: list[dict[str, Any]], folder: str) -> list[list[int | None]]:
    """The number of the call that said stop, and of the one before which this rank was asked; of each job."""
    outcomes: list[list[int | None]] = []
    size = jobs[0]["size"]
    with open_world(parse("ddp", size, size), device="cpu") as world:
        for number, job in enumerate(jobs):
            world.barrier()
            board = StatusBoard(Path(folder) / f"board-{number}", size)
            status = board.writer(world.rank)
            heartbeat = Heartbeat(world, status)
            shared, own = random.Random(number), random.Random(number * 100 + world.rank)
            asked, stopped = None, None
            for call in range(job["calls"]):
                time.sleep(own.uniform(job["least"], job["most"]))
                if (world.rank, call) in job["asked"]:
                    asked = call
                    status.ask_to_stop()
                if (world.rank, call) in job["requested"]:
                    asked = call
                    board.request("stop")
                checks = shared.random() < job["checks"]
                if heartbeat.check() if checks else heartbeat.after_step(call, {"forward": 0.001}):
                    stopped = call
                    break
            heartbeat.settle()
            outcomes.append([stopped, asked])
    return outcomes


@dataclass(frozen=True)
class Pace:
    calls: int
    least: float  # seconds between two calls
    most: float


QUICK, MIDDLING, SLOW = Pace(300, 0.0, 0.0), Pace(60, 0.0, 0.02), Pace(7, 0.5, 0.55)


def job(
    size: int,
    pace: Pace,
    checks: float,
    *,
    asked: list[tuple[int, int]] | None = None,
    requested: list[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """`asked` and `requested` are (rank, call): the rank is asked by a signal, or the launcher asks all of them."""
    return {"size": size, "checks": checks, "asked": asked or [], "requested": requested or [], **asdict(pace)}


@pytest.mark.parametrize("size", [slow(2), 3])
def test_all_ranks_stop_in_the_same_call(tmp_path: Path, size: int) -> None:
    everyone = [(rank, 4) for rank in range(size)]
    asked: list[list[tuple[int, int]]] = [[], [(0, 0)], [(size - 1, 5)], [(1, 7), (0, 9)], everyone]
    jobs = []
    for pace in (QUICK, MIDDLING):
        for checks in (0.0, 0.3):
            jobs += [job(size, pace, checks, asked=who) for who in asked]
            jobs.append(job(size, pace, checks, requested=[(1, 6)]))
            jobs.append(job(size, pace, checks, asked=[(1, pace.calls - 1)]))
    jobs.append(job(size, QUICK, 1.0, asked=[(1, 5)]))
    jobs += [job(size, SLOW, 0.3, asked=[(1, 3), (0, 4)]), job(size, SLOW, 0.0, requested=[(1, 2)])]
    for number in range(len(jobs)):
        StatusBoard(tmp_path / f"board-{number}", size, create=True)
    outcomes = on_ranks(beat_until_stopped, size, jobs, str(tmp_path))
    for number, told in enumerate(jobs):
        stopped = {rank[number][0] for rank in outcomes}
        assert len(stopped) == 1, (told, outcomes)
        when = stopped.pop()
        moments = [call for _, call in told["asked"] + told["requested"]]
        if not moments:
            assert when is None, told
        elif when is None:
            assert min(moments) + LAG > told["calls"], (told, outcomes)
        else:
            assert min(moments) <= when <= min(moments) + LAG, told
            if told["least"] >= 0.5 and told["asked"]:
                assert when == min(moments), "with long steps the answer is waited for"


def tell_seconds(size: int, strategy: str, slow_rank: int) -> list[Any]:
    lines: list[str] = []
    with open_world(parse(strategy, size, size), device="cpu") as world:
        # An exchange in each step, and a look at it.
        rung.train.heartbeat._EXCHANGE_SECONDS, rung.train.heartbeat._REPORT_SECONDS = 0.0, 0.0
        heartbeat = Heartbeat(world, StatusWriter())
        for step in range(1, 41):
            late = world.rank == slow_rank and 10 <= step < 25
            time.sleep(0.005)
            heartbeat.after_step(step, {"forward": 0.061 if late else 0.013, "backward": 0.02, "data": 0.001})
            lines += heartbeat.slow_lines()
            if step == 20:
                found = heartbeat.slow()
        after = heartbeat.slow()
        heartbeat.settle()
        return [lines, found, after, heartbeat.seconds()]


def test_every_rank_knows_who_is_slow_and_the_main_one_says_it_once() -> None:
    outcomes = on_ranks(tell_seconds, 3, 3, "ddp", 2)
    assert outcomes[0][0] == ["rank 2 is slow: 61 ms in forward, the others take 13 ms"]
    assert outcomes[1][0] == outcomes[2][0] == []
    for _, found, after, seconds in outcomes:
        assert [(slow.rank, slow.phase) for slow in found] == [(2, "forward")]
        assert after == []
        assert len(seconds) == 3
        assert seconds[0]["backward"] == pytest.approx(0.02)


def settle_early(size: int) -> list[bool]:
    with open_world(parse("ddp", size, size), device="cpu") as world:
        rung.train.heartbeat._EXCHANGE_SECONDS = 0.0  # an exchange in each step, not waited for
        status = StatusWriter()
        heartbeat = Heartbeat(world, status)
        heartbeat.after_step(1, {})
        if world.rank == 1:
            status.ask_to_stop()
            time.sleep(0.1)
        found = [heartbeat.after_step(2, {})]
        assert heartbeat._exchange is not None
        found.append(heartbeat._exchange.pending)
        heartbeat.settle()
        found += [heartbeat._exchange.pending, heartbeat.after_step(3, {})]
        heartbeat.settle()
        return found


def test_an_exchange_that_is_settled_early_counts() -> None:
    """As before torch's profiler starts or stops. The ranks still decide in the same call."""
    assert on_ranks(settle_early, 2, 2) == [[False, True, False, True]] * 2


def test_one_process_listens_to_its_own_signal_alone() -> None:
    with open_world(parse("single", 1, 1), device="cpu") as world:
        status = StatusWriter()
        heartbeat = Heartbeat(world, status)
        assert not heartbeat.check() and not heartbeat.after_step(1, {"forward": 1.0})
        status.ask_to_stop()
        assert heartbeat.after_step(2, {"forward": 1.0}) and heartbeat.check()
        assert heartbeat.slow() == [] and heartbeat.slow_lines() == []
        heartbeat.settle()


def test_a_dry_run_sends_no_heartbeat() -> None:
    with open_fake_world(parse("ddp", 8, 8), rank=3) as world:
        status = StatusWriter()
        heartbeat = Heartbeat(world, status)
        status.ask_to_stop()
        assert not heartbeat.after_step(1, {}) and not heartbeat.check()
        assert heartbeat.slow_lines() == []
        heartbeat.settle()
    assert not dist.is_initialized()
