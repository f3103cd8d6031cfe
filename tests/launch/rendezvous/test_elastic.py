"""On which terms a job runs, without running one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rung.errors import ConfigError, EnvironmentProblem, StrategyError
from rung.launch.agent import _environment
from rung.launch.fork_server import _MAX_TEMPORARY_BYTES
from rung.launch.rendezvous.elastic import (
    ElasticPolicy,
    Restarts,
    announce,
    elastic_policy,
    retire,
    running_launcher,
    scale,
    wanted_processes,
)
from rung.launch.rendezvous.round import Round
from rung.spec.config import RunConfig
from rung.spec.strategy import fit
from rung.system.network import address_towards, answers, interface_of, split_endpoint


@pytest.mark.parametrize(
    ("text", "processes", "name", "spares"),
    [
        ("ddp", 3, "ddp", 0),
        ("fsdp", 1, "fsdp", 0),
        ("pp2,fsdp", 3, "pp2,fsdp1", 1),
        ("pp2,fsdp", 5, "pp2,fsdp2", 1),
        ("pp2:zb,fsdp", 4, "pp2:zb,fsdp2", 0),
        ("hsdp", 5, "hsdp2x2", 1),
        ("hsdp2x2", 7, "hsdp2x2", 3),
        ("tp2", 5, "tp2", 3),
        ("single", 3, "single", 2),
        ("pp2,fsdp,tp2", 11, "pp2,fsdp2,tp2", 3),
    ],
)
def test_a_strategy_takes_the_processes_that_it_can_use(text: str, processes: int, name: str, spares: int) -> None:
    layout, left = fit(text, processes)
    assert (layout.name, left) == (name, spares)
    assert fit(layout.name, processes - spares) == (layout, 0), "its name with sizes stands for the same"


def test_hsdp_that_fits_shards_inside_a_host() -> None:
    layout, spares = fit("hsdp", 9, 4)
    assert (layout.name, spares) == ("hsdp2x4", 1)


@pytest.mark.parametrize(
    ("text", "processes", "words"),
    [
        ("pp2,fsdp", 1, ["at least 2", "1 cannot"]),
        ("hsdp2x2", 3, ["at least 4"]),
        ("nix", 4, ["no strategy 'nix'"]),
        ("pp2:zb", 0, ["at least 2"]),
    ],
)
def test_too_few_processes_are_refused(text: str, processes: int, words: list[str]) -> None:
    with pytest.raises(StrategyError) as error:
        fit(text, processes)
    for word in words:
        assert word in str(error.value)


def test_a_schedule_that_contradicts_is_told_as_such() -> None:
    with pytest.raises(StrategyError, match="Keep one of them"):
        fit("pp2:zb", 3, None, "gpipe")


# -- terms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected", "elastic"),
    [
        (RunConfig(nproc="4"), ElasticPolicy((4, 4), max_restarts=0), False),
        (RunConfig(), ElasticPolicy((2, 2), max_restarts=0), False),
        (RunConfig(nproc="2:4"), ElasticPolicy((2, 4), max_restarts=3), True),
        (RunConfig(nproc="4", max_restarts=2), ElasticPolicy((4, 4), max_restarts=2), False),
        (RunConfig(nproc="4", nnodes="2", rdzv="h:1"), ElasticPolicy((4, 4), (2, 2), "h:1", 3), False),
        (RunConfig(nproc="4", nnodes="1:2", rdzv="h:1", max_restarts=0), ElasticPolicy((4, 4), (1, 2), "h:1", 0), True),
    ],
)
def test_terms_follow_from_settings(config: RunConfig, expected: ElasticPolicy, elastic: bool) -> None:
    policy = elastic_policy(config, 2)
    assert (policy.processes, policy.nodes, policy.rdzv) == (expected.processes, expected.nodes, expected.rdzv)
    assert policy.max_restarts == expected.max_restarts
    assert policy.is_elastic == elastic


@pytest.mark.parametrize(
    ("config", "word"), [(RunConfig(nnodes="1:2"), "--rdzv HOST:PORT"), (RunConfig(rdzv="h:1"), "--nnodes")]
)
def test_machines_need_a_place_to_meet(config: RunConfig, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        elastic_policy(config, 1)


def test_restarts_are_counted_in_a_row_without_progress() -> None:
    restarts = Restarts(2)
    assert [restarts.after_failure(step) for step in (5, 5, 5)] == [True, True, False]
    restarts = Restarts(2)
    assert [restarts.after_failure(step) for step in (5, 3, 6, 6, 5)] == [True, True, True, True, False]
    assert not Restarts(0).after_failure(100)


# -- rung scale ------------------------------------------------------------------------------------------------------


def test_a_running_job_is_asked_to_change_its_size(tmp_path: Path) -> None:
    state = tmp_path / ".state"
    state.mkdir()
    announce(state, ElasticPolicy((1, 4)))
    assert wanted_processes(state) is None
    assert "3 processes" in scale(tmp_path, 3)
    assert wanted_processes(state) == 3
    assert wanted_processes(state) is None, "it is asked once"
    with pytest.raises(ConfigError, match="1 to 4 processes, not 5"):
        scale(tmp_path, 5)
    retire(state)
    with pytest.raises(ConfigError, match="not a run that is running"):
        scale(tmp_path, 2)


def test_what_does_not_run_or_cannot_change_is_not_scaled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run"):
        scale(tmp_path / "nix", 2)
    state = tmp_path / ".state"
    state.mkdir()
    announce(state, ElasticPolicy((2, 2)))
    with pytest.raises(ConfigError, match="--nproc MIN:MAX"):
        scale(tmp_path, 2)
    (state / "launcher").write_text(json.dumps({"pid": 2**22 + 1, "least": 1, "most": 2}))  # no such process
    with pytest.raises(ConfigError, match="not a run that is running"):
        scale(tmp_path, 2)


def test_another_process_of_the_same_number_is_not_the_launcher(tmp_path: Path) -> None:
    """In a container the launcher is process 1, and so is its successor after the container was killed."""
    announce(tmp_path, ElasticPolicy((1, 1)))
    assert running_launcher(tmp_path) == os.getpid()
    told = json.loads((tmp_path / "launcher").read_text())
    (tmp_path / "launcher").write_text(json.dumps({**told, "since": told["since"] - 1}))
    assert running_launcher(tmp_path) is None


def test_on_several_machines_the_launcher_of_this_one_is_asked(tmp_path: Path) -> None:
    state = tmp_path / ".state" / f"127.0.0.1-{os.getpid()}"
    state.mkdir(parents=True)
    announce(state, ElasticPolicy((1, 2)))
    scale(tmp_path, 1)
    assert wanted_processes(state) == 1


# -- the network -----------------------------------------------------------------------------------------------------


def test_the_own_address_is_the_one_that_reaches_the_meeting() -> None:
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", None)
    assert interface_of("203.0.113.7") is None, "nobody's"
    assert split_endpoint("[::1]:80") == ("::1", 80) and split_endpoint("host:80") == ("host", 80)


def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(EnvironmentProblem, match="does not resolve"):
        address_towards("no-such-host.invalid", 1)


def test_whether_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert answers("127.0.0.1", port)
    assert not answers("127.0.0.1", port)


def test_closing_connections_wakes_who_waits_for_a_peer_and_spares_who_listens() -> None:
    script = """
