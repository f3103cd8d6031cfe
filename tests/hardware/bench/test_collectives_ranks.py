"""Collectives measured on real ranks: right where the backend is right, red where it is not, never a silent hole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rung.cli.main import main
from rung.hardware.bench import collectives
from rung.hardware.bench.collectives import Case, SweepPlan, measure
from rung.hardware.bench.exchanges import EXCHANGES
from rung.hardware.bench.sweep import run_on_ranks
from rung.hardware.collective_records import OPS, REDUCING, CollectiveRecord, read_sweep
from rung.launch.spawn import RankFailedError, on_ranks
from tests.marks import slow

DTYPES = ("float32", "float64", "int64", "bfloat16", "uint8", "bool")
RUNG = [sys.executable, "-m", "rung"]


def plan(*cases: Case, **changed: Any) -> SweepPlan:
    return SweepPlan(cases, "gloo", "cpu", seconds=1e-4, timeout_seconds=30, **changed)


def every_case(dtypes: tuple[str, ...], *sizes: int) -> list[Case]:
    ops = [op for op in OPS if op != "barrier"]
    return [Case(op, dtype, size) for op in ops for dtype in dtypes for size in sizes] + [Case("barrier", "", 0)]


@pytest.mark.parametrize("ranks", [2, slow(3)])
def test_every_collective_and_type_is_right(ranks: int) -> None:
    cases = every_case(DTYPES, 1001)  # three ranks share none of it evenly, and 8 bytes do not divide it
    found = on_ranks(measure, ranks, plan(*cases), timeout=60)
    records = found[0].records
    assert [(record.op, record.dtype) for record in records] == [case.kind for case in cases]
    assert {record.state for record in records} == {"ok"}, [r for r in records if r.state != "ok"]
    assert all(found[0].records == other.records for other in found[1:])
    first = records[0]
    assert (first.backend, first.device, first.ranks, first.hosts) == ("gloo", "cpu", ranks, 1)
    assert first.runs >= 3
    assert first.seconds is not None and first.seconds >= (first.fastest_seconds or 0) > 0
    # Parts are equal, so the whole may be smaller than what was asked for.
    gathered = next(record for record in records if record.op == "all_gather" and record.dtype == "float32")
    assert gathered.bytes == 250 // ranks * ranks * 4
    assert records[-1].op == "barrier" and records[-1].bytes == 0


def test_what_gloo_cannot_do_is_named() -> None:
    cases = [Case("all_reduce", "float8_e4m3fn", 512), Case("send_recv", "float8_e4m3fn", 512)]
    cases += [Case("gather", "int16", 512), Case("all_reduce", "float32", 2**40), Case("broadcast", "float32", 512)]
    records = on_ranks(measure, 2, plan(*cases))[0].records
    states = [record.state for record in records]
    assert states == ["not supported", "ok", "not supported", "not supported", "ok"]
    assert "does not know this type" in records[0].why
    assert "needs up to 8 TiB of memory" in records[3].why
    (record,) = on_ranks(measure, 2, plan(Case("all_reduce", "int64", 512), reduction="avg"))[0].records
    assert (record.state, record.reduction) == ("not supported", "avg")
    assert "no mean of integers" in record.why


@pytest.mark.parametrize("reduction", ["avg", slow("min"), "max"])
def test_other_reductions_are_right(reduction: str) -> None:
    cases = [Case(op, dtype, 1001) for op in REDUCING for dtype in ("float32", "bfloat16")]
    records = on_ranks(measure, 3, plan(*cases, reduction=reduction))[0].records
    assert {record.state for record in records} == {"ok"}, records


# -- collectives that are broken on purpose --------------------------------------------------------------------------


def forgets_the_end(op: str) -> None:
    """All but the last element."""
    real = getattr(dist, op)
    setattr(dist, op, lambda tensor, *args, **kwargs: real(tensor[:-1], *args, **kwargs))


def does_nothing(op: str) -> None:
    setattr(dist, op, lambda *args, **kwargs: None)


def swaps_parts(op: str) -> None:
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else op
    real = getattr(dist, name)

    def swapped(target: torch.Tensor, source: torch.Tensor) -> None:
        real(target, source)
        target.copy_(target.roll(source.numel()))

    setattr(dist, name, swapped)


def repeats_itself(op: str) -> None:
    """The first result again and again."""
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else op
    real, kept = getattr(dist, name), []

    def stale(target: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> None:
        real(target, source, **kwargs)
        kept.append(target.clone())
        target.copy_(kept[0])

    setattr(dist, name, stale)


def is_wrong_on_one_rank(op: str) -> None:
    real = getattr(dist, op)

    def spoilt(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        real(tensor, *args, **kwargs)
        if dist.get_rank() == 1:
            tensor[tensor.numel() // 2] += 1

    setattr(dist, op, spoilt)


def measure_broken(breaking: Callable[[str], None], broken: str, to_measure: SweepPlan) -> Any:
    breaking(broken)
    return measure(to_measure)


@pytest.mark.parametrize(
    ("breaking", "broken", "op", "told"),
    [
        (forgets_the_end, "all_reduce", "all_reduce", "rank 0 has 1 wrong elements"),
        (is_wrong_on_one_rank, "all_reduce", "all_reduce", "rank 1 has 1 wrong elements"),
        (does_nothing, "broadcast", "broadcast", "rank 1 has 64 wrong"),
        (does_nothing, "reduce", "reduce", "rank 0 has"),
        (swaps_parts, "all_gather_into_tensor", "all_gather", "rank 0 has"),
        (repeats_itself, "reduce_scatter_tensor", "reduce_scatter", "rank 0 has"),
        (does_nothing, "all_to_all_single", "all_to_all", "rank 0 has 64 wrong"),
    ],
)
def test_a_broken_collective_turns_red(breaking: Callable[[str], None], broken: str, op: str, told: str) -> None:
    cases = [Case(op, "float32", 256), Case("gather", "float32", 256)]
    records = on_ranks(measure_broken, 2, breaking, broken, plan(*cases))[0].records
    assert [record.state for record in records] == ["wrong", "ok"]
    assert told in records[0].why
    assert records[0].seconds is None


def measure_without_broadcast(to_measure: SweepPlan, tell: Callable[[Any], None]) -> Any:
    does_nothing("broadcast")
    return measure(to_measure, tell)


class _Open(EXCHANGES["barrier"]):  # type: ignore[misc]
    """A barrier that lets everybody through."""

    def run(self) -> None:
        pass


def measure_open_barrier(to_measure: SweepPlan) -> Any:
    collectives.EXCHANGES["barrier"] = _Open
    return measure(to_measure)


def test_a_barrier_that_does_not_wait_turns_red() -> None:
    (record,) = on_ranks(measure_open_barrier, 2, plan(Case("barrier", "", 0)))[0].records
    assert record.state == "wrong"
    assert record.why.endswith("did not wait for a late one")


def measure_until_it_dies(to_measure: SweepPlan, tell: Callable[[Any], None]) -> Any:
    class Deadly(EXCHANGES["broadcast"]):  # type: ignore[misc]
        def run(self) -> None:
            if self.rank == 1 and self._dtype in (torch.int64, torch.int32):
                os.kill(os.getpid(), signal.SIGABRT)
            super().run()

    collectives.EXCHANGES["broadcast"] = Deadly
    return measure(to_measure, tell)


def test_a_call_that_ends_a_process_is_a_row_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.hardware.bench.sweep.measure", measure_until_it_dies)
    cases = [Case("broadcast", dtype, size) for dtype in ("float32", "int64", "int32", "uint8") for size in (64, 256)]
    heard: list[CollectiveRecord] = []
    sweep = run_on_ranks(plan(*cases), 2, lambda told: heard.append(told))
    assert [record.state for record in sweep.records] == ["ok"] * 2 + ["failed"] * 4 + ["ok"] * 2
    assert "rank 1 was ended by SIGABRT" in sweep.records[2].why or "closed" in sweep.records[2].why
    assert [record.bytes for record in sweep.records] == [64, 256] * 4
    assert sweep.environment["ranks"] == 2
    assert heard.count(sweep.records[-1]) == 1


# -- the command and the crew ----------------------------------------------------------------------------------------


def test_the_command_leaves_a_table_a_chart_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tests have a fork server of their own.
    monkeypatch.setattr("rung.hardware.machines.start_fork_server", lambda modules: None)
    monkeypatch.chdir(tmp_path)
    flags = ["--nproc", "2", "--ops", "all_reduce", "barrier", "--sizes", "1K:16K", "--dtypes", "float32,int16"]
    assert main(["bench", "collectives", *flags, "--seconds", "0.001"]) == 0
    assert "not supported (1)" in capsys.readouterr().out
    sweep = read_sweep(tmp_path / "runs/bench/collectives-gloo-2.json")
    assert [(record.op, record.bytes) for record in sweep.records if record.state == "ok"] == [
        ("all_reduce", 1024), ("all_reduce", 4096), ("all_reduce", 16384), ("barrier", 0),
    ]  # fmt: skip
    assert sweep.environment["hosts"] and sweep.environment["torch"] == torch.__version__
    assert (tmp_path / "runs/bench/collectives-gloo-2.svg").read_text().startswith("<svg")


def test_a_wrong_result_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.hardware.machines.start_fork_server", lambda modules: None)
    monkeypatch.setattr("rung.hardware.bench.sweep.measure", measure_without_broadcast)
    flags = ["--ops", "broadcast", "--sizes", "1K", "--dtypes", "float32", "--out", str(tmp_path)]
    assert main(["bench", "collectives", *flags]) == 1


@pytest.mark.parametrize(
    "launcher", [["torchrun", "--nproc-per-node", "2", "-m", "rung"], slow(["mpirun", "-n", "2", *RUNG])]
)
def test_it_takes_part_in_the_job_of_another_launcher(launcher: list[str], tmp_path: Path) -> None:
    path = Path(sys.executable).parent / launcher[0]
    if not path.exists():
        pytest.skip(f"no {launcher[0]}")
    as_root = ["--allow-run-as-root", "--oversubscribe"] if launcher[0] == "mpirun" else []
    flags = ["--ops", "all_reduce", "--sizes", "1K", "--dtypes", "float32", "--json", "--out", str(tmp_path)]
    command = [str(path), *as_root, *launcher[1:], "bench", "collectives", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(done.stdout[done.stdout.index("{") :])
    assert content["environment"]["ranks"] == 2
    assert [row["state"] for row in content["records"]] == ["ok"]


def rank_and_square(number: int, tell: Callable[[Any], None]) -> tuple[int, int]:
    rank = int(os.environ["RANK"])
    tell(("hello", rank))
    return rank, number**2


def fails_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("for a reason")
    signal.pause()


def leaves_without_a_word() -> None:
    os._exit(7)


def rank_0_leaves_when_rank_1_has_sent(sent: Path, tell: Callable[[Any], None]) -> None:
    if os.environ["RANK"] == "1":
        tell("first")
        tell("last")
        sent.touch()
        signal.pause()
    while not sent.exists():
        time.sleep(0.01)
    leaves_without_a_word()


def test_a_crew_brings_back_what_each_rank_returns() -> None:
    heard: list[Any] = []
    assert on_ranks(rank_and_square, 3, 5, listen=heard.append) == [(0, 25), (1, 25), (2, 25)]
    assert sorted(heard) == [("hello", 0), ("hello", 1), ("hello", 2)]


def test_what_a_rank_sent_before_another_failed_is_received(tmp_path: Path) -> None:
    sent, heard = tmp_path / "sent", []

    def receive(message: str) -> None:
        heard.append(message)
        while not sent.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # both pipes, of which that of rank 0 comes first, are then ready

    with pytest.raises(RankFailedError, match="rank 0 left with exit code 7"):
        on_ranks(rank_0_leaves_when_rank_1_has_sent, 2, sent, listen=receive)
    assert heard == ["first", "last"]


def test_a_crew_ends_with_its_first_failure() -> None:
    with pytest.raises(RankFailedError, match="for a reason") as caught:
        on_ranks(fails_on_rank_1, 2)
    assert caught.value.rank == 1
    with pytest.raises(RankFailedError, match="rank 0 left with exit code 7 and no result"):
        on_ranks(leaves_without_a_word, 1)
    with pytest.raises(RankFailedError, match="sent nothing for 1 s"):
        on_ranks(signal.pause, 1, timeout=1)
