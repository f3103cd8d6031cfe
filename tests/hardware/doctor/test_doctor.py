"""Verdicts of `rung doctor` on situations that are made here, or handed in."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from rung.errors import ConfigError
from rung.hardware.doctor import gpus, machine
from rung.hardware.doctor.command import doctor_command
from rung.hardware.doctor.finding import Finding, fold, ok, warning, worst
from rung.hardware.doctor.options import DoctorOptions
from rung.hardware.doctor.ranks import judge_clocks, judge_links, judge_pace, judge_versions, rendezvous_failed

GIB, MIB = 2**30, 2**20


def test_this_machine_has_an_answer_to_every_check(tmp_path: Path) -> None:
    found = machine.check_machine(nproc=2, nnodes=1, rdzv=None, folder=tmp_path)
    assert len({finding.check for finding in found}) == len(found) == 12
    assert all(bool(finding.fix) == (finding.verdict in ("warning", "failed")) for finding in found)
    assert not any("\n" in finding.fix for finding in found)


# -- names and ports -------------------------------------------------------------------------------------------------


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    alone = machine.host_name("no-such-host.invalid")
    assert alone.verdict == "warning"  # Rung tells gloo the loopback interface
    assert "does not resolve" in alone.found
    assert alone.fix == "add '127.0.0.1 no-such-host.invalid' to /etc/hosts"
    among = machine.host_name("no-such-host.invalid", is_alone=False)
    assert among.verdict == "failed"
    assert "GLOO_SOCKET_IFNAME" in among.fix
    assert machine.host_name("no-such-host.invalid", is_alone=False, has_interface=True).verdict == "warning"


def test_a_name_that_others_cannot_reach_or_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    here = machine.host_name("a", is_alone=False, resolve=lambda name: ["127.0.1.1"])
    assert (here.verdict, "cannot reach" in here.found) == ("warning", True)
    assert machine.host_name("a", is_alone=False, resolve=lambda name: ["10.0.0.7"]).verdict == "ok"
    monkeypatch.setattr(machine, "_SLOW_NAME_SECONDS", 0.01)

    def slowly(name: str) -> list[str]:
        time.sleep(0.02)
        return ["10.0.0.7"]

    assert "which took" in machine.host_name("a", resolve=slowly).found


@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_port_in_use_by_something_else(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_STORE_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if hangs_up:  # otherwise it says nothing at all
            threading.Thread(target=_hang_up, args=(server,), daemon=True).start()
        found = machine.rendezvous_endpoint(f"127.0.0.1:{port}")
    assert found.verdict == "failed"
    assert "a program other than a store listens" in found.found
    free = int(found.fix.split()[3])
    assert machine.rendezvous_endpoint(f"127.0.0.1:{free}").verdict == "ok"


def _hang_up(server: socket.socket) -> None:
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def test_a_store_at_the_meeting_place_is_welcome() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    found = machine.rendezvous_endpoint(f"127.0.0.1:{store.port}")
    assert (found.verdict, "a store answers" in found.found) == ("ok", True)


@pytest.mark.parametrize("rdzv", ["no-such-host.invalid:2000", "nonsense"])
def test_a_meeting_place_that_is_none(rdzv: str) -> None:
    assert machine.rendezvous_endpoint(rdzv).verdict == "failed"


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.interfaces({"GLOO_SOCKET_IFNAME": "lo,ib7"})
    assert (found.verdict, "no ib7 here" in found.found) == ("failed", True)
    assert machine.interfaces({"NCCL_SOCKET_IFNAME": "^docker"}).verdict == "ok"
    assert machine.interfaces({}).verdict == "ok"


# -- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "verdict"), [(8 * MIB, "failed"), (64 * MIB, "warning"), (8 * GIB, "ok")])
def test_little_shared_memory(free: int, verdict: str) -> None:
    found = machine.shared_memory(2, room=(max(free, 64 * MIB), free))
    assert found.verdict == verdict
    assert ("--shm-size" in found.fix) == (verdict != "ok")


def test_no_shared_memory_at_all(tmp_path: Path) -> None:
    assert machine.shared_memory(2, str(tmp_path / "none")).verdict == "failed"


def test_limits() -> None:
    assert machine.open_files(8, 100, limit=1024).verdict == "failed"
    assert machine.open_files(2, 1, limit=512).verdict == "warning"
    assert machine.open_files(2, 1, limit=65536).verdict == "ok"
    assert machine.locked_memory(limit=64 * 1024, cards=["mlx5_0"]).fix.startswith("ulimit -l unlimited")
    assert machine.locked_memory(limit=-1, cards=["mlx5_0"]).verdict == "ok"
    assert machine.locked_memory(limit=64 * 1024, cards=[]).verdict == "not here"
    assert [machine.host_memory(4, free).verdict for free in (GIB, 4 * GIB, 32 * GIB)] == ["failed", "warning", "ok"]


def test_a_run_directory_that_is_full_or_closed(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    assert [machine.run_directory(folder, free).verdict for free in (MIB, 2 * GIB, 99 * GIB)] == [
        "failed", "warning", "ok",
    ]  # fmt: skip
    assert not folder.exists()
    closed = machine.run_directory(Path("/proc/runs"))
    assert (closed.verdict, "cannot write in /proc" in closed.found) == ("failed", True)


# -- computing -------------------------------------------------------------------------------------------------------


def test_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    found = machine.threads(4, cores=16)
    assert (found.verdict, found.fix) == ("warning", "export OMP_NUM_THREADS=4")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert machine.threads(4, cores=16).verdict == "ok"
    inside = machine.threads(4, cores=64, limit=8)  # a container: 16 threads each by the cores it sees
    assert (inside.verdict, inside.fix) == ("warning", "export OMP_NUM_THREADS=2")
    assert "use --nproc 2" in machine.threads(4, cores=2).fix


def test_half_precision_without_arithmetic() -> None:
    found = machine.half_precision({"bf16": 283.0, "fp16": 2.0})
    assert (found.verdict, found.fix) == ("warning", "use --precision fp32 here, not bf16")
    assert machine.half_precision({"bf16": 0.5, "fp16": 0.6}).verdict == "ok"


def test_versions_and_backends() -> None:
    assert machine.versions("2.13.0+cpu").verdict == "ok"
    assert "torch>=2.11,<2.14" in machine.versions("2.9.1").fix
    assert machine.backends(0).verdict == "ok"
    if not dist.is_nccl_available():
        assert machine.backends(8).verdict == "failed"


# -- GPUs ------------------------------------------------------------------------------------------------------------

GOOD = "{index}, NVIDIA H100 80GB HBM3, 550.54, 41, 3, 81559, 0, Not Active, Not Active, 16, 16"
LINKS = "GPU 0: NVIDIA H100\n\t Link 0: 26.562 GB/s\n\t Link 1: {second}\n"


def smi(*rows: str, links: str = "") -> gpus.RunSmi:
    def ask(arguments: Sequence[str]) -> str | None:
        return links if arguments[0] == "nvlink" else "\n".join(rows) + "\n"

    return ask


def verdicts(*rows: str, links: str = "", visible: int = 2) -> dict[str, Finding]:
    return {finding.check: finding for finding in gpus.check_gpus(visible, smi(*rows, links=links))}


def test_healthy_gpus() -> None:
    rows = [GOOD.format(index=index) for index in range(2)]
    found = verdicts(*rows, links=LINKS.format(second="26.562 GB/s"))
    assert {finding.verdict for finding in found.values()} == {"ok"}
    assert found["GPUs"].found == "2 x NVIDIA H100 80GB HBM3, driver 550.54"
    assert found["NVLink"].found == "2 links up"


@pytest.mark.parametrize(
    ("before", "after", "check", "verdict", "told"),
    [
        (", 0, Not Active", ", 3, Not Active", "GPU memory errors", "failed", "GPU 1: 3"),
        ("Not Active, 16", "Active, 16", "GPU clocks", "failed", "GPU 1 at 41 C"),
        (", 41,", ", 90,", "GPU clocks", "warning", "90 C"),
        (", 3, 81559", ", 40000, 81559", "GPU memory", "warning", "GPU 1: 39.1 GiB"),
        ("16, 16", "8, 16", "PCIe", "warning", "GPU 1: x8 of x16"),
        ("H100 80GB HBM3", "A10", "GPUs", "warning", "not all alike"),
    ],
)
def test_sick_gpus(before: str, after: str, check: str, verdict: str, told: str) -> None:
    found = verdicts(GOOD.format(index=0), GOOD.format(index=1).replace(before, after))
    assert found[check].verdict == verdict
    assert told in found[check].found
    assert {finding.verdict for name, finding in found.items() if name != check} <= {"ok", "not here"}


def test_gpus_that_do_not_tell_or_cannot_be_used() -> None:
    silent = GOOD.replace(", 0, Not", ", [N/A], Not").replace("16, 16", "[N/A], [N/A]").format(index=0)
    assert verdicts(silent)["GPU memory errors"].verdict == "not here"
    assert verdicts(GOOD.format(index=0), visible=0)["GPUs"].verdict == "failed"
    rows = [GOOD.format(index=index) for index in range(2)]
    assert verdicts(*rows, links=LINKS.format(second="<inactive>"))["NVLink"].verdict == "failed"
    (none,) = gpus.check_gpus(0, lambda arguments: None)
    assert none.verdict == "not here"
    (blind,) = gpus.check_gpus(4, lambda arguments: None)
    assert blind.verdict == "warning"


def test_a_slow_gpu_is_named() -> None:
    names, places = ["NVIDIA H200"] * 4, [f"rank {rank}" for rank in range(4)]
    good = (780.0, 4.2)
    assert gpus.judge_speed(names, [good] * 4, places).verdict == "ok"
    found = gpus.judge_speed(names, [good, good, (400.0, 4.2), good], places)
    assert (found.verdict, found.found) == ("failed", "rank 2: 400 TFLOP/s in bf16, the others 780")
    lone = gpus.judge_speed(names[:1], [(780.0, 1.0)], places[:1])
    assert lone.found == "rank 0: 1 TB/s of memory, the datasheet says 4.8"
    assert gpus.judge_speed(["Another"], [(1.0, 0.1)], places[:1]).verdict == "ok"


# -- between ranks ---------------------------------------------------------------------------------------------------

HOSTS = ["a", "a", "b", "b"]


def test_clocks_that_differ() -> None:
    assert judge_clocks([(0.0, 0.0), (1e-5, 1e-4), (0.01, 1e-3), (0.0, 1e-3)], HOSTS).verdict == "ok"
    apart = judge_clocks([(0.0, 0.0), (0.0, 1e-4), (-1.2, 1e-3), (0.1, 1e-3)], HOSTS)
    assert (apart.verdict, apart.fix) == ("warning", "start chrony or ntpd on b")
    assert "rank 2 on b is -1.2e+03 ms" in apart.found
    assert judge_clocks([(0.0, 0.0), (8.0, 1e-4)], HOSTS).verdict == "warning"  # machines do not need each other's
    assert judge_clocks([(0.0, 0.0), (0.7, 0.9)], HOSTS).verdict == "ok"  # so slow a link says nothing
    assert judge_clocks([(0.0, 0.0)], HOSTS).verdict == "not here"


def test_a_slow_rank_is_named() -> None:
    assert judge_pace([0.010, 0.011, 0.012, 0.010], HOSTS).verdict == "ok"
    slow = judge_pace([0.010, 0.010, 0.010, 0.020], HOSTS)
    assert (slow.verdict, "rank 3 on b takes 20 ms" in slow.found) == ("warning", True)
    assert judge_pace([0.010, 0.050], ["a", "a"]).verdict == "failed"
    assert judge_pace([0.010], ["a"]).verdict == "not here"


def test_a_slow_link_is_named() -> None:
    inside, between = 2e9, 1e8
    rates = [between, inside, between, inside]  # from the rank before: b to a, a to a, a to b, b to b
    assert judge_links(rates, HOSTS).verdict == "ok"  # links of two kinds are not compared
    hosts = list("abcd")
    slow = judge_links([1e9, 1e9, 1e8, 1e9], hosts)
    assert (slow.verdict, "rank 1 on b to rank 2 on c: 0.1 GB/s" in slow.found) == ("warning", True)


def test_software_that_differs() -> None:
    found = judge_versions([{"torch": "2.13"}, {"torch": "2.13"}, {"torch": "2.11"}], ["a", "a", "b"])
    assert (found.verdict, "2.11 on b" in found.found) == ("failed", True)
    assert judge_versions([{"torch": "2.13"}] * 2, ["a", "b"]).verdict == "ok"


# -- telling it ------------------------------------------------------------------------------------------------------


def test_machines_that_agree_are_told_once() -> None:
    full = warning("disk", "full", "make room")
    said = [Finding("name", "ok", f"{host} is fine", where=host) for host in "abc"]
    said += [Finding("disk", "ok", "99 GiB", where="a"), Finding("disk", "ok", "98 GiB", where="b")]
    said += [Finding(full.check, full.verdict, full.found, full.fix, "c"), ok("clocks", "0.1 ms")]
    rows = [(row.check, row.verdict, row.where) for row in fold(said)]
    assert rows == [
        ("name", "ok", "a and 2 others"), ("disk", "ok", "a, b"), ("disk", "warning", "c"), ("clocks", "ok", ""),
    ]  # fmt: skip
    assert worst(said) == "warning"


def test_ranks_that_do_not_meet_are_a_finding_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from rung.launch import spawn

    def fails(*args: object, **kwargs: object) -> None:
        raise spawn.RankFailedError(1, "failed", "Traceback\nRuntimeError: connection refused")

    monkeypatch.setattr("rung.hardware.machines.start_fork_server", lambda modules: None)
    monkeypatch.setattr("rung.hardware.doctor.run.on_ranks", fails)
    assert doctor_command(DoctorOptions(nproc=2, out=str(tmp_path), as_json=True)) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "failed"
    last = told["checks"][-1]
    assert last["check"] == rendezvous_failed("").check == "rendezvous"
    assert "connection refused" in last["found"]


def test_machines_need_a_place_to_meet() -> None:
    with pytest.raises(ConfigError, match="--rdzv"):
        doctor_command(DoctorOptions(nnodes=2))
