"""The flags of `rung checkpoints`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    checkpoints = commands.add_parser(
        "checkpoints",
        help="list the checkpoints of a run and check them",
        description="List the checkpoints of a run, check every byte of them, and show which one --resume would use. "
        "Exits with 1 if any is damaged.",
    )
    checkpoints.add_argument("run", metavar="RUN", help="a run directory, or its folder of checkpoints")
    checkpoints.add_argument("--quick", action="store_true", help="check the sizes of files, not their content")
    checkpoints.add_argument("--json", action="store_true", help="the list as JSON on standard output")
    checkpoints.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    from rung.cli.checkpoints_view import checkpoints_command

    return checkpoints_command(options.run, as_json=options.json, quick=options.quick)
