"""The flags of `rung watch`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="show the progress of a run, from another console",
        description="Show a run live: progress, time left and, for every rank, its own time in each phase, its wait "
        "for data and its memory; a rank that the others wait for is red. Ends with the run, or with Ctrl-C, which "
        "does not affect the run.",
    )
    watch.add_argument("run", nargs="?", metavar="RUN", help="the run's directory; default: the newest in runs/")
    watch.add_argument("--once", action="store_true", help="show it once; the default if the output is not a terminal")
    watch.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from rung.cli.watch_view import watch_command

    return watch_command(options.run, once=options.once)
