"""The flags of `rung report`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="show runs and comparisons on one page",
        description="Show runs of `rung train` and comparisons of `rung compare` side by side, on one page that needs "
        "no network: speed, memory, loss curves and, for comparisons, messages, timelines and predictions.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, or a JSON file of rung compare")
    report.add_argument(
        "--out", default="report.html", metavar="FILE", help="FILE.html (default report.html), FILE.md or FILE.json"
    )
    report.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from rung.compare.report.command import report_command

    return report_command(options.runs, options.out)
