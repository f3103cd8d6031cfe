"""`rung submit slurm`: a job as a script for sbatch, and its submission."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

from rung.submit.flags import add_job, asked_of

if TYPE_CHECKING:
    from rung.submit.job import Job


def add_slurm(kinds: Any) -> None:
    slurm = kinds.add_parser(
        "slurm",
        help="by sbatch",
        description="Write a script for sbatch and submit it.",
        usage="rung submit slurm [flags] task",
    )
    add_job(slurm)
    slurm.set_defaults(call=_slurm)


def _slurm(options: argparse.Namespace) -> int:
    from rung.submit.job import describe

    job = describe(asked_of(options))
    sys.stdout.write(render(job))
    return 0


def render(job: Job) -> str:
    """The script."""
    return f"#!/bin/bash\nsrun {shlex.join(['rung', *job.words()])}\n"
