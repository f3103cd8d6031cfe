"""The flags of `rung bench collectives`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.cli.machine_flags import BACKENDS, DEVICES, add_machines, given


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure communication", description="Measure communication.")
    kinds = bench.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(bench))
    collectives = kinds.add_parser(
        "collectives",
        help="check and time all_reduce, broadcast and the others",
        description="Check and measure the collectives of a backend over sizes and types: a table, a chart (SVG) and "
        "records (JSON), with bandwidths as defined by nccl-tests. Starts processes on this machine, or takes part in "
        "a job of torchrun, mpirun or srun. Exits with 1 if a result is wrong.",
    )
    _add_collectives(collectives)
    collectives.set_defaults(call=_run, starts_ranks=True)


def _add_collectives(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    add_machines(where)
    where.add_argument("--backend", choices=BACKENDS, help="default: nccl with GPUs, else gloo")
    where.add_argument("--device", choices=DEVICES, help="of the tensors (default: that of the backend)")
    what = parser.add_argument_group("what")
    what.add_argument("--ops", nargs="+", metavar="NAME", help="collectives to measure (default: all ten)")
    what.add_argument("--sizes", metavar="S", help="1K:256M (default) by powers of 4, 1K:1M:2 by 2, or a list: 4K,1M")
    what.add_argument("--dtypes", metavar="T,T", help="default float32,bfloat16")
    what.add_argument("--reduce", dest="reduction", choices=("sum", "avg", "min", "max"), help="default sum")
    what.add_argument("--seconds", type=float, metavar="X", help="time to spend on one size (default 0.2)")
    result = parser.add_argument_group("output")
    result.add_argument("--out", metavar="DIR", help="directory of records and chart (default runs/bench)")
    result.add_argument("--json", dest="as_json", action="store_true", help="the records as JSON on standard output")


def _run(options: argparse.Namespace) -> int:
    from rung.hardware.bench.command import collectives_command
    from rung.hardware.bench.options import BenchOptions

    return collectives_command(BenchOptions(**given(options)))
