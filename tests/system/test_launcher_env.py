"""What a process makes of the variables of Slurm and of those that torchrun reads, and what it refuses there."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from rung.cli.main import main
from rung.distributed import store
from rung.errors import ConfigError, EnvironmentProblem
from rung.launch.external_settings import fit_to_launcher, resolve_external_layout
from rung.launch.rendezvous import endpoint
from rung.launch.rendezvous.topology import apply_cluster_env, find_machines, rank_of_command
from rung.spec.config import Resolved, RunConfig, resolve
from rung.spec.task import load_task
from rung.system import network
from rung.system.launcher_env import (
    env_settings,
    environment_local_size,
    environment_rank,
    environment_size,
    external_rank,
    slurm_step,
)
from tests.tasks import EXAMPLES

# What Slurm 22.05 says to the last task of `srun -N3 -n5` in a job of three nodes, and to a script of that job.
JOB = {
    "SLURM_JOB_ID": "812",
    "SLURM_JOB_NODELIST": "gpu[003-004,7]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURMD_NODENAME": "gpu003",
}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NODELIST": "gpu[003-004,7]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
    "SLURMD_NODENAME": "gpu7",
}
ONE_EACH = {**STEP, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_PROCID": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
KUBEFLOW = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


@pytest.fixture(autouse=True)
def _names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "resolve_host", lambda host, port: "10.0.0.3")


def say(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in (*STEP, *KUBEFLOW, *OPEN_MPI, "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def flags(**given: str | int) -> Resolved:
    return Resolved(RunConfig(**given), origins=dict.fromkeys(given, "flag"))  # type: ignore[arg-type]


# -- Slurm -----------------------------------------------------------------------------------------------------------


def test_tasks_of_srun_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, STEP)
    place, step = external_rank(), slurm_step()
    assert place is not None and step is not None
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == ("srun", 4, 5, 0, 1)
    assert (place.job, place.node, place.is_one_machine) == ("812.3", "gpu7", False)
    assert (step.tasks, step.head) == ((2, 2, 1), "gpu003")
    assert (environment_rank(), environment_size(), environment_local_size()) == (4, 5, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[003-004,7]", "gpu003"),
        ("a1,gpu[3-4]", "a1"),
        ("rack[2,4]n[08-11]-ib,x", "rack2n08-ib"),
        ("node-3.site.org", "node-3.site.org"),
    ],
)
def test_the_first_machine_of_a_node_list(monkeypatch: pytest.MonkeyPatch, nodes: str, first: str) -> None:
    say(monkeypatch, {**STEP, "SLURM_STEP_NODELIST": nodes})
    step = slurm_step()
    assert step is not None and step.head == first


@pytest.mark.parametrize("steps", [{}, {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}])
def test_a_script_or_a_single_task_of_a_job_is_no_rank(monkeypatch: pytest.MonkeyPatch, steps: dict[str, str]) -> None:
    say(monkeypatch, {**(STEP if steps else JOB), "SLURM_PROCID": "0", "SLURM_NODEID": "0", **steps})
    assert external_rank() is None and slurm_step() is None
    assert environment_size() == 1
    assert find_machines(2, 1, None).place is None


def test_mpirun_that_reaches_its_machines_by_srun_is_still_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")}
    mpi |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
    say(monkeypatch, {**ONE_EACH, **mpi})
    place = rank_of_command({"nproc": "2"})
    assert place is not None and (place.launcher, place.size) == ("mpirun", 2)


def test_steps_of_a_job_meet_at_different_ports_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = set()
    for job, number in (("812", "0"), ("812", "1"), ("813", "0")):
        say(monkeypatch, {**STEP, "SLURM_JOB_ID": job, "SLURM_STEP_ID": number})
        step = slurm_step()
        assert step is not None and 1024 < step.port < 32768
        ports.add(step.port)
    assert len(ports) == 3
    say(monkeypatch, {**STEP, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29555"})
    step = slurm_step()
    assert step is not None and (step.head, step.port) == ("10.0.0.9", 29555)


@pytest.mark.parametrize(
    ("variables", "given", "is_rank"),
    [
        (STEP, {}, True),
        (STEP, {"nproc": "1"}, True),
        (STEP, {"nnodes": "1"}, True),
        (ONE_EACH, {}, True),
        (ONE_EACH, {"nproc": "1"}, True),
        (ONE_EACH, {"nproc": "8"}, False),
        (ONE_EACH, {"nproc": "1:4"}, False),
        (ONE_EACH, {"nnodes": "3", "nproc": "1", "rdzv": "head:29400"}, False),
        (ONE_EACH, {"nnodes": "1:3"}, False),
    ],
)
def test_settings_tell_tasks_that_are_ranks_from_launchers(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], given: dict[str, str], is_rank: bool
) -> None:
    say(monkeypatch, variables)
    assert (rank_of_command(given) is not None) == is_rank


def test_several_tasks_on_a_machine_cannot_be_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, STEP)
    words = r"--nnodes 3 --rdzv head:29400 is for one launcher .* srun has started 5 tasks on 3 machines"
    with pytest.raises(ConfigError, match=words):
        rank_of_command({"nnodes": "3", "nproc": "2", "rdzv": "head:29400"})
    place = rank_of_command({"nproc": "8"})
    assert place is not None
    with pytest.raises(ConfigError, match=r"--nproc 8 and srun's 1 process on this machine \(5 in all\)"):
        fit_to_launcher(flags(nproc="8"), place)
    with pytest.raises(ConfigError, match=r"--max-restarts 2 is for Rung's own launcher.* srun --ntasks-per-node=1"):
        fit_to_launcher(flags(max_restarts=2), place)
    assert resolve_external_layout(RunConfig(), place)[1].num_ranks == 5


def test_words_of_torch_that_do_not_fit_the_task_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {**STEP, "WORLD_SIZE": "8"})
    place = external_rank()
    assert place is not None
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 is .*, but srun started this process as rank 4 of 5"):
        fit_to_launcher(flags(), place)
    say(monkeypatch, {**STEP, "WORLD_SIZE": "5", "RANK": "0"})
    with pytest.raises(ConfigError, match="RANK=0 is in the environment"):
        fit_to_launcher(flags(), place)


def test_launchers_of_srun_know_how_many_they_are_and_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, ONE_EACH)
    step = slurm_step()
    assert step is not None
    resolved, line = apply_cluster_env(flags(nproc="8"))
    config = resolved.config
    assert (config.nnodes, config.nproc, config.rdzv) == ("3", "8", f"gpu003:{step.port}")
    assert resolved.origins["nnodes"] == "environment SLURM_STEP_NUM_NODES"
    assert line.startswith("from the environment: --nnodes 3 (SLURM_STEP_NUM_NODES), --rdzv gpu003:")
    kept, line = apply_cluster_env(flags(nnodes="2:4", rdzv="elsewhere:29400"))
    assert (kept.config.nnodes, kept.config.rdzv, line) == ("2:4", "elsewhere:29400", "")
    with pytest.raises(ConfigError, match=r"--nnodes 2 contradicts srun, .* on 3 machines \(SLURM_STEP_NUM_NODES\)"):
        apply_cluster_env(flags(nnodes="2"))


def test_slurm_and_the_variables_of_torchrun_are_both_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {**ONE_EACH, "PET_NPROC_PER_NODE": "2"})
    found = {told.setting: told.value for told in env_settings()}
    assert (found["nnodes"], found["nproc"]) == ("3", "2") and found["rdzv"].startswith("gpu003:")
    say(monkeypatch, {**ONE_EACH, "PET_NNODES": "1:4"})
    assert {told.setting: told.value for told in env_settings()}["nnodes"] == "1:4"
    say(monkeypatch, {**ONE_EACH, "PET_NNODES": "4"})
    with pytest.raises(ConfigError, match=r"PET_NNODES=4 .* srun has started this command on 3 machines"):
        env_settings()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "abc"}, "OMPI_COMM_WORLD_RANK=abc .* must be a number"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "5"}, "OMPI_COMM_WORLD_RANK=5 and OMPI_COMM_WORLD_SIZE=2"),
        ({**ONE_EACH, "SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE=x .* SLURM_STEP_NUM_TASKS=3"),
        ({**ONE_EACH, "MASTER_PORT": "abc"}, "MASTER_PORT=abc"),
    ],
)
def test_variables_that_cannot_be_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, variables)
    with pytest.raises(ConfigError, match=message):
        external_rank()
    assert main(["train", str(EXAMPLES / "babycnn" / "task.py")]) == 2
    assert capsys.readouterr().err.startswith("rung: ")


def test_ranks_that_no_launcher_started_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train a model of its own. torchrun, too, takes no notice of these variables."""
    stray = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    say(monkeypatch, stray)
    for given in ({}, {"nproc": "2"}):
        with pytest.raises(ConfigError, match=r"RANK=1 WORLD_SIZE=4 .* --nnodes N --rdzv head:29500"):
            rank_of_command(given)
    assert rank_of_command({"nnodes": "4", "rdzv": "head:29500"}) is None
    say(monkeypatch, {**stray, "WORLD_SIZE": "1", "RANK": "0"})
    assert rank_of_command({}) is None
    say(monkeypatch, {**stray, **KUBEFLOW})
    assert rank_of_command({}) is None


