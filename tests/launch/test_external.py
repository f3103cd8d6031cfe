"""What a process makes of an environment that mpirun or torchrun has left, and what it refuses there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rung.cli.main import main
from rung.distributed import store
from rung.distributed.devices import choose_backend, choose_device
from rung.distributed.mpi import backend
from rung.errors import ConfigError, EnvironmentProblem, StrategyError
from rung.launch.external_settings import fit_to_launcher, resolve_external_layout
from rung.spec.compatibility import validate_config
from rung.spec.config import Resolved, RunConfig
from rung.spec.strategy import parse
from rung.system import processes
from rung.system.launcher_env import (
    LauncherRank,
    environment_local_rank,
    environment_local_size,
    environment_rank,
    environment_size,
    external_rank,
)
from tests.mpi import support_table
from tests.tasks import EXAMPLES

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "job",
}
KEY = "known to the ranks of tests"
PLACE = LauncherRank("mpirun", 0, 4, 0, 4, "job")


def say(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (*OPEN_MPI, *MPICH, *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH, TORCHRUN], ids=["open mpi", "mpich", "torchrun"])
def test_ranks_and_sizes_come_from_whoever_started_the_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    say(monkeypatch, variables)
    place = external_rank()
    assert place is not None
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 8, 1, 2)
    assert not place.is_main and not place.is_one_machine and place.job
    found = environment_rank(), environment_size(), environment_local_rank(), environment_local_size()
    assert found == (3, 8, 1, 2)


def test_words_of_torch_count_before_those_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rung's own ranks may have been started from a shell that mpirun had started."""
    say(monkeypatch, {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"})
    assert (environment_rank(), environment_size(), environment_local_size()) == (0, 2, 2)


def test_what_slurm_sets_for_every_job_is_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert external_rank() is None
    assert environment_size() == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"nproc": "2"}, "--nproc 2 and mpirun's 4 processes"),
        ({"nproc": "2:4"}, "--nproc 2:4 and mpirun's 4 processes"),
        ({"nnodes": "2"}, "--nnodes 2 is for Rung's own launcher. This job was started by mpirun"),
        ({"rdzv": "head:29400"}, "--rdzv head:29400 is for Rung's own launcher"),
        ({"max_restarts": 3}, "--max-restarts 3 is for Rung's own launcher"),
    ],
)
def test_what_only_a_launcher_can_do_is_refused(settings: dict[str, str | int], words: str) -> None:
    config = RunConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        fit_to_launcher(Resolved(config, origins=dict.fromkeys(settings, "flag")), PLACE)
    # A run that was started otherwise goes on without it.
    kept = fit_to_launcher(Resolved(config, origins=dict.fromkeys(settings, "run")), PLACE).config
    assert kept == RunConfig()


def test_settings_that_agree_with_the_place_are_taken() -> None:
    config = RunConfig(nproc="4", max_restarts=0)
    assert fit_to_launcher(Resolved(config, origins={"nproc": "flag"}), PLACE).config == config


def test_the_layout_follows_the_number_of_ranks() -> None:
    strategy, layout, policy = resolve_external_layout(RunConfig(), PLACE)
    assert (strategy, layout.num_ranks, policy.processes) == ("ddp", 4, (4, 4))
    with pytest.raises(StrategyError, match="Use mpirun -n 2"):
        resolve_external_layout(RunConfig(strategy="pp2"), PLACE)


@pytest.mark.parametrize(
    ("settings", "strategy", "words"),
    [
        ({}, "ps", "ps sends tensors over RPC"),
        ({}, "rpc-pp", "rpc-pp4 sends tensors over RPC"),
        ({"compress": "fp16"}, "ddp", "--compress fp16 saves nothing over MPI"),
    ],
)
def test_what_mpi_lacks_is_refused_by_name(settings: dict[str, str], strategy: str, words: str) -> None:
    layout = parse(strategy, 4)
    with pytest.raises(ConfigError, match=words):
        validate_config(RunConfig(backend="mpi", **settings), layout)  # type: ignore[arg-type]
    validate_config(RunConfig(**settings), layout)  # type: ignore[arg-type]


def test_gpu_tensors_do_not_go_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EnvironmentProblem, match="--backend mpi carries what lies in host memory"):
        choose_device("auto", "mpi", 0, 4)
    assert choose_device("cpu", "mpi", 0, 4).type == "cpu"


def test_the_backend_needs_mpirun_and_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    say(monkeypatch, {})
    with pytest.raises(EnvironmentProblem, match=r"needs processes that MPI has started: use `mpirun -n 4 rung train"):
        choose_backend("mpi", cpu)
    say(monkeypatch, OPEN_MPI)
    monkeypatch.setattr(backend, "is_installed", lambda: False)
    with pytest.raises(EnvironmentProblem, match=r"mpi4py, which is not installed: pip install 'rung\[mpi\]'"):
        choose_backend("mpi", cpu)
    monkeypatch.setattr(backend, "is_installed", lambda: True)
    assert choose_backend("mpi", cpu, parse("fsdp", 8)) == "mpi4py"