import os, socket, threading
from rung.system.network import close_connections
listener = socket.create_server(("127.0.0.1", 0))
one = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
threading.Timer(0.2, close_connections).start()
assert one.recv(1) == b""
socket.create_connection(listener.getsockname()).close()
print("woke")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout == "woke\n", done.stderr


def test_sockets_of_ranks_have_room_for_their_names() -> None:
    """Linux takes 107 bytes. A temporary directory that leaves too few gives way to /tmp."""
    folder = Path("/tmp/" + "x" * (_MAX_TEMPORARY_BYTES - 5)) / "pymp-12345678" / "rank-12345"
    assert len(str(folder / "listener-12345678")) == 107


def test_ranks_get_the_variables_that_torchrun_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    round_ = Round(
        attempt=2, host=1, num_hosts=2, first_rank=2, num_local=2, size=4, used=4, strategy="ddp", address="10.0.0.1",
        port=29500, resume=True, micro_batch=None, nonces=["a", "b"],
    )  # fmt: skip
    found = _environment(round_, 1, "rung-0")
    assert [found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["3", "1", "4", "2"]
    assert [found[name] for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID")] == ["1", "2", "rung-0"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["CUDA_VISIBLE_DEVICES"]) == ("10.0.0.1", "29500", "2,3")
