"""The flags of `rung plan`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.spec.flags import add_settings, assignments_of

# Settings that change memory and time. Without --strategy, the planner chooses one.
_FLAGS = {
    "where": ("strategy", "sequence_parallel", "cp_form", "shard_by"),
    "how much": ("batch_size", "batch_tokens", "micro_batch", "lora"),
    "how": ("precision", "clip", "ema", "swa_start", "activation_checkpointing", "compile", "offload", "compress"),
}


def add(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="which strategy to use, and what memory and time it costs",
        description="Estimate memory and time of all sensible layouts on a cluster by dry runs of the real training "
        "code, and recommend one. No device is needed, so that a job for many GPUs can be planned on a laptop; where "
        "the planned device is here, the best layouts take some steps on it. Exits with 1 if nothing fits.",
    )
    plan.add_argument("task", help="a task file, or a directory with a task.py")
    plan.add_argument("--cluster", metavar="WHAT", help="such as 8xH100, or '64 nodes x 8 H200, nvlink, 400Gb/s'")
    plan.add_argument("--hardware", metavar="FILE.toml", help="records of devices and links of your own")
    plan.add_argument(
        "--no-measure",
        dest="measures",
        action="store_false",
        help="only model; by default the best layouts are measured, in a minute at most, if the device is here",
    )
    add_settings(plan, _FLAGS)
    result = plan.add_argument_group("output")
    result.add_argument("--all", dest="show_all", action="store_true", help="list every layout, not only the best")
    result.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    plan.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    from rung.planner.command import plan_command

    flags = {name: getattr(options, name) for names in _FLAGS.values() for name in names}
    return plan_command(
        options.task,
        cluster=options.cluster,
        hardware=options.hardware,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        measures=options.measures,
        show_all=options.show_all,
        as_json=options.json,
    )
