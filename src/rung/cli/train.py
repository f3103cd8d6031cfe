"""The flags of `rung train`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.errors import ConfigError
from rung.spec.config import FLAGS
from rung.spec.flags import TRAIN_FLAGS, add_settings, assignments_of
from rung.system.launcher_env import env_settings, external_rank


def add(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a task under a strategy",
        description="Train a task under a strategy. Under mpirun, torchrun or srun each process is a rank already.",
        usage="rung train [flags] task",  # argparse would list every flag before the help
    )
    train.add_argument("task", help="a task file, or a directory with a task.py")
    add_settings(train, TRAIN_FLAGS)
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="RUN",
        help="continue a run from its newest checkpoint; without RUN, the task's newest run",
    )
    train.add_argument(
        "--resume-if-there",
        action="store_true",
        help="continue the run of --out if it exists, else start it: for jobs that are restarted",
    )
    train.add_argument(
        "--no-measure",
        dest="measures",
        action="store_false",
        help="with --strategy auto: plan without measuring layouts on this GPU",
    )
    train.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from rung.launch.train_command import train

    flags = {name: getattr(options, name) for name in FLAGS}
    if flags["strategy"] == "auto":
        flags = _planned(options, flags)
    return train(
        options.task,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        resume=options.resume,
        resume_if_there=options.resume_if_there,
    )


def _planned(options: argparse.Namespace, flags: dict[str, Any]) -> dict[str, Any]:
    from rung.planner.auto import choose_flags

    if options.resume or options.resume_if_there or external_rank() is not None:
        raise ConfigError("--strategy auto is for a new run that `rung train` starts itself. Name a strategy.")
    if any(given.setting == "nnodes" and given.value != "1" for given in env_settings()):
        raise ConfigError("--strategy auto is for one machine, and the environment requests several. Name a strategy.")
    return choose_flags(
        options.task,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        measures=options.measures,
        log=lambda line: print(line, flush=True),
    )
