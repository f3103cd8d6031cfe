"""`rung submit slurm`: its flags, and the submission of what `slurm_script` writes. Imports no torch by itself."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.errors import ConfigError, EnvironmentProblem
from rung.submit.flags import add_job, asked_of, pair_of
from rung.submit.slurm_script import Script, render

if TYPE_CHECKING:
    from rung.submit.job import Job

# Options of sbatch that have a flag here, and what they are for.
_OPTIONS = {
    "partition": "NAME",
    "account": "NAME",
    "qos": "NAME",
    "time": "TIME",
    "constraint": "WHAT",
    "mem": "SIZE",
    "cpus-per-task": "N",
}
_HELPS = {
    "time": "limit, as in 30, 4:00:00 or 2-12; at its end the job saves, queues again and goes on",
    "mem": "memory of each node, as in 64G",
    "cpus-per-task": "cores of each node (default: one for each process and data worker)",
    "constraint": "features of the nodes, as in 'a100|h100'",
}
# Those that the script needs for itself, or that have another name here.
_TAKEN = {
    "job-name": "--name", "nodes": "--nodes", "gpus-per-node": "--gpus-per-node", "array": "--strategies",
    "signal": "--notice", "ntasks-per-node": "", "ntasks": "", "chdir": "", "wrap": "", "parsable": "", "requeue": "",
    "no-requeue": "",
    "open-mode": "",
}  # fmt: skip
_NOTICE, _MOST_NOTICE = 120, 65535


def add_slurm(kinds: Any) -> None:
    slurm = kinds.add_parser(
        "slurm",
        help="by sbatch",
        description="Write a script for sbatch and submit it: one launcher on each node, which starts its processes. "
        "Before the time limit and on a preemption the job saves its state, queues again, and goes on from there. The "
        "run's directory must be on a disk that all nodes share.",
        usage="rung submit slurm [flags] task",  # of so many flags, a list of names only hides the list below
    )
    add_job(slurm, nodes="machines (default 1)", add_own=_add_own)
    slurm.set_defaults(call=_slurm)


def _add_own(slurm: argparse.ArgumentParser) -> None:
    group = slurm.add_argument_group("Slurm")
    for key, metavar in _OPTIONS.items():
        group.add_argument(f"--{key}", metavar=metavar, help=_HELPS.get(key, "as of sbatch"))
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="any other option of sbatch, as in exclusive"
    )
    group.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="shell before it starts: 'module load cuda/12.4'"
    )
    group.add_argument(
        "--notice",
        type=int,
        metavar="SECONDS",
        help=f"to save and queue again before the time limit (default {_NOTICE}, or grace_seconds + 30)",
    )
    group.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="an array of jobs, one for each strategy, for `rung report`",
    )


def _slurm(options: argparse.Namespace) -> int:
    extra = _options_of(options)
    jobs = _jobs_of(options)
    least, most = jobs[0].nodes
    if least != most:
        raise ConfigError(
            f"--nodes {least}:{most}: Slurm gives a job its nodes for good. Use --nodes {most}; after the loss of one, "
            "the job queues again and goes on from its newest checkpoint, and --resume takes another number."
        )
    base = jobs[0].out.rstrip("/") if len(jobs) == 1 else str(Path(jobs[0].out).parent)  # beside the runs
    notice = options.notice if options.notice is not None else max(_NOTICE, jobs[0].grace_seconds + 30)
    if notice > _MOST_NOTICE:
        raise ConfigError(f"--notice {notice}: Slurm takes at most {_MOST_NOTICE}.")
    if notice <= jobs[0].grace_seconds:
        raise ConfigError(
            f"--notice {notice} is no longer than grace_seconds={jobs[0].grace_seconds}, which saving may take. Use "
            f"--notice {jobs[0].grace_seconds + 30}."
        )
    limit = _seconds(options.time) if options.time is not None else None
    if limit is not None and limit <= notice:
        raise ConfigError(
            f"--time {options.time} is {limit} s, and the job is told to save {notice} s before its end: it would not "
            f"get to train. Use a longer --time, or a shorter --notice (more than {jobs[0].grace_seconds})."
        )
    script = Script(
        name=jobs[0].name,
        program=_program(),
        output=base.replace("%", "%%") + ("-%a.out" if len(jobs) > 1 else ".out"),
        folder=str(Path.cwd()),
        made_by=shlex.join(["rung", *(word for word in sys.argv[1:] if word != "--dry-run")]),
        options=extra,
        setup=tuple(options.setup),
        notice=notice,
    )
    text = render(jobs, script)
    for note in dict.fromkeys(note for job in jobs for note in job.notes):
        sys.stderr.write(f"note: {note}\n")
    if options.dry_run:
        sys.stdout.write(text)
        return 0
    path = Path(f"{base}.sbatch")
    number = _submit(text, path)
    _tell(jobs, number, path, script.output)
    return 0


def _seconds(text: str) -> int | None:
    """A time limit as Slurm writes it; None without one."""
    if text.lower() in ("0", "unlimited", "infinite"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ConfigError(
            f"--time {text!r} is no time of Slurm's. It takes minutes, minutes:seconds, hours:minutes:seconds, or days "
            "in front: 90, 1:30:00, 2-12:00:00."
        )
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:  # hours come first
        numbers += [0] * (3 - len(numbers))
    elif len(numbers) == 1:
        numbers = [0, *numbers, 0]
    elif len(numbers) == 2:
        numbers = [0, *numbers]
    hours, minutes, seconds = numbers
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _options_of(options: argparse.Namespace) -> dict[str, str | None]:
    """What else sbatch is told, by name."""
    found: dict[str, str | None] = {}
    for key in _OPTIONS:
        value = getattr(options, key.replace("-", "_"))
        if value is not None:
            found[key] = value
        if value == "":
            raise ConfigError(f"--{key} {value!r} is nothing that sbatch takes.")
    if not re.fullmatch(r"[1-9]\d*", found.get("cpus-per-task") or "1"):
        raise ConfigError(f"--cpus-per-task {found['cpus-per-task']!r} is no number of cores.")
    if not re.fullmatch(r"\d+[KMGT]?", found.get("mem") or "0", re.IGNORECASE):
        raise ConfigError(f"--mem {found['mem']!r} is no size of Slurm's. It takes a number and K, M, G or T: 64G.")
    for text in options.sbatch:
        key, value = pair_of(text, "--sbatch") if "=" in text else (text, None)
        key = key.lstrip("-")
        if not re.fullmatch("[A-Za-z][A-Za-z0-9-]*", key):
            raise ConfigError(f"--sbatch takes an option of sbatch as KEY=VALUE or KEY, not {text!r}.")
        if key in _TAKEN or key in found or key in _OPTIONS:
            flag = _TAKEN.get(key, f"--{key}")
            raise ConfigError(f"--sbatch {text}: {f'use {flag} for that' if flag else 'the script says that itself'}.")
        found[key] = value
    return found


def _jobs_of(options: argparse.Namespace) -> list[Job]:
    """One job, or one for each of several strategies."""
    from rung.submit.job import describe, describe_each

    asked = asked_of(options)
    if options.strategies:
        return describe_each(asked, options.strategies, is_installed=True)
    return [describe(asked, is_installed=True)]


def _program() -> tuple[str, ...]:
    """This very `rung`, whatever the path of a shell on the nodes finds."""
    if Path(sys.argv[0]).name == "rung":
        return (str(Path(shutil.which(sys.argv[0]) or sys.argv[0]).absolute()),)
    return (sys.executable, "-m", "rung")


def _submit(text: str, path: Path) -> str:
    """Write the script and hand it to sbatch. The number of the job."""
    if shutil.which("sbatch") is None:
        raise EnvironmentProblem(
            "there is no sbatch here, so this machine cannot submit to Slurm. Run this on a login node of the cluster, "
            "or write the script there with --dry-run."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # one that others may read, or a link
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)  # with the values of --env, which may be secrets
    # As a whole path: one that begins with a hyphen would be taken for an option.
    done = subprocess.run(["sbatch", "--parsable", str(path.absolute())], capture_output=True, text=True)
    if done.returncode != 0:
        raise EnvironmentProblem(f"sbatch refused {path}:\n{done.stderr.strip()}")
    sys.stderr.write(done.stderr)  # what a cluster has to say to every job
    return done.stdout.strip().partition(";")[0]


def _tell(jobs: list[Job], number: str, path: Path, output: str) -> None:
    """What was submitted, and how to look after it."""
    first = jobs[0]
    size = f"{_many(first.nodes[1], 'node')} with {_many(first.num_processes, 'process')} each"
    what = f"{first.strategy}, {size}" if len(jobs) == 1 else f"an array of {len(jobs)} strategies"
    rows = {"script": str(path), "output": output, "cancel": f"scancel {number}"}
    if len(jobs) == 1:
        rows["watch"] = f"rung watch {shlex.quote(first.out)}  (once it runs)"
    else:
        rows["report"] = f"rung report {shlex.join(job.out for job in jobs)}  (when they are done)"
    lines = [f"submitted job {number}: {what}", *(f"  {key:<8}{value}" for key, value in rows.items())]
    sys.stdout.write("\n".join(lines) + "\n")


def _many(count: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{count} {word if count == 1 else plural}"
