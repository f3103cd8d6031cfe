"""The flags of `rung profile merge`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="merge the traces of rung train --profile",
        description="Merge the traces of `rung train --profile STEPS`.",
    )
    kinds = profile.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(profile))
    merge = kinds.add_parser(
        "merge",
        help="merge the traces of all ranks into one file",
        description="Merge the traces of all ranks into one, with a process for each rank and a common clock. Perfetto "
        "(ui.perfetto.dev) opens it.",
    )
    merge.add_argument("run", metavar="RUN", help="the run's directory")
    merge.add_argument("--steps", metavar="STEPS", help="the steps to merge, if several ranges were traced: 10:13")
    merge.add_argument("--out", metavar="FILE", help="FILE.json or FILE.json.gz; default: in RUN/profile")
    merge.set_defaults(call=_merge)


def _merge(options: argparse.Namespace) -> int:
    from rung.cli.profile_merge import merge_command

    return merge_command(options.run, steps=options.steps, out=options.out)
