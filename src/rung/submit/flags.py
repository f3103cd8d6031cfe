"""Flags that a job has under every scheduler, and what was asked by them. Imports no torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from rung.environment import KEY_VARIABLE
from rung.errors import ConfigError
from rung.flags import TRAINED, add_settings, assignments_of

if TYPE_CHECKING:
    from rung.submit.job import Asked

# Those of `rung train`, but for what the job says itself: how many machines, where they meet, and by which key.
_OWN = ("nnodes", "rdzv", "rdzv_key")
_SUBMITTED = {title: tuple(name for name in names if name not in _OWN) for title, names in TRAINED.items()}


def add_job(
    parser: argparse.ArgumentParser,
    nodes: str = "machines, or MIN:MAX (default 1)",
    add_own: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """The task, the machines, what the scheduler adds of its own, and all flags of `rung train`."""
    parser.add_argument("task", help="a task file, or a directory with a task.py")
    job = parser.add_argument_group("job")
    job.add_argument("--nodes", metavar="N", help=nodes)
    job.add_argument("--gpus-per-node", dest="gpus", type=int, default=0, metavar="N", help="default: none")
    job.add_argument("--name", metavar="NAME", help="of the job (default: of task and strategy)")
    job.add_argument("--resume", metavar="RUN", help="go on with a run from its newest checkpoint")
    job.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a variable of the job's environment; what is submitted holds its value",
    )
    job.add_argument("--dry-run", action="store_true", help="print what would be submitted, and nothing else")
    if add_own is not None:
        add_own(parser)
    add_settings(
        parser,
        _SUBMITTED,
        strategy="how to spread the task; default: single, or ddp for several processes",
        nproc="processes on each machine; default: one per GPU, or 1",
        backend="auto, gloo or nccl; gloo lets processes share a GPU",
    )


def asked_of(options: argparse.Namespace) -> Asked:
    """What was asked by the flags of `add_job`."""
    from rung.submit.job import Asked

    _refuse_bytes(options)
    return Asked(
        task=options.task,
        flags={name: getattr(options, name) for names in _SUBMITTED.values() for name in names},
        assignments=assignments_of(options.set),
        config_file=options.config,
        nodes=options.nodes,
        gpus=options.gpus,
        name=options.name,
        resume=options.resume,
        environment=tuple(_variable_of(text) for text in options.env),
    )


def _variable_of(text: str) -> tuple[str, str]:
    key, value = pair_of(text, "--env")
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", key):
        raise ConfigError(f"--env {text!r}: {key!r} cannot be the name of a variable.")
    if key == KEY_VARIABLE:
        raise ConfigError(f"--env {key}: every job gets a key of its own when it is submitted or starts. Leave it out.")
    return key, value


def _refuse_bytes(options: argparse.Namespace) -> None:
    """Arguments that are no text in this locale: neither a script nor a manifest could hold them."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ConfigError(f"{name} {text!r} is no text in UTF-8. Choose a name that is.")


def pair_of(text: str, flag: str) -> tuple[str, str]:
    """KEY and VALUE of a flag that takes both."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{flag} takes KEY=VALUE, not {text!r}.")
    return key, value
