"""The flags of `rung train`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rung.errors import ConfigError
from rung.spec.config import FLAGS
from rung.spec.flags import TRAIN_FLAGS, add_settings, assignments_of
from rung.system.launcher_env import env_settings, external_rank

if TYPE_CHECKING:
    from rung.launch.train_command import TrainEnd


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
    return run_train(
        options.task,
        {name: getattr(options, name) for name in FLAGS},
        assignments_of(options.set),
        config_file=options.config,
        resume=options.resume,
        resume_if_there=options.resume_if_there,
        measures=options.measures,
    ).exit_code


def run_train(
    task: str,
    flags: Mapping[str, Any],
    assignments: Mapping[str, Any],
    *,
    config_file: str | None = None,
    resume: str | bool | None = None,
    resume_if_there: bool = False,
    measures: bool = True,
) -> TrainEnd:
    """`rung train`, with what its flags say; `rung.train` calls it, too."""
    from rung.launch.train_command import train

    if flags.get("strategy") == "auto":
        if resume or resume_if_there or external_rank() is not None:
            raise ConfigError("--strategy auto is for a new run that `rung train` starts itself. Name a strategy.")
        flags = _planned(task, flags, assignments, config_file, measures)
    return train(
        task,
        config_file=config_file,
        flags=flags,
        assignments=assignments,
        resume=resume,
        resume_if_there=resume_if_there,
    )


def _planned(
    task: str, flags: Mapping[str, Any], assignments: Mapping[str, Any], config_file: str | None, measures: bool
) -> dict[str, Any]:
    from rung.planner.auto import choose_flags

    if any(given.setting == "nnodes" and given.value != "1" for given in env_settings()):
        raise ConfigError("--strategy auto is for one machine, and the environment requests several. Name a strategy.")
    return choose_flags(
        task,
        config_file=config_file,
        flags=flags,
        assignments=assignments,
        measures=measures,
        log=lambda line: print(line, flush=True),
    )
