"""The flags of `rung compare`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.cli.machine_flags import DEVICES, given, refuse_external_rank
from rung.spec.flags import add_settings, assignments_of

# Settings that are the same for all strategies, or that apply to those strategies that have them.
_FLAGS = {
    "where": (
        "nproc",
        "backend",
        "schedule",
        "split",
        "sequence_parallel",
        "cp_form",
        "offload",
        "shard_by",
        "servers",
    ),
    "how much": ("batch_size", "micro_batch", "lora", "steps", "seed"),
    "how": ("precision", "clip", "compile", "activation_checkpointing", "timeout"),
}


def add(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="run a task under several strategies and measure each",
        description="Run the same job under each strategy, in turns and in fresh processes, and compare time, memory, "
        "messages, losses and the planner's predictions. A strategy that fails is a row; the others go on. Exits with "
        "1 if all fail.",
        usage="rung compare [flags] task",
    )
    compare.add_argument("task", help="a task file, or a directory with a task.py")
    compare.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names, with settings of their own if needed: ddp 'ddp precision=bf16' (default: single ddp zero1 "
        "zero2 zero3)",
    )
    compare.add_argument("--repeats", type=int, metavar="N", help="runs of each strategy, in turns (default 2)")
    compare.add_argument("--warmup", type=int, metavar="N", help="steps that are not measured (default 5, or half)")
    compare.add_argument("--device", choices=DEVICES, help="as for rung train")
    add_settings(
        compare,
        _FLAGS,
        nproc="processes of strategies whose name has no size; default: one per GPU, or 2",
        steps="steps of each run (default 20)",
    )
    result = compare.add_argument_group("output")
    result.add_argument("--out", metavar="FILE.html", help="the report (default compare.html)")
    result.add_argument("--json", dest="json_file", metavar="FILE.json", help="the same data as JSON")
    result.add_argument("--markdown", metavar="FILE.md", help="the same as Markdown, for a README or an issue")
    result.add_argument("--no-predict", dest="predicts", action="store_false", help="without the planner's figures")
    compare.set_defaults(call=_run, starts_ranks=True)


def _run(options: argparse.Namespace) -> int:
    from rung.compare.command import compare_command
    from rung.compare.options import CompareOptions

    refuse_external_rank("compare")
    own = ("task", "repeats", "warmup", "out", "json_file", "markdown", "predicts")
    options_given = {key: value for key, value in given(options).items() if key in own}
    if options.strategies:
        options_given["strategies"] = tuple(options.strategies)
    flags = {name: getattr(options, name) for names in _FLAGS.values() for name in names}
    document, _ = compare_command(
        CompareOptions(
            **options_given,
            flags={**flags, "device": options.device},
            assignments=assignments_of(options.set),
            config_file=options.config,
        )
    )
    return 0 if any(row["status"] == "ok" for row in document["rows"]) else 1
