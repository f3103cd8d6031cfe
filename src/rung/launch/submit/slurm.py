"""`rung submit slurm`: submits the script that slurm_script.py renders."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rung.errors import ConfigError, EnvironmentProblem
from rung.launch.submit.flags import NOTICE_SECONDS, SBATCH_OPTIONS
from rung.launch.submit.job import SubmittedJob, describe, describe_each
from rung.launch.submit.options import pair_of, submit_options
from rung.launch.submit.slurm_script import Script, render
from rung.system.store import is_store

# Options that --sbatch refuses: the script sets them itself (""), or they have another name here.
_TAKEN = {
    "job-name": "--name", "nodes": "--nodes", "gpus-per-node": "--gpus-per-node", "array": "--strategies",
    "signal": "--notice", "ntasks-per-node": "", "ntasks": "", "chdir": "", "wrap": "", "parsable": "", "requeue": "",
    "no-requeue": "",
    "open-mode": "",
}  # fmt: skip
_MOST_NOTICE = 65535


def submit(options: argparse.Namespace) -> int:
    extra = _options_of(options)
    jobs = _jobs_of(options)
    least, most = jobs[0].nodes
    if least != most:
        raise ConfigError(
            f"--nodes {least}:{most}: a Slurm job has a fixed number of nodes. Use --nodes {most}; after the loss of "
            "one, the job is requeued and resumes from its newest checkpoint, and --resume takes another number."
        )
    # Beside the runs; of several runs in a store, in the folder of their local parts.
    several = str(Path(jobs[0].local_out).parent if not is_store(jobs[0].out) else Path(jobs[0].local_out))
    base = jobs[0].local_out.rstrip("/") if len(jobs) == 1 else several
    notice = options.notice if options.notice is not None else max(NOTICE_SECONDS, jobs[0].grace_seconds + 30)
    if notice > _MOST_NOTICE:
        raise ConfigError(f"--notice {notice}: Slurm takes at most {_MOST_NOTICE}.")
    if notice <= jobs[0].grace_seconds:
        raise ConfigError(
            f"--notice {notice} must be longer than grace_seconds={jobs[0].grace_seconds}, the time that saving may "
            f"take. Use --notice {jobs[0].grace_seconds + 30}."
        )
    limit = _seconds(options.time) if options.time is not None else None
    if limit is not None and limit <= notice:
        raise ConfigError(
            f"--time {options.time} is {limit} s, and the job must save {notice} s before its end: no time is left to "
            f"train. Use a longer --time, or a shorter --notice (more than {jobs[0].grace_seconds})."
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
    number = _call_sbatch(text, path)
    _print_summary(jobs, number, path, script.output)
    return 0


def _seconds(text: str) -> int | None:
    """Parse a time limit in Slurm's format; None if unlimited."""
    if text.lower() in ("0", "unlimited", "infinite"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if found is None:
        raise ConfigError(
            f"--time {text!r} is no Slurm time. Use minutes, minutes:seconds, hours:minutes:seconds, or days in front: "
            "90, 1:30:00, 2-12:00:00."
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
    """Further options of sbatch, by name; None for those without a value."""
    found: dict[str, str | None] = {}
    for key in SBATCH_OPTIONS:
        value = getattr(options, key.replace("-", "_"))
        if value is not None:
            found[key] = value
        if value == "":
            raise ConfigError(f"--{key} has an empty value. Give it one, or leave it out.")
    if not re.fullmatch(r"[1-9]\d*", found.get("cpus-per-task") or "1"):
        raise ConfigError(f"--cpus-per-task {found['cpus-per-task']!r} is no number of cores.")
    if not re.fullmatch(r"\d+[KMGT]?", found.get("mem") or "0", re.IGNORECASE):
        raise ConfigError(f"--mem {found['mem']!r} is no Slurm size. Use a number and K, M, G or T: 64G.")
    for text in options.sbatch:
        key, value = pair_of(text, "--sbatch") if "=" in text else (text, None)
        key = key.lstrip("-")
        if not re.fullmatch("[A-Za-z][A-Za-z0-9-]*", key):
            raise ConfigError(f"--sbatch takes an option of sbatch as KEY=VALUE or KEY, not {text!r}.")
        if key in _TAKEN or key in found or key in SBATCH_OPTIONS:
            flag = _TAKEN.get(key, f"--{key}")
            raise ConfigError(f"--sbatch {text}: {f'use {flag} instead' if flag else 'the script sets this itself'}.")
        found[key] = value
    return found


def _jobs_of(options: argparse.Namespace) -> list[SubmittedJob]:
    submitted = submit_options(options)
    if options.strategies:
        return describe_each(submitted, options.strategies, is_installed=True)
    return [describe(submitted, is_installed=True)]


def _program() -> tuple[str, ...]:
    """The command of this installation of Rung, which PATH on the nodes may not lead to."""
    if Path(sys.argv[0]).name == "rung":
        return (str(Path(shutil.which(sys.argv[0]) or sys.argv[0]).absolute()),)
    return (sys.executable, "-m", "rung")


def _call_sbatch(text: str, path: Path) -> str:
    """Write the script and pass it to sbatch. Returns the number of the job."""
    if shutil.which("sbatch") is None:
        raise EnvironmentProblem(
            "there is no sbatch here, so this machine cannot submit to Slurm. Run this on a login node of the cluster, "
            "or write the script there with --dry-run."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # The values of --env may be secrets: the file must be new (an old one may be a link, or readable by others).
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    # An absolute path: sbatch would take a name that begins with a hyphen for an option.
    done = subprocess.run(["sbatch", "--parsable", str(path.absolute())], capture_output=True, text=True)
    if done.returncode != 0:
        raise EnvironmentProblem(f"sbatch refused {path}:\n{done.stderr.strip()}")
    sys.stderr.write(done.stderr)  # some clusters print a message for every job
    return done.stdout.strip().partition(";")[0]


def _print_summary(jobs: list[SubmittedJob], number: str, path: Path, output: str) -> None:
    first = jobs[0]
    size = f"{_counted(first.nodes[1], 'node')} with {_counted(first.num_processes, 'process')} each"
    what = f"{first.strategy}, {size}" if len(jobs) == 1 else f"an array of {len(jobs)} strategies"
    rows = {"script": str(path), "output": output, "cancel": f"scancel {number}"}
    if len(jobs) == 1:
        rows["watch"] = f"rung watch {shlex.quote(first.out)}  (once it runs)"
    else:
        rows["report"] = f"rung report {shlex.join(job.local_out for job in jobs)}  (when they are done)"
    lines = [f"submitted job {number}: {what}", *(f"  {key:<8}{value}" for key, value in rows.items())]
    sys.stdout.write("\n".join(lines) + "\n")


def _counted(count: int, word: str) -> str:
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return f"{count} {word if count == 1 else plural}"