def test_ranks_meet_on_the_machine_of_task_0(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {**STEP, "SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu004"})
    place = external_rank()
    assert place is not None
    with pytest.raises(EnvironmentProblem, match=r"rank 0 is on gpu004, .* first machine of this Slurm step, gpu0"):
        store.open_store(place, over_mpi=False, key="known to the ranks of tests")


def test_names_that_only_slurm_knows_are_asked_of_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(host: str, port: int) -> str:
        raise EnvironmentProblem("no such name")

    monkeypatch.setattr(network, "resolve_host", unknown)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="task 0 of this Slurm step is on n0, a name that does not resolve"):
        network.slurm_address("n0")
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$3 Arch=aarch64\necho '   NodeAddr=10.1.2.3 NodeHostName=x'\n")
    scontrol.chmod(0o755)
    assert network.slurm_address("n0") == "10.1.2.3"


# -- the variables of torchrun ---------------------------------------------------------------------------------------


def test_variables_of_torchrun_fill_in_what_flags_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, KUBEFLOW)
    assert external_rank() is None
    task = load_task(EXAMPLES / "babycnn")
    resolved, line = apply_cluster_env(resolve(task, flags={"nnodes": "4"}))
    config = resolved.config
    assert (config.nnodes, config.nproc, config.rdzv) == ("4", "8", "job-node-0-0.job:29400")
    assert resolved.origins["nproc"] == "environment PET_NPROC_PER_NODE" and resolved.origins["nnodes"] == "flag"
    expected = "--nproc 8 (PET_NPROC_PER_NODE), --rdzv job-node-0-0.job:29400 (PET_MASTER_ADDR)"
    assert line == f"from the environment: {expected}"
    machines = find_machines(None, 1, None)
    assert (machines.place, machines.nproc, machines.nnodes, machines.rdzv) == (None, 8, 4, config.rdzv)


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"PET_NPROC_PER_NODE": "auto"}, ("4", None, "job-node-0-0.job:29400")),
        ({"PET_NNODES": "1"}, ("1", "8", None)),
        ({"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "head:1"}, ("2:4", "8", "head:1")),
        ({"PET_MASTER_PORT": ""}, ("4", "8", "job-node-0-0.job:29500")),
    ],
)
def test_the_forms_that_torchrun_knows(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], found: tuple[str, str | None, str | None]
) -> None:
    say(monkeypatch, {**KUBEFLOW, **variables})
    config = apply_cluster_env(Resolved(RunConfig()))[0].config
    assert (config.nnodes, config.nproc, config.rdzv) == found


