"""`rung submit`: one command for each scheduler. A part of `cli.py`."""

from __future__ import annotations

from typing import Any

from rung.submit.kubernetes import add_kubernetes
from rung.submit.slurm import add_slurm


def add_submit(commands: Any) -> None:
    """A scheduler adds its own command to `kinds`."""
    submit = commands.add_parser(
        "submit",
        help="train a task on a cluster",
        description="Hand a task to a scheduler, which starts it on its machines, and again after a preemption. What "
        "cannot be is refused now, not in the queue.",
    )
    kinds = submit.add_subparsers(title="where", metavar="WHERE", required=True, parser_class=type(submit))
    add_slurm(kinds)
    add_kubernetes(kinds)