def test_torchs_own_mpi_is_taken_where_it_was_built_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not by layouts with several groups, which wait for each other there."""
    say(monkeypatch, OPEN_MPI)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(backend, "is_installed", lambda: False)
    assert choose_backend("mpi", torch.device("cpu"), parse("ddp", 8)) == "cpu:mpi"
    with pytest.raises(EnvironmentProblem, match="mpi4py"):
        choose_backend("mpi", torch.device("cpu"), parse("hsdp", 8))


def test_without_a_launcher_the_command_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(EXAMPLES / "babycnn"), "--nproc", "2", "--backend", "mpi", "--set", "device=cpu"]) == 2
    assert "--backend mpi needs processes that MPI has started" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["verify", "explain", "calibrate"])
def test_commands_of_one_process_are_done_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    say(monkeypatch, OPEN_MPI)
    arguments = [command] if command == "calibrate" else [command, "nowhere"]
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""
    if command != "explain":
        say(monkeypatch, {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"})
        assert main(arguments) == 2
        assert f"`rung {command}` starts processes of its own, and mpirun has started 8" in capsys.readouterr().err


# -- meeting ---------------------------------------------------------------------------------------------------------


def test_ranks_of_one_machine_meet_without_mpi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    say(monkeypatch, {})
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    found = {}

    def meet(rank: int) -> None:
        found[rank] = store.open_store(LauncherRank("mpirun", rank, 3, rank, 3, "a job"), over_mpi=False, key=KEY)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len({kept.port for kept in found.values()}) == 1
    found[1].set("word", "told")
    assert found[2].get("word") == b"told"
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert not list(folder.iterdir()), "nothing stays behind"


@pytest.mark.parametrize("how", ["open", "another's", "link", "file"])
def test_a_folder_that_others_can_write_to_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """Anybody can make it beforehand. The ranks then find each other through the user's own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder, own = tmp_path / f"rung-{os.getuid()}", tmp_path / "own"
    own.mkdir(mode=0o700)
    if how == "link":
        folder.symlink_to(own)
    elif how == "file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o777 if how == "open" else 0o700)
    if how == "another's":
        monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
        folder.rename(tmp_path / f"rung-{os.getuid()}")
        with pytest.raises(EnvironmentProblem, match="are not directories that this user alone can write to"):
            store._address_file(LauncherRank("mpirun", 1, 2, 1, 2, "a job"))
        return
    with pytest.warns(UserWarning, match="is open to other users: ranks rendezvous through"):
        found = store._address_file(LauncherRank("mpirun", 0, 2, 0, 2, "a job"))
    assert found == store._address_file(LauncherRank("mpirun", 1, 2, 1, 2, "a job"))
    assert found.parent.parent == tmp_path / "config" / "rung" and found.parent.stat().st_mode & 0o777 == 0o700


def test_a_port_that_nobody_can_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(EnvironmentProblem, match="MASTER_PORT=0 is in the environment"):
        store.open_store(None, over_mpi=False, key=KEY)


def test_several_machines_without_mpi4py_must_be_told_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {})
    monkeypatch.setattr(backend, "is_installed", lambda: False)
    with pytest.raises(EnvironmentProblem, match="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"):
        store.open_store(LauncherRank("mpirun", 0, 4, 0, 2, "a job"), over_mpi=False, key=KEY)


def test_rank_0_serves_the_store_at_an_address_that_others_may_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"near": "10.0.0.1", "itself": "127.0.1.1", "192.0.2.1": "192.168.0.9"}

    def towards(name: str, port: int) -> str:
        if name not in known:
            raise EnvironmentProblem("no such name")
        return known[name]

    monkeypatch.setattr(store, "address_towards", towards)
    monkeypatch.setattr(store, "address_among_others", lambda name, port: ("172.16.0.2", True))
    place = LauncherRank("mpirun", 0, 5, 0, 2)
    assert store._address(["head", "itself", "near", "unknown", "near"], place) == "10.0.0.1"
    assert store._address(["head", "itself", "unknown"], place) == "192.168.0.9"
    assert store._address(["head", "head"], LauncherRank("mpirun", 0, 2, 0, 2)) == "127.0.0.1"
    known.clear()
    assert store._address(["head", "other"], place) == "172.16.0.2"


def test_an_mpi_of_another_kind_than_mpiruns_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by itself, MPI has one rank: as where mpi4py loads another library than mpirun's."""
    if not backend.is_installed():
        pytest.skip("mpi4py is not installed")
    script = "from rung.distributed.mpi import backend; backend.start()"
    told = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))}
    told.update(MPICH)
    done = subprocess.run([sys.executable, "-c", script], env=told, capture_output=True, text=True, check=False)
    assert "rank 3 of 8, but in the MPI library that mpi4py loaded it is rank 0 of 1" in done.stderr
    assert "they are of different MPIs" in done.stderr


def test_the_docs_have_the_table_of_what_is_tested() -> None:
    """Paste the output of `python -c "from tests.mpi import support_table; print(support_table())"`."""
    assert support_table() in (EXAMPLES.parent / "docs" / "mpi.md").read_text()


# -- the machine -----------------------------------------------------------------------------------------------------


def test_cores_are_divided_unless_the_launcher_has_bound_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = {0: set(range(16)), os.getppid(): set(range(16))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores[pid])
    assert processes.share_of_cores(4) == 4
    cores[0] = {1, 2}
    assert processes.share_of_cores(4) == 2
    assert processes.share_of_cores(32) == 1
