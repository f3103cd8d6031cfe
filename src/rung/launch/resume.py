"""Resuming a run: finding its directory, restoring its settings, and refusing changes that would alter its numbers."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rung.checkpoint.manifest import steps_in
from rung.errors import ConfigError
from rung.spec.compatibility import inapplicable_settings
from rung.spec.config import SETTINGS, Resolved, RunConfig, read_toml, write_toml
from rung.spec.presets import ability_settings
from rung.spec.strategy import Layout
from rung.spec.task import HOOKS, ROLES, Task
from rung.system.launcher_env import mpi_rank
from rung.system.untrusted import lines_of, open_regular, parse_json, read_regular

CONFIG = "config.toml"
# Settings that determine the numbers. Others may differ: the strategy does not change the result.
_FIXED = ("batch_tokens", "batch_size", "seed", "shuffle", "lora", "swa_start")
# Not taken from a run's directory, which may have come from somebody else: a run must not choose network peers.
_MACHINES = ("nnodes", "rdzv", "rdzv_key", "rpc_host")
_MAX_HEADING = 2**12
_HEADING = re.compile(r"# rung \S+: (.*?), ")


def find_run(task: Task, resume: str | bool, out: str | None) -> Path:
    """The directory of the run to resume: the named one, that of --out, or the newest of this task."""
    if isinstance(resume, str) and out is not None and Path(resume).resolve() != Path(out).resolve():
        raise ConfigError(
            f"--resume {resume} and --out {out} are two directories, but a run is resumed in its own. Leave --out out."
        )
    if resume == "":
        raise ConfigError("--resume has an empty value. Name the directory of a run, or leave the value out.")
    named = resume if isinstance(resume, str) else out
    if named is not None:
        folder = Path(named)
        if not (folder / CONFIG).exists():
            raise ConfigError(f"there is no run in {folder}: it has no {CONFIG}.")
        owner = _task_of(folder)
        if owner not in (None, task.name):
            raise ConfigError(f"{folder} is a run of the task {owner!r}, not of {task.name!r}.")
        return folder
    found = [path.parent for path in Path("runs").glob(f"*/{CONFIG}") if _task_of(path.parent) == task.name]
    if not found:
        raise ConfigError(
            f"{Path('runs').resolve()} has no run of {task.name!r} to resume. Name its directory: --resume RUN."
        )
    return max(found, key=lambda folder: (folder / CONFIG).lstat().st_mtime)


def run_if_there(task: Task, resume: str | bool | None, out: str | None) -> Path | None:
    """The directory of --out if it holds a run to resume; None if a new run begins in it."""
    if resume:
        raise ConfigError(
            "--resume requires an existing run, but --resume-if-there begins one if there is none. Keep one of them."
        )
    if out is None:
        raise ConfigError("--resume-if-there looks for a run in the directory of --out. Name it: --out DIR.")
    folder = Path(out)
    if (folder / CONFIG).exists():
        return find_run(task, True, out)
    # The directory may have been removed while the job ran: ranks write checkpoints and metrics to it again.
    return folder if steps_in(folder / "checkpoints") or (folder / "metrics.jsonl").exists() else None


def _task_of(folder: Path) -> str | None:
    try:
        with open_regular(folder / CONFIG) as file:
            heading = file.readline(_MAX_HEADING).decode(errors="replace")
    except OSError:
        return None  # if this run is chosen, `read_toml` reports the error
    match = _HEADING.match(heading)
    return match.group(1) if match else None


def settings_of(folder: Path, given: set[str]) -> dict[str, Any] | None:
    """The settings of a run, as defaults beside those `given` now, without those that name machines. None if they are
    lost: those of the command apply then."""
    if not (folder / CONFIG).exists():
        return None
    found = read_toml(folder / CONFIG)
    known = {
        key: value
        for key, value in found.items()
        if (key in SETTINGS and key not in _MACHINES) or key.partition(".")[0] in ROLES
    }
    if given & {"steps", "epochs"}:  # both set the length of the run
        known = {key: value for key, value in known.items() if key not in ("steps", "epochs")}
    if "strategy" in given:  # these belong to the old one
        for key in ("schedule", "split"):
            known.pop(key, None)
    return known


def machines_left_out(folder: Path, config: RunConfig) -> str | None:
    """A note if the run had several machines, or an interface for RPC, and the job now has none."""
    found = read_toml(folder / CONFIG) if (folder / CONFIG).exists() else {}
    old = {key: found[key] for key in _MACHINES if key in found and found[key] != SETTINGS[key].default}
    missing = [f"{key}={value}" for key, value in old.items() if getattr(config, key) == SETTINGS[key].default]
    if not missing:
        return None
    return (
        f"the run was started with {', '.join(missing)}, which are not taken from its directory: give them again if "
        "wanted"
    )


def fit_to_layout(resolved: Resolved, layout: Layout) -> Resolved:
    """Drop settings of the old run that do not apply to the new layout, or to ranks that mpirun did not start."""
    # Compression and local steps change the numbers, and must not be dropped silently.
    useless = inapplicable_settings(layout) - ability_settings("compress", "local_steps")
    if resolved.config.backend == "mpi" and mpi_rank() is None:
        useless.add("backend")
    dropped: dict[str, Any] = {key: SETTINGS[key].default for key in useless if resolved.origins.get(key) == "run"}
    return replace(resolved, config=replace(resolved.config, **dropped))


def refuse_differences(task: Task, resolved: Resolved, base: Mapping[str, Any], folder: Path) -> None:
    """Refuse settings that differ from the run's and would change its numbers."""
    config = resolved.config
    for key in _FIXED:
        _compare(folder, key, base.get(key, SETTINGS[key].default), getattr(config, key))
    old = base.get("precision", SETTINGS["precision"].default)
    if (old == "fp64") != (config.precision == "fp64"):
        _compare(folder, "precision", old, config.precision)
    defaults = task.arguments()
    for key, value in resolved.arguments.items():
        if key.partition(".")[0] in HOOKS:  # which read, and may stop the run
            continue
        _compare(folder, key, base.get(key, defaults.get(key)), value)


