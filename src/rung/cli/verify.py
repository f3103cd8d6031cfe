"""The flags of `rung verify`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.cli.machine_flags import refuse_external_rank
from rung.spec.flags import assignments_of


def add(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="prove that strategies give the same numbers on a task",
        description="Train a task for a few steps under each strategy and compare every parameter, buffer, loss and "
        "gradient norm with one process. Exits with 1 if any differs.",
    )
    verify.add_argument("task", help="a task file, or a directory with a task.py")
    verify.add_argument("--nproc", type=int, default=2, metavar="N", help="processes (default 2)")
    verify.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names separated by spaces, repeated flags, or 'all' (default)",
    )
    verify.add_argument("--steps", type=int, default=5, metavar="N", help="steps of each run (default 5)")
    verify.add_argument("--batch-size", type=int, metavar="N", help="samples in one step (default: the task's)")
    verify.add_argument("--micro-batch", type=int, metavar="N", help="samples in one forward pass of a process")
    verify.add_argument("--lora", metavar="HOW", help="adapters: r=16,alpha=32,targets=q_proj+v_proj")
    verify.add_argument(
        "--precision", choices=("fp64", "fp32"), default="fp64", help="fp64 to 1e-9 (default), or fp32 to 1e-5"
    )
    verify.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, or an argument of the task"
    )
    verify.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    verify.set_defaults(call=_run, for_main=True, starts_ranks=True)


def _run(options: argparse.Namespace) -> int:
    from rung.compare.verify import verify_command

    refuse_external_rank("verify")
    flags = {
        "batch_size": options.batch_size,
        "micro_batch": options.micro_batch,
        "steps": options.steps,
        "lora": options.lora,
    }
    return verify_command(
        options.task,
        num_ranks=options.nproc,
        strategies=options.strategies or ["all"],
        precision=options.precision,
        flags=flags,
        assignments=assignments_of(options.set),
        as_json=options.json,
    )
