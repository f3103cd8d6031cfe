"""The flags of `rung calibrate`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.cli.machine_flags import refuse_external_rank
from rung.errors import ConfigError


def add(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine for rung plan",
        description="Measure matrix products, memory bandwidth, the cost of an operation and collectives with several "
        "numbers of processes, and write a hardware record. `rung plan TASK --cluster 2xhere` uses it. It "
        "takes less than two minutes.",
    )
    calibrate.add_argument(
        "--nproc",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of processes (default 1 2 4, or 1 2 4 8 up to the number of GPUs)",
    )
    calibrate.add_argument("--out", metavar="FILE.toml", help="file of the record (default runs/hardware.toml)")
    calibrate.add_argument("--json", dest="as_json", action="store_true", help="print the path of the record as JSON")
    calibrate.set_defaults(call=_run, starts_ranks=True, for_main=True)


def _run(options: argparse.Namespace) -> int:
    from rung.planner.calibrate import calibrate_command

    refuse_external_rank("calibrate")
    if options.nproc and min(options.nproc) < 1:
        raise ConfigError(f"--nproc {min(options.nproc)}: at least 1 process is needed.")
    return calibrate_command(sorted(set(options.nproc or ())), options.out, as_json=options.as_json)
