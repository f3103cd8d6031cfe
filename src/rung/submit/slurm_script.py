"""The script that sbatch gets: short, readable, and fit to be submitted by hand.

One launcher runs on each node. Slurm tells it when the job must go, by SIGUSR1 some time before the time limit and by
SIGTERM on a preemption; it saves the state and ends with 75, and the script puts the job back into the queue. Every
start of the job is the same command, which goes on with the run if there is one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rung.environment import KEY_VARIABLE
from rung.errors import RESUME_EXIT_CODE, ConfigError
from rung.version import VERSION

if TYPE_CHECKING:
    from rung.submit.job import Job

# Before the user's own lines, so that a `set -x` there does not print it.
_KEY = f"""
# The launchers know each other by a key, which every start of the job makes anew and keeps in its environment alone.
{KEY_VARIABLE}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {KEY_VARIABLE}
"""
_MEETING = r"""
# The nodes meet at the first one, at a port of this job's own.
head=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((10000 + SLURM_JOB_ID % 20000))
"""
_TRAP = """
# A signal to the job is for the training, which saves its state; this script waits for its end.
trap : TERM USR1
"""
# A job that was cancelled, or that Slurm itself requeues, is COMPLETING. One that goes on is RUNNING or, for a moment
# after the notice, SIGNALING.
_ENDING = f"""
code=$?
# {RESUME_EXIT_CODE}: asked to leave, the state is saved. Unless the job was cancelled, it goes on later.
if [ $code -eq {RESUME_EXIT_CODE} ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != COMPLETING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
_ENDPOINT = "\0"  # stands for an address that the shell fills in; no argument can be it
# Where values of directives come from that the user has not given under the name of the option.
_ORIGINS = {"output": "--out: the output file", "chdir": "the working directory"}


@dataclass(frozen=True)
class Script:
    """What the script says beside the job itself."""

    name: str
    program: tuple[str, ...]  # the command that is `rung` on the nodes
    output: str  # the file for what the job says; %a is the number of an array's task
    folder: str  # in which it runs
    made_by: str  # the command that wrote it
    options: Mapping[str, str | None] = field(default_factory=dict)  # further ones of sbatch; None: without a value
    setup: tuple[str, ...] = ()  # lines of shell before anything runs
    notice: int = 120  # seconds before the time limit at which the job is told


def render(jobs: Sequence[Job], script: Script) -> str:
    """The text of the script. Several jobs are the tasks of an array."""
    several = max(job.nodes[1] for job in jobs) > 1
    exports = [f"export {key}={shlex.quote(value)}" for key, value in jobs[0].environment]
    heading = f"# Written by rung {VERSION}: {script.made_by}".replace("\n", "\n# ")
    parts = [
        "\n".join(["#!/bin/bash", *_directives(jobs, script)]),
        heading,
        _KEY if several else "",
        "\n".join([*script.setup, *exports]),
        _TRAP,
        _MEETING if several else "",
        _choice(jobs) if len(jobs) > 1 else "",
        _command(jobs, script.program) + "\n" + _ENDING.strip(),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _directives(jobs: Sequence[Job], script: Script) -> list[str]:
    """What the job asks of Slurm, and how it wants to be treated. What the user names himself wins."""
    cores = max(job.num_processes * (1 + job.workers) for job in jobs)
    asked: dict[str, str | None] = {
        "job-name": script.name,
        "nodes": str(max(job.nodes[1] for job in jobs)),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cores),
        **({"gpus-per-node": str(jobs[0].gpus)} if jobs[0].gpus else {}),
        **({"array": f"0-{len(jobs) - 1}"} if len(jobs) > 1 else {}),
        **script.options,
    }
    treated = {
        "chdir": script.folder,
        "output": script.output,
        "open-mode": "append",
        "requeue": None,
        "signal": f"USR1@{script.notice}",
    }
    asked |= {key: value for key, value in treated.items() if key not in asked}
    return [_directive(key, value, is_own=key not in script.options) for key, value in asked.items()]


def _directive(key: str, value: str | None, *, is_own: bool) -> str:
    """A comment of the script, which ends with its line: what follows a line break would be run as a command."""
    if value is None:
        return f"#SBATCH --{key}"
    origin = _ORIGINS.get(key, f"--{key}") if is_own else f"--{key}"
    if not value.isprintable():
        raise ConfigError(
            f"{origin} {value!r} has a line break or another character that cannot be printed, and what sbatch is "
            "asked for must fit into one line of its script. Choose a name without."
        )
    if is_own and key == "output" and "\\" in value:
        # It would take %% and %a in the name as they stand, and leave the backslash out.
        raise ConfigError(
            f"{origin} {value!r} has a backslash, which Slurm does not take in the name of an output file. Choose a "
            "name without, or name the file yourself: --sbatch output=FILE."
        )
    return f"#SBATCH --{key}={_word(value)}"


def _word(value: str) -> str:
    """sbatch takes words in double quotes, where a backslash makes the next character an ordinary one."""
    if all(c.isalnum() or c in "-_./:,@%+=[]" for c in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', r"\"") + '"'


def _choice(jobs: Sequence[Job]) -> str:
    """Which of the jobs a task of the array is."""
    cases = [
        f"    {number}) nodes={job.nodes[1]}; own=({_shell(_own_words(job))}) ;;" for number, job in enumerate(jobs)
    ]
    return "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"])


def _own_words(job: Job) -> list[str]:
    return job.own_words(_ENDPOINT if job.nodes[1] > 1 else None)


def _command(jobs: Sequence[Job], program: Sequence[str]) -> str:
    """A launcher on each node. They end one after the other, and none may be killed while it saves."""
    job = jobs[0]
    # Of a job submitted with --export, srun would pass on no variables but those named there.
    steps = ["srun", "--export=ALL", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=0"]
    if len({job.nodes for job in jobs}) > 1:
        steps += ['--nodes="$nodes"', '--ntasks="$nodes"']
    own = _shell(_own_words(job)) if len(jobs) == 1 else '"${own[@]}"'
    what = _shell([*program, "train", job.task])
    lines = [" ".join(steps), what, f"{own} --resume-if-there", _shell(job.settings)]
    return " \\\n    ".join(line for line in lines if line)


def _shell(words: Sequence[str]) -> str:
    return " ".join('"$head:$port"' if word == _ENDPOINT else shlex.quote(word) for word in words)
