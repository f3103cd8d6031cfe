"""The flags of commands that look into a run: `rung watch` and `rung profile`. Part of `cli.py`."""

from __future__ import annotations

import argparse
from typing import Any


def add_watching(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="show what a run is doing, from another console",
        description="Show a run while it goes on: progress, time left and, of every rank, its own time in each phase, "
        "its wait for data and its memory; a rank that the others wait for in red. Ends with the run, or with Ctrl-C, "
        "which leaves the run alone.",
    )
    watch.add_argument("run", nargs="?", metavar="RUN", help="the run's directory; default: the newest in runs/")
    watch.add_argument("--once", action="store_true", help="one picture; so it is where the output is no terminal")
    watch.set_defaults(call=_watch)

    profile = commands.add_parser(
        "profile",
        help="put traces of rung train --profile together",
        description="Put traces of `rung train --profile STEPS` together.",
    )
    kinds = profile.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(profile))
    merge = kinds.add_parser(
        "merge",
        help="one file from those of all ranks",
        description="Make one trace from those of all ranks, with a process for each rank and on one clock. Perfetto "
        "(ui.perfetto.dev) opens it.",
    )
    merge.add_argument("run", metavar="RUN", help="the run's directory")
    merge.add_argument("--steps", metavar="STEPS", help="which, if several were traced: as in 10:13")
    merge.add_argument("--out", metavar="FILE", help="FILE.json or FILE.json.gz; default: in RUN/profile")
    merge.set_defaults(call=_merge)


def _watch(options: argparse.Namespace) -> int:
    from rung.watch_view import watch_command

    return watch_command(options.run, once=options.once)


def _merge(options: argparse.Namespace) -> int:
    from rung.profile_merge import merge_command

    return merge_command(options.run, steps=options.steps, out=options.out)
