"""Reads the flags of `rung submit` that all schedulers share."""

from __future__ import annotations

import argparse
import re

from rung.errors import ConfigError
from rung.launch.submit.flags import SUBMITTED
from rung.launch.submit.job import SubmitOptions
from rung.spec.flags import assignments_of
from rung.system.launcher_env import KEY_VARIABLE


def submit_options(options: argparse.Namespace) -> SubmitOptions:
    """The values of the flags that all schedulers share."""
    _refuse_bytes(options)
    return SubmitOptions(
        task=options.task,
        flags={name: getattr(options, name) for names in SUBMITTED.values() for name in names},
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
        raise ConfigError(f"--env {key}: each job gets a key of its own when it is submitted or started. Leave it out.")
    return key, value


def _refuse_bytes(options: argparse.Namespace) -> None:
    """Refuse arguments that are no valid text in this locale: a script or manifest could not contain them."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
                raise ConfigError(f"{name} {text!r} is no text in UTF-8. Choose a name that is.")


def pair_of(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{flag} takes KEY=VALUE, not {text!r}.")
    return key, value