def _compare(folder: Path, key: str, old: Any, new: Any) -> None:
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        old, new = list(old), list(new)
    if old != new:
        before = "not set" if old is None else f"{old!r}"
        raise ConfigError(
            f"the run in {folder} has {key} = {before}, and {new!r} would change its numbers. Leave it as it is, "
            "or start a new run."
        )


def new_length(base: Mapping[str, Any], config: RunConfig) -> str | None:
    """A note if the run gets another length."""
    old = {key: base.get(key) for key in ("steps", "epochs")}
    new = {"steps": config.steps, "epochs": config.epochs}
    if old == new:
        return None
    return f"the run now ends after {_length(new)}, not {_length(old)}; a learning-rate schedule follows the new total"


def _length(limits: Mapping[str, Any]) -> str:
    return " or ".join(f"{value} {key}" for key, value in limits.items() if value is not None) or "1 epochs"


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether the run's metrics show that it reached the length that `config` asks for.

    Its settings do not show that: they are written before the ranks start, and an attempt to extend the run may have
    failed then.
    """
    begun: dict[str, Any] = {}
    is_over, wanted = False, {"steps": config.steps, "epochs": config.epochs}
    path = folder / "metrics.jsonl"
    try:
        with open_regular(path) as file:
            for line in lines_of(file):
                if line.startswith((b'{"event": "start"', b'{"event": "resume"')):
                    begun, is_over = parse_json(line), False
                elif line.startswith(b'{"event": "end"'):
                    is_over = bool(parse_json(line))
    except (FileNotFoundError, ValueError):  # a last line that was cut short is a ValueError
        return False
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    return is_over and begun.get("length", wanted) == wanted


def write_settings(resolved: Resolved, folder: Path, heading: str) -> None:
    """Write config.toml of a run. An older one with other settings becomes config.1.toml, and so on."""
    # Replaced atomically, because machines that share the directory may read it meanwhile.
    path, partial = folder / CONFIG, folder / f".{CONFIG}.{os.getpid()}"
    partial.unlink(missing_ok=True)
    write_toml(resolved, partial, heading)
    if path.exists() and read_toml(path) != read_toml(partial):
        names = [old.name.split(".")[1] for old in folder.glob("config.*.toml")]
        number = max((int(name) for name in names if name.isdecimal()), default=0) + 1
        shutil.copyfile(path, folder / f"config.{number}.toml")
    partial.replace(path)


def claim(folder: Path, agree: Callable[[str], str], *, is_new: bool) -> None:
    """Mark the directory with the run's identity, on which all machines of the job agree.

    Otherwise files that another run left there, on one of the machines, could be taken for this run's.
    """
    mark = folder / ".state" / "run"
    try:
        own = read_regular(mark, _MAX_HEADING).decode()
    except FileNotFoundError:
        own = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{mark} cannot be read: {error}.") from None
    offered = own if own is not None and not is_new else uuid.uuid4().hex
    agreed = agree(offered)
    if not is_new and agreed != offered:
        raise ConfigError(f"{folder} is not the run that the other machines resume.")
    if is_new and agreed != own and any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        raise ConfigError(
            f"--out {folder} holds a run already. Choose another directory, remove it, or resume the run: --resume."
        )
    mark.parent.mkdir(parents=True, exist_ok=True)  # rank 0 has not created it if machines share no disk
    mark.write_text(agreed)
