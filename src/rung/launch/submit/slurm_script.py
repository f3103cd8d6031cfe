"""Renders the script for sbatch: short, readable, and fit to be submitted by hand.

One launcher runs on each node. Slurm sends it SIGUSR1 some time before the time limit and SIGTERM on a preemption; it
saves the state and exits with 75, and the script requeues the job. Every start of the job is the same command, which
resumes the run if there is one.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rung.errors import RESUME_EXIT_CODE, ConfigError
from rung.spec.version import VERSION
from rung.system.launcher_env import KEY_VARIABLE

if TYPE_CHECKING:
    from rung.launch.submit.job import SubmittedJob

# Comes before the user's own lines, so that a `set -x` there does not print the key.
_KEY = f"""
# The launchers authenticate each other by a key. Every start of the job makes a new one, only in its environment.
{KEY_VARIABLE}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n')
export {KEY_VARIABLE}
"""
_RENDEZVOUS = r"""
# The rendezvous is on the first node, at a port of this job's own.
head=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
port=$((10000 + SLURM_JOB_ID % 20000))
"""
_TRAP = """
# Signals to the job are for the launchers, which save the state; this script waits until they exit.
trap : TERM USR1
"""
# A job that was cancelled, or that Slurm itself requeues, is COMPLETING. Any other is RUNNING or, for a moment after
# the notice, SIGNALING.
_ENDING = f"""
code=$?
# {RESUME_EXIT_CODE}: stopped by a signal, the state is saved. Unless the job was cancelled, requeue it.
if [ $code -eq {RESUME_EXIT_CODE} ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != COMPLETING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""
_ENDPOINT = "\0"  # placeholder for the address that the shell fills in; no real argument contains it
# The origins of directives that no flag of their name sets.
_ORIGINS = {"output": "--out: the output file", "chdir": "the working directory"}


@dataclass(frozen=True)
class Script:
    """The parts of the script beside the job itself."""

    name: str
    program: tuple[str, ...]  # the command that is `rung` on the nodes
    output: str  # the file for the job's output; %a is the number of an array's task
    folder: str  # the working directory
    made_by: str  # the command that wrote the script
    options: Mapping[str, str | None] = field(default_factory=dict)  # further ones of sbatch; None: without a value
    setup: tuple[str, ...] = ()  # lines of shell before anything runs
    notice: int = 120  # seconds from the signal to the time limit


def render(jobs: Sequence[SubmittedJob], script: Script) -> str:
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
        _RENDEZVOUS if several else "",
        _choice(jobs) if len(jobs) > 1 else "",
        _command(jobs, script.program) + "\n" + _ENDING.strip(),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _directives(jobs: Sequence[SubmittedJob], script: Script) -> list[str]:
    """The #SBATCH lines. Options of the user override the script's own."""
    cores = max(job.num_processes * (1 + job.workers) for job in jobs)
    directives: dict[str, str | None] = {
        "job-name": script.name,
        "nodes": str(max(job.nodes[1] for job in jobs)),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cores),
        **({"gpus-per-node": str(jobs[0].gpus)} if jobs[0].gpus else {}),
        **({"array": f"0-{len(jobs) - 1}"} if len(jobs) > 1 else {}),
        **script.options,
    }
    defaults = {
        "chdir": script.folder,
        "output": script.output,
        "open-mode": "append",
        "requeue": None,
        "signal": f"USR1@{script.notice}",
    }
    directives |= {key: value for key, value in defaults.items() if key not in directives}
    return [_directive(key, value, is_own=key not in script.options) for key, value in directives.items()]


def _directive(key: str, value: str | None, *, is_own: bool) -> str:
    """One #SBATCH comment. It must not contain a line break: bash would run what follows as a command."""
    if value is None:
        return f"#SBATCH --{key}"
    origin = _ORIGINS.get(key, f"--{key}") if is_own else f"--{key}"
    if not value.isprintable():
        raise ConfigError(
            f"{origin} {value!r} has a line break or another character that cannot be printed, but an option of sbatch "
            "must fit into one line of the script. Choose a name without."
        )
    if is_own and key == "output" and "\\" in value:
        # Slurm would not expand %% and %a in such a name, and drop the backslash.
        raise ConfigError(
            f"{origin} {value!r} has a backslash, which Slurm does not take in the name of an output file. Choose a "
            "name without, or name the file yourself: --sbatch output=FILE."
        )
    return f"#SBATCH --{key}={_quoted(value)}"


def _quoted(value: str) -> str:
    """Quote a value for sbatch, where a backslash inside double quotes escapes the next character."""
    if all(c.isalnum() or c in "-_./:,@%+=[]" for c in value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', r"\"") + '"'


def _choice(jobs: Sequence[SubmittedJob]) -> str:
    """The shell code that selects the job of this task of the array."""
    cases = [
        f"    {number}) nodes={job.nodes[1]}; own=({_shell(_own_words(job))}) ;;" for number, job in enumerate(jobs)
    ]
    return "\n".join(["case $SLURM_ARRAY_TASK_ID in", *cases, "esac"])


def _own_words(job: SubmittedJob) -> list[str]:
    return job.own_words(_ENDPOINT if job.nodes[1] > 1 else None)


def _command(jobs: Sequence[SubmittedJob], program: Sequence[str]) -> str:
    """The srun command that starts a launcher on each node."""
    job = jobs[0]
    # --export=ALL: in a job submitted with --export, srun passes on only the variables named there.
    # --kill-on-bad-exit=0: launchers exit one after the other, and none may be killed while it saves.
    steps = ["srun", "--export=ALL", '--cpus-per-task="$SLURM_CPUS_PER_TASK"', "--kill-on-bad-exit=0"]
    if len({job.nodes for job in jobs}) > 1:
        steps += ['--nodes="$nodes"', '--ntasks="$nodes"']
    own = _shell(_own_words(job)) if len(jobs) == 1 else '"${own[@]}"'
    what = _shell([*program, "train", job.task])
    lines = [" ".join(steps), what, f"{own} --resume-if-there", _shell(job.settings)]
    return " \\\n    ".join(line for line in lines if line)


def _shell(words: Sequence[str]) -> str:
    return " ".join('"$head:$port"' if word == _ENDPOINT else shlex.quote(word) for word in words)
