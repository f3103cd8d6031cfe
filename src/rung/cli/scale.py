"""The flags of `rung scale`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    scale = commands.add_parser(
        "scale",
        help="change the number of processes of a running job",
        description="Change the number of processes of a job that was started with --nproc MIN:MAX. No step is lost.",
    )
    scale.add_argument("run", help="the run's directory")
    scale.add_argument("processes", type=int, help="the new number of processes")
    scale.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    from rung.launch.rendezvous.elastic import scale

    print(scale(options.run, options.processes))
    return 0
