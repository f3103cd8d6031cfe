"""`rung submit`: what a job is made of, what is refused before it waits in a queue, and the script for Slurm."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rung.cli.main import build_parser, main
from rung.errors import ConfigError, RungError
from rung.launch.submit.job import SubmitOptions, SubmittedJob, describe, describe_each
from rung.launch.submit.slurm_script import Script, render
from tests.cli.test_commands_ranks import TASK

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A task file in the working directory, without a say in the device."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TASK.replace(', "device": "cpu"', ""))
    return "mine.py"


def asked(task: str, strategy: str | None = None, **others: Any) -> SubmitOptions:
    flags = {"strategy": strategy, **others.pop("flags", {})}
    return SubmitOptions(task=task, flags=flags, assignments=others.pop("assignments", {}), **others)


def script(*jobs: SubmittedJob, **others: Any) -> str:
    values = {"name": "mine", "program": ("rung",), "output": "x.out", "folder": "/home/me", "made_by": "rung submit"}
    return render(jobs, Script(**{**values, **others}))


def directives(text: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH --")]
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_a_run_in_a_store_is_begun_and_resumed_by_the_same_command(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("s3fs")
    words = ["submit", "slurm", task, "--dry-run", "--checkpoint-every", "2"]
    assert main([*words, "--out", "s3://bucket/mine"]) == 0
    text = capsys.readouterr().out
    assert "--out s3://bucket/mine --resume-if-there" in text
    assert re.fullmatch(r"runs/mine-[0-9a-f]{8}\.out", directives(text)["output"])  # on a disk, which Slurm needs
    assert main([*words, "--resume", "s3://bucket/mine"]) == 2
    assert "Use --out, and the same command begins the run or resumes it." in capsys.readouterr().err
    assert main([*words, "--out", "s3://me:verysecret@bucket/mine"]) == 2
    said = capsys.readouterr().err
    assert "must hold no user, password" in said and "verysecret" not in said


# -- the job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "nodes", "gpus", "nproc", "expected"),
    [
        (None, None, 0, None, ("single", (1, 1), "1")),
        (None, "2", 8, None, ("ddp", (2, 2), "8")),
        ("fsdp", "4", 8, None, ("fsdp", (4, 4), "8")),
        ("pp2,fsdp4", "2", 8, None, ("pp2,fsdp4", (2, 2), "4")),
        ("ddp", "2:4", 0, "3", ("ddp", (2, 4), "3")),
        ("dp4", None, 4, None, ("dp4", (1, 1), "1")),
        ("ddp", None, 0, "2:4", ("ddp", (1, 1), "2:4")),
    ],
)
def test_processes_follow_from_gpus_and_the_sizes_of_the_strategy(
    task: str, strategy: str, nodes: str, gpus: int, nproc: str, expected: tuple[str, tuple[int, int], str]
) -> None:
    job = describe(asked(task, strategy, nodes=nodes, gpus=gpus, flags={"nproc": nproc}))
    assert (job.strategy, job.nodes, job.processes) == expected


def test_the_words_of_a_job_are_a_command_that_rung_train_takes(task: str) -> None:
    flags = {"batch_size": "20", "shuffle": False, "compile": True, "out": "here", "clip": "0.5"}
    job = describe(asked(task, "fsdp", nodes="2", flags=flags, assignments={"model.width": "8", "nproc": "3"}))
    dashed = describe(asked(task, "pp2", nodes="2", flags={"split": "-x"}))
    assert "--split=-x" in dashed.words("head:1")
    assert shlex.join(job.words("head:1")) == (
        "train mine.py --strategy fsdp --nnodes 2 --nproc 3 --rdzv head:1 --out here --resume-if-there --batch-size 20 "
        "--no-shuffle --compile --clip 0.5 --set model.width=8"
    )


def test_settings_of_a_file_and_of_the_task_count(task: str) -> None:
    Path("run.toml").write_text('strategy = "zero1"\nnnodes = "2"\nnproc = "3"\n')
    job = describe(asked(task, config_file="run.toml"))
    assert (job.strategy, job.nodes, job.processes) == ("zero1", (2, 2), "3")
    assert job.settings == ("--config", "run.toml")
    assert describe(asked(task, config_file="run.toml", nodes="1", flags={"nproc": "4"})).nnodes == "1"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "tp3", "nodes": "2"}, "'tp3' is a layout of 3 processes, but the job has 4"),
        ({"strategy": "single", "nodes": "2"}, "'single' is one process, but the job has 2"),
        ({"strategy": "auto"}, "Name a strategy"),
        ({"strategy": "ddq"}, "ddq"),
        ({"flags": {"backend": "mpi"}}, "--backend mpi needs mpirun"),
        ({"flags": {"backend": "nccl"}}, "--gpus-per-node N"),
        ({"assignments": {"device": "cuda"}}, "--gpus-per-node N"),
        ({"assignments": {"device": "cpu"}, "gpus": 2}, "leave the 2 GPUs of each node idle"),
        ({"flags": {"nproc": "4"}, "gpus": 2}, "4 processes on nodes of 2 GPUs"),
        ({"strategy": "dp4", "gpus": 2}, "--strategy dp2"),
        ({"gpus": -1}, "--gpus-per-node -1"),
        ({"nodes": "0"}, "nodes must be at least 1"),
        ({"nodes": "two"}, "nodes is a number, or MIN:MAX"),
        ({"assignments": {"rdzv": "a:1"}}, "Leave out --set rdzv"),
        ({"assignments": {"rdzv_key": "file"}}, "Leave out --set rdzv_key"),
        ({"assignments": {"model.wdth": "8"}}, "width"),
        ({"flags": {"offload": "cpu"}, "strategy": "ddp", "nodes": "2"}, "shards no parameters"),
        ({"resume": "nowhere"}, "there is no run in nowhere"),
        ({"assignments": {"keep_best": "loss:min", "eval_every": "never"}}, "eval_every=never turns them off"),
        ({"name": "***"}, "no letter and no digit"),
        ({"flags": {"out": "."}}, "names no directory"),
    ],
)
def test_what_cannot_be_is_refused_before_the_queue(task: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RungError, match=message.replace("(", r"\(")):
        describe(asked(task, **values))


def test_a_tracker_that_is_missing_counts_where_the_nodes_have_the_same_software(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert describe(asked(task, flags={"log": "mlflow"})).strategy == "single"
    with pytest.raises(RungError, match="mlflow"):
        describe(asked(task, flags={"log": "mlflow"}), is_installed=True)


def test_a_run_that_is_there_is_gone_on_with_only_if_asked(task: str) -> None:
    Path("here").mkdir()
    Path("here/config.toml").write_text('# rung 0.1: mine, ddp2\nstrategy = "ddp"\nnproc = "2"\nbatch_size = 10\n')
    with pytest.raises(ConfigError, match=r"here holds a run already\. Resume it with --resume here"):
        describe(asked(task, flags={"out": "here"}))
    job = describe(asked(task, resume="here"))
    assert (job.out, job.strategy, job.processes) == ("here", "ddp", "2")
    assert describe(asked(task, "fsdp", resume="here", gpus=4)).processes == "4"
    with pytest.raises(ConfigError, match="would change its numbers"):
        describe(asked(task, resume="here", flags={"batch_size": "12"}))


def test_what_the_user_should_know_is_told(task: str) -> None:
    saving = {"checkpoint_every": "10"}
    assert describe(asked(task, "tp2", gpus=8, flags=saving)).notes == ("tp2 uses 2 of the 8 GPUs of each node",)
    assert describe(asked(task, "ddp", gpus=8, flags=saving)).notes == ()
    assert describe(asked(task, "ddp", assignments={"keep_best": "loss"})).notes == ()
    assert "without --checkpoint-every" in describe(asked(task, "ddp")).notes[0]
    elastic = {"nproc": "1", **saving}
    (waits,) = describe(asked(task, "single", nodes="1:3", flags=elastic)).notes
    assert waits == "with all nodes, single uses 1 of 3 processes; the others are spares"
    uneven, waits = describe(asked(task, "pp2", nodes="1:3", flags=elastic)).notes
    assert "uses 2 of 3" in uneven and "--nodes 1:3: pp2 does not fit the fewest" in waits
    assert describe(asked(task, "ddp", nodes="1:3", flags=elastic)).notes == ()


def test_each_strategy_of_an_array_takes_the_nodes_that_it_needs(task: str) -> None:
    jobs = describe_each(asked(task, nodes="2", gpus=4, flags={"out": "all"}), ["single", "ddp", "tp4", "pp2,ddp4"])
    assert [(job.nodes[1], job.processes) for job in jobs] == [(1, "1"), (2, "4"), (1, "4"), (2, "4")]
    assert [job.out for job in jobs] == ["all/single", "all/ddp", "all/tp4", "all/pp2-ddp4"]


@pytest.mark.parametrize(
    ("values", "strategies", "message"),
    [
        ({}, ["ddp", "ddp"], "each of them once"),
        ({"strategy": "ddp"}, ["fsdp"], "--strategy ddp is for one"),
        ({"resume": "runs/x"}, ["fsdp"], "--resume runs/x is for one"),
    ],
)
def test_an_array_is_of_new_runs(task: str, values: dict[str, Any], strategies: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_each(asked(task, **values), strategies)


# -- the script ------------------------------------------------------------------------------------------------------


def test_the_script_asks_for_what_the_job_needs(task: str) -> None:
    job = describe(asked(task, "fsdp", nodes="4", gpus=8, assignments={"workers": "2"}))
    found = directives(script(job, options={"partition": "gpu", "exclusive": None}))
    expected = {"nodes": "4", "ntasks-per-node": "1", "gpus-per-node": "8", "cpus-per-task": "24", "partition": "gpu"}
    assert expected.items() <= found.items()
    assert {"requeue", "exclusive", "open-mode", "signal"} <= found.keys()


def test_a_job_without_gpus_asks_for_none_and_of_one_node_has_no_meeting(task: str) -> None:
    text = script(describe(asked(task)))
    assert "gpus-per-node" not in directives(text)
    assert "--rdzv" not in text and "$head" not in text


def test_what_the_user_says_to_sbatch_wins(task: str) -> None:
    found = directives(script(describe(asked(task)), options={"cpus-per-task": "7", "output": "mine.txt"}))
    assert (found["cpus-per-task"], found["output"]) == ("7", "mine.txt")


def run_shell(text: str, tmp_path: Path, task_id: str = "0") -> list[str]:
    """The words that srun gets when bash runs the script, with Slurm's programs pretended."""
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in {
        "srun": 'printf "%s\\0" "$@" > words; printf "%s\\0" "${RUNG_RDZV_KEY-}" "${NOTE-}" > variables',
        "scontrol": "echo '   NodeAddr=10.0.0.7 NodeHostName=n7 Version=22'",
        "squeue": "true",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "20007", "SLURMD_NODENAME": "n7", "SLURM_CPUS_PER_TASK": "2"}
    variables |= {"SLURM_ARRAY_TASK_ID": task_id, "SLURM_JOB_NUM_NODES": "3", "PATH": f"{programs}:/usr/bin:/bin"}
    (tmp_path / "job.sh").write_text(text, encoding="utf-8")
    done = subprocess.run(["bash", "-eu", "job.sh"], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return (tmp_path / "words").read_bytes().decode().split("\0")[:-1]


def variables_of_srun(tmp_path: Path) -> list[str]:
    """The key of the job and NOTE, as srun has seen them in `run_shell`."""
    return (tmp_path / "variables").read_bytes().decode().split("\0")[:-1]


# Each would make a file `pwned` if a shell, bash's history or sbatch read more into it than its characters.
HOSTILE = (
    "a\ntouch pwned\n#", "a\n#SBATCH --wrap=touch", "$(touch pwned)", "`touch pwned`", "a b'c\"d$HOME",
    "'; touch pwned; '", "!touch", "a;touch pwned", "a\\", '\\"', "a\r\ntouch pwned", "\x1b[2Jx", "* ?", "~",
    "é\u2028\x85x", '"$head:$port"',
)  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
def test_the_shell_reads_the_words_as_they_were_given(task: str, tmp_path: Path, value: str) -> None:
    Path(value).mkdir()
    task = str(Path(value, "mine.py"))
    Path(task).write_text(Path("mine.py").read_text())
    job = describe(asked(task, "ddp", nodes="2", flags={"out": value}, environment=(("NOTE", value),)))
    job = replace(job, settings=("--set", f"x={value}"))
    text = script(job, made_by=f"rung submit {value}", program=(value, "rung"))
    words = run_shell(text, tmp_path)
    assert words[words.index("--out") + 1] == value
    assert words[words.index("--rdzv") + 1] == "10.0.0.7:10007"
    assert words[words.index(value) :][:4] == [value, "rung", "train", task]
    assert words[-1] == f"x={value}"
    assert variables_of_srun(tmp_path)[1] == value
    assert not Path("pwned").exists()
    # An array says the same in another place.
    jobs = [replace(job, out=out) for out in (value, "other")]
    words = run_shell(script(*jobs), tmp_path)
    assert words[words.index("--out") + 1] == value and not Path("pwned").exists()
    # sbatch reads no directives but those of this module.
    assert directives(text).keys() == directives(script(replace(job, out="x", environment=()))).keys()


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("place", ["output", "folder", "option"])
def test_a_directive_holds_one_line_or_is_refused(task: str, value: str, place: str) -> None:
    given = {"output": {"output": value}, "folder": {"folder": value}, "option": {"options": {"comment": value}}}[place]
    key, origin = {
        "output": ("output", "--out: the output file"),
        "folder": ("chdir", "the working directory"),
        "option": ("comment", "--comment"),
    }[place]
    if value.isprintable() and not (place == "output" and "\\" in value):
        # The rules of sbatch for quotes are also those of a shell, but for $ and `, which sbatch leaves alone.
        line = directives(script(describe(asked(task)), **given))[key]
        assert re.sub(r"\\(.)", r"\1", line.removeprefix('"').removesuffix('"')) == value
    else:
        with pytest.raises(ConfigError, match=re.escape(f"{origin} {value!r} has a")):
            script(describe(asked(task)), **given)


def test_a_path_that_begins_with_a_hyphen_is_no_flag(task: str, tmp_path: Path) -> None:
    Path("-mine.py").write_text(Path("mine.py").read_text())
    Path("-run.toml").write_text("seed = 3\n")
    job = describe(asked("-mine.py", flags={"out": "-x"}, config_file="-run.toml"))
    words = run_shell(script(job), tmp_path)
    options = build_parser().parse_args(words[words.index("rung") + 1 :])
    assert [Path(path) for path in (options.task, options.out, options.config)] == [
        Path("-mine.py"),
        Path("-x"),
        Path("-run.toml"),
    ]


def test_every_start_of_several_nodes_makes_a_key(task: str, tmp_path: Path) -> None:
    """srun passes it on, also of a job that is submitted with --export; it is in no file and in no argument."""
    text = script(describe(asked(task, nodes="2")), setup=("set -x",))
    found = []
    for _ in range(2):
        words = run_shell(text.replace("set -x", "exec 2> traced; set -x"), tmp_path)
        assert "--export=ALL" in words[: words.index("rung")]
        found.append(variables_of_srun(tmp_path)[0])
        assert re.fullmatch("[0-9a-f]{64}", found[-1])
        assert found[-1] not in " ".join(words) + text + Path("traced").read_text()
    assert found[0] != found[1]
    run_shell(script(describe(asked(task))), tmp_path)
    assert variables_of_srun(tmp_path)[0] == "", "one node has nobody to know"


def test_each_task_of_an_array_has_its_own_words(task: str, tmp_path: Path) -> None:
    jobs = describe_each(asked(task, nodes="2", gpus=2, flags={"out": "all"}), ["single", "pp2,ddp2"])
    text = script(*jobs)
    assert directives(text)["array"] == "0-1"
    first, second = (run_shell(text, tmp_path, number) for number in "01")
    assert "--rdzv" not in first and first[first.index("--out") + 1] == "all/single"
    assert "--ntasks=1" in first and "--ntasks=2" in second
    assert second[second.index("--strategy") + 1] == "pp2,ddp2"
    assert second[second.index("--rdzv") + 1] == "10.0.0.7:10007"


# -- the command -----------------------------------------------------------------------------------------------------


def submit(*arguments: str) -> int:
    return main(["submit", "slurm", *arguments])


def test_a_dry_run_prints_the_script_and_leaves_nothing(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(task, "--nodes", "2", "--time", "30", "--env", "KEY=some value", "--dry-run") == 0
    found = capsys.readouterr()
    assert found.out.startswith("#!/bin/bash\n#SBATCH --job-name=mine-ddp\n") and found.err.startswith(
        "note: without --checkpoint-every"
    )
    assert "export KEY='some value'" in found.out
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == {"mine.py"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sbatch", "nodes=3"], "use --nodes instead"),
        (["--sbatch", "partition=x"], "use --partition instead"),
        (["--sbatch", "ntasks=4"], "the script sets this itself"),
        (["--sbatch", "=4"], "--sbatch takes KEY=VALUE, not '=4'"),
        (["--sbatch", "two words"], "as KEY=VALUE or KEY, not 'two words'"),
        (["--env", "a-b=1"], "cannot be the name of a variable"),
        (["--env", "a"], "--env takes KEY=VALUE, not 'a'"),
        (["--notice", "20"], "grace_seconds=30"),
        (["--mem", "64Q"], "a number and K, M, G or T: 64G"),
        (["--cpus-per-task", "abc"], "is no number of cores"),
        (["--partition", "a\nrm -rf x"], "--partition 'a\\nrm -rf x' has a line break"),
        (["--partition", ""], "--partition has an empty value"),
        (["--out", "a\nrm -rf x"], "--out: the output file 'a\\nrm -rf x.out' has a line break"),
        (["--out", "a\\b"], "has a backslash"),
        (["--out", "a\udcff"], "is no text in UTF-8"),
        (["--sbatch", "comment=a\nb"], "--comment 'a\\nb' has a line break"),
        (["--sbatch", "a\nb"], "as KEY=VALUE or KEY"),
        (["--sbatch", 'exclusive"x'], "as KEY=VALUE or KEY"),
        (["--env", "RUNG_RDZV_KEY=0123456789abcdef"], "a key of its own"),
        (["--sbatch", "no-requeue"], "the script sets this itself"),
        (["--notice", "70000"], "at most 65535"),
        (["--nodes", "2:4", "--nproc", "1"], "Use --nodes 4"),
    ],
)
def test_flags_of_the_scheduler_are_checked(
    task: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(task, *flags, "--dry-run") == 2
    assert message in capsys.readouterr().err


def test_the_notice_is_longer_than_saving_may_take(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(task, "--set", "grace_seconds=300", "--dry-run") == 0
    assert directives(capsys.readouterr().out)["signal"] == "USR1@330"


@pytest.mark.parametrize(
    ("time", "message"),
    [
        ("1", "--time 1 is 60 s"),
        ("1:30", "--time 1:30 is 90 s"),
        ("1h", "--time '1h' is no Slurm time"),
        ("90", ""),
        ("0-1", ""),
        ("2-12:00:00", ""),
        ("UNLIMITED", ""),
    ],
)
def test_a_time_limit_leaves_time_to_train(
    task: str, time: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(task, "--time", time, "--dry-run") == (2 if message else 0)
    assert message in capsys.readouterr().err


def test_processes_are_advised_for_each_machine(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(task, "--nodes", "2", "--nproc", "3", "--strategy", "pp3", "--dry-run") == 2
    assert "3 do not divide among 2 machines" in capsys.readouterr().err
    assert submit(task, "--nodes", "2", "--nproc", "3", "--strategy", "pp4", "--dry-run") == 2
    assert "Use --nproc 2 on each of 2 machines" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["here", "-x", "a b"])
def test_the_script_is_for_its_user_alone(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    """It holds the values of --env. One that lay there before, open to all or a link, does not stay."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "sbatch").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{tmp_path}/words"\necho 7\n')
    (tmp_path / "programs" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'programs'}:/usr/bin:/bin")
    Path("elsewhere").write_text("")
    Path(f"{out}.sbatch").symlink_to("elsewhere")
    for _ in range(2):
        assert submit(task, f"--out={out}", "--env", "TOKEN=secret") == 0
        path = Path(f"{out}.sbatch")
        assert "export TOKEN=secret" in path.read_text() and path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
    assert Path("elsewhere").read_text() == ""
    assert Path("words").read_text().splitlines() == ["--parsable", str(tmp_path / f"{out}.sbatch")]


def test_a_machine_without_slurm_is_told_so(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit(task) == 2
    assert "there is no sbatch here" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} - {"__pycache__"} == {"mine.py"}


def test_a_flag_of_rung_train_that_is_another_one_here(
    task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rung", "submit", "slurm", task, "--nnodes", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "Did you mean '--nodes'?\nrung submit slurm --help" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["rung", "train", task, "--partition", "x"])
    with pytest.raises(SystemExit):
        main()
    assert "'--partition' here. It is a flag of rung submit slurm.\n" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["rung", "train", task, "--strategi", "ddp"])
    with pytest.raises(SystemExit):
        main()
    assert "Did you mean '--strategy'?" in capsys.readouterr().err  # `rung compare` has one that is nearer


def test_the_document_shows_the_script_that_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "slurm.md").read_text()
    shown = re.search(r"\n    (rung submit slurm [^\n]* --dry-run)\n\n<!-- script.*?```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["/home/me/project/.venv/bin/rung", *shlex.split(shown.group(1))[1:]])
    assert main() == 0
    assert capsys.readouterr().out.replace(str(ROOT), "/home/me/project") == shown.group(2)
