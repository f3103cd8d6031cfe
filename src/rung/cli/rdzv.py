"""The flags of `rung rdzv`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.errors import RESUME_EXIT_CODE


def add(commands: Any) -> None:
    rdzv = commands.add_parser(
        "rdzv",
        help="serve the rendezvous of a job on several machines",
        description="Serve the rendezvous of machines (--rdzv HOST:PORT) in a process of its own, so that the job "
        "survives the loss of any machine. Without it, the machine of that address serves it. Ends with Ctrl-C.",
    )
    rdzv.add_argument("place", metavar="[HOST:]PORT", help="a port on all interfaces, or on that of an address")
    rdzv.add_argument(
        "--once",
        action="store_true",
        help=f"exit when a job that used it has finished; with {RESUME_EXIT_CODE} if a signal comes first",
    )
    rdzv.set_defaults(call=_run)


def _run(options: argparse.Namespace) -> int:
    from rung.launch.rendezvous.elastic import serve_rendezvous

    def announce(address: str) -> None:
        print(f"machines can meet at {address}", flush=True)

    is_over = serve_rendezvous(options.place, announce, once=options.once)
    return RESUME_EXIT_CODE if options.once and not is_over else 0
