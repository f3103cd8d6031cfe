"""The flags of `rung explain`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.spec.flags import add_settings, assignments_of

# The usual settings that change the placement of parameters or the messages; --set takes the others.
_FLAGS = {
    "where": ("strategy", "nproc", "schedule", "split", "sequence_parallel", "cp_form", "offload", "shard_by"),
    "how much": ("batch_size", "batch_tokens", "micro_batch", "lora"),
    "how": ("precision", "clip", "activation_checkpointing", "compress"),
}


def add(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show what a strategy will do with a task",
        description="Show the placement of each parameter, the messages of a step, and the schedule of a pipeline, "
        "from a dry run of the real training code. No process is started, so --nproc may be any number.",
    )
    explain.add_argument("task", help="a task file, or a directory with a task.py")
    add_settings(explain, _FLAGS, nproc="processes of the job; default: the product of the strategy's sizes")
    result = explain.add_argument_group("output")
    result.add_argument("--out", dest="svg", metavar="FILE.svg", help="also draw it")
    result.add_argument("--json", action="store_true", help="the explanation as JSON on standard output")
    explain.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    from rung.planner.explain.command import explain_command

    flags = {name: getattr(options, name) for names in _FLAGS.values() for name in names}
    return explain_command(
        options.task,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        out=options.svg,
        as_json=options.json,
    )
