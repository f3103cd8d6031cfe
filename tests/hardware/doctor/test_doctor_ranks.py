"""What `rung doctor` finds out between real ranks: a skewed clock, a slow rank, and that all is well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rung.cli.main import main
from rung.hardware.doctor.finding import Finding, ok
from rung.hardware.doctor.ranks import RankCheckSettings, check_ranks
from rung.launch.spawn import on_ranks
from tests.faults import hosts

RUNG = [sys.executable, "-m", "rung"]


def ahead() -> float:
    """A clock that is 7 s fast on rank 1."""
    return time.time() + (7.0 if os.environ["RANK"] == "1" else 0.0)


def laden() -> None:
    """The same work everywhere; on rank 1 something else is in the way."""
    until = time.perf_counter() + (0.08 if os.environ["RANK"] == "1" else 0.01)
    while time.perf_counter() < until:
        pass


def found_by(**changed: Any) -> dict[str, Finding]:
    settings = RankCheckSettings("gloo", "cpu", 30, started=time.time(), **changed)
    found = on_ranks(check_ranks, 2, [ok("host name", "fine")], settings, timeout=60)
    assert found[1] == []
    return {finding.check: finding for finding in found[0]}


def test_a_clock_that_is_wrong_on_one_rank() -> None:
    found = found_by(clock=ahead)
    assert found["clocks"].verdict == "warning"
    assert "rank 1" in found["clocks"].found
    assert "+7e+03 ms" in found["clocks"].found
    assert found["host name"] == ok("host name", "fine")
    assert "2 ranks on 1 machine met in" in found["rendezvous"].found
    assert found["same software"].verdict == "ok"
    assert found["all_reduce"].verdict == "ok"


def test_a_rank_that_is_slow() -> None:
    found = found_by(work=laden)
    assert found["slow rank"].verdict == "failed"
    assert found["slow rank"].found.startswith("rank 1 takes")
    assert found["clocks"].verdict == "ok"


def test_the_command_finds_nothing_wrong_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The tests have a fork server of their own.
    monkeypatch.setattr("rung.hardware.machines.start_fork_server", lambda modules: None)
    code = main(["doctor", "--nproc", "2", "--json", "--out", str(tmp_path)])
    told = json.loads(capsys.readouterr().out)
    failed = [check for check in told["checks"] if check["verdict"] == "failed"]
    assert all(check["check"] == "slow rank" for check in failed), failed  # other programs may run here
    assert code == int(bool(failed))
    assert {"versions", "shared memory", "rendezvous", "clocks", "links"} <= {one["check"] for one in told["checks"]}


@pytest.mark.skipif(not hosts.possible(), reason="needs root, for network namespaces")
def test_two_machines_are_told_apart(tmp_path: Path) -> None:
    """Their names do not resolve, which Rung can do without."""
    with hosts.Hosts(2) as network:
        rung = f"{' '.join(RUNG)} doctor --nproc 1 --json --nnodes 2 --rdzv {network.address(0)}:29477"
        commands = [
            [*network.prefix(number), "unshare", "--uts", "sh", "-c", f"hostname node{number}; exec {rung}"]
            for number in range(2)
        ]
        processes = [
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for command in commands
        ]
        outputs = [process.communicate(timeout=120) for process in processes]
    told = [json.loads(out) for out, _ in outputs if out]
    assert len(told) == 1, outputs
    names = [check for check in told[0]["checks"] if check["check"] == "host name"]
    assert {(check["where"], check["verdict"]) for check in names} == {("node0", "warning"), ("node1", "warning")}
    rendezvous = next(check for check in told[0]["checks"] if check["check"] == "rendezvous")
    assert "2 ranks on 2 machines met in" in rendezvous["found"]