def test_a_run_that_goes_on_elsewhere_takes_the_machines_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, KUBEFLOW)
    old = Resolved(RunConfig(nnodes="2", nproc="1", rdzv="old:1"), origins=dict.fromkeys(("nnodes", "nproc"), "run"))
    config = apply_cluster_env(old)[0].config
    assert (config.nnodes, config.nproc, config.rdzv) == ("4", "8", "job-node-0-0.job:29400")


@pytest.mark.parametrize(
    ("variables", "given", "words"),
    [
        ({}, {"nnodes": "3"}, "--nnodes 3 contradicts PET_NNODES=4"),
        ({}, {"nproc": "2"}, "--nproc 2 contradicts PET_NPROC_PER_NODE=8"),
        ({"PET_RDZV_ENDPOINT": "a:1"}, {"rdzv": "b:1"}, "--rdzv b:1 contradicts PET_RDZV_ENDPOINT=a:1"),
        ({"PET_MAX_RESTARTS": "3"}, {"max_restarts": 1}, "--max-restarts 1 contradicts PET_MAX_RESTARTS=3"),
        ({"PET_NNODES": "four"}, {}, "PET_NNODES=four is in the environment: nnodes is a number"),
        ({"PET_RDZV_BACKEND": "etcd-v2"}, {}, "PET_RDZV_BACKEND=etcd-v2 is in the environment"),
    ],
)
def test_what_contradicts_the_variables_is_refused_with_both_values(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], given: dict[str, str | int], words: str
) -> None:
    say(monkeypatch, {**KUBEFLOW, **variables})
    with pytest.raises(ConfigError, match=words):
        apply_cluster_env(flags(**given))


