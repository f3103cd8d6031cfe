"""The flags of `rung new`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rung.errors import ConfigError
from rung.spec.template import write_template


def add(commands: Any) -> None:
    new = commands.add_parser(
        "new", help="write a commented task file that runs", description="Write a commented task file that runs."
    )
    new.add_argument("name", help="a directory to create, with a task.py in it")
    new.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    if not options.name:
        raise ConfigError("the name of the directory to create is empty. Give a name: rung new NAME.")
    path = write_template(Path(options.name))
    print(f"wrote {path}\ntry: rung train {path} --nproc 2")
    return 0