def test_values_that_agree_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, {**KUBEFLOW, "PET_MAX_RESTARTS": "3"})
    resolved, line = apply_cluster_env(flags(nnodes="2:8", nproc="8", rdzv="meet.job:29400", max_restarts=3))
    assert resolved.config == RunConfig(nnodes="2:8", nproc="8", rdzv="meet.job:29400", max_restarts=3)
    assert line == ""


def test_a_contradiction_ends_the_command_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, KUBEFLOW)
    assert main(["train", str(EXAMPLES / "babycnn"), "--nnodes", "3", "--set", "device=cpu"]) == 2
    assert "--nnodes 3 contradicts PET_NNODES=4" in capsys.readouterr().err
    assert main(["train", str(EXAMPLES / "babycnn"), "--strategy", "auto"]) == 2
    assert "--strategy auto is for one machine, and the environment requests several" in capsys.readouterr().err


# -- the machine's own name ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "means", "expected"),
    [
        ("head", "10.0.0.1", ("10.0.0.2", False)),
        ("self", "10.0.0.2", ("10.0.0.2", True)),
        ("self", "127.0.1.1", ("10.0.0.2", True)),
        ("localhost", "127.0.0.1", ("127.0.0.1", True)),
        ("127.0.0.1", "127.0.0.1", ("127.0.0.1", True)),
    ],
)
def test_a_name_that_means_loopback_is_this_machine_in_its_network(
    monkeypatch: pytest.MonkeyPatch, host: str, means: str, expected: tuple[str, bool]
) -> None:
    monkeypatch.setattr(network, "resolve_host", lambda name, port: means)
    reached = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(network, "address_towards", lambda name, port: reached.get(name, "10.0.0.2"))
    assert network.address_among_others(host, 29400) == expected


def test_without_a_default_route_any_address_of_the_machine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def towards(name: str, port: int) -> str:
        raise EnvironmentProblem("no route")

    monkeypatch.setattr(network, "resolve_host", lambda name, port: "127.0.1.1")
    monkeypatch.setattr(network, "address_towards", towards)
    monkeypatch.setattr(network, "_own_addresses", lambda: {"lo": "127.0.0.1", "eth0": "10.0.0.7"})
    assert network.address_among_others("self", 29400) == ("10.0.0.7", True)


# -- the place to meet -----------------------------------------------------------------------------------------------


def test_a_name_that_becomes_known_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([EnvironmentProblem("the name 'head' of --rdzv does not resolve."), ("10.0.0.2", False)])

    def among_others(host: str, port: int) -> tuple[str, bool]:
        answer = next(answers)
        if isinstance(answer, EnvironmentProblem):
            raise answer
        return answer

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(endpoint, "address_among_others", among_others)
    assert endpoint._own_address("head", 29400, lambda text: None) == ("10.0.0.2", False)
    answers = iter([EnvironmentProblem("the name 'head' of --rdzv does not resolve.")])
    monkeypatch.setattr(endpoint, "_NAME_SECONDS", -1.0)
    with pytest.raises(EnvironmentProblem, match="'head' of --rdzv does not resolve"):
        endpoint._own_address("head", 29400, lambda text: None)


def test_a_port_of_another_program_is_no_meeting_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes connections and says nothing."""
    monkeypatch.setattr(endpoint, "STORE_SECONDS", 1)
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])

        def hang_up() -> None:
            for connection in taken:
                connection.close()

        threading.Thread(target=take, daemon=True).start()
        monkeypatch.setattr(endpoint, "close_connections", hang_up)  # not those of the tests
        with pytest.raises(EnvironmentProblem, match=f"something else than a rendezvous of Rung .* at port {port}"):
            endpoint.connect("127.0.0.1", port)
        server.shutdown(socket.SHUT_RDWR)
