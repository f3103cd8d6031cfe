"""The flags of commands that plan, measure and show: `rung plan`, `compare`, `bench`, `doctor`, `calibrate`, `report`.

A part of `cli.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

from rung.config import SETTINGS
from rung.environment import outside_place
from rung.errors import ConfigError
from rung.flags import add_settings, assignments_of

_BACKENDS, _DEVICES = ("auto", "gloo", "nccl", "mpi"), ("auto", "cpu", "cuda")
# Those of `rung compare`: what is the same for all strategies, and settings that each takes if it has a use for them.
_COMPARED = {
    "where": ("nproc", "backend", "schedule", "split", "sequence_parallel", "offload", "shard_by", "servers"),
    "how much": ("batch_size", "micro_batch", "steps", "seed"),
    "how": ("precision", "clip", "compile", "activation_checkpointing", "timeout"),
}

# Those of `rung plan`: what changes memory and time. It finds the strategy itself unless one is named.
_PLANNED = {
    "where": ("strategy", "sequence_parallel", "shard_by"),
    "how much": ("batch_size", "micro_batch"),
    "how": ("precision", "clip", "activation_checkpointing", "compress"),
}


def add_tools(commands: Any) -> None:
    """Without a value, each flag is what `Asked` of its command says."""
    _add_compare(commands)
    _add_plan(commands)
    bench = commands.add_parser(
        "bench", help="measure what training stands on", description="Measure what training stands on."
    )
    kinds = bench.add_subparsers(title="what", metavar="WHAT", required=True, parser_class=type(bench))
    collectives = kinds.add_parser(
        "collectives",
        help="all_reduce, broadcast and the others: correct, and how fast",
        description="Check and measure the collectives of a backend over sizes and types: a table, a chart (SVG) and "
        "records (JSON), with bandwidths as nccl-tests define them. Starts processes on this machine, or takes part in "
        "a job of torchrun, mpirun or srun. Exits with 1 if a result is wrong.",
    )
    _add_collectives(collectives)
    collectives.set_defaults(call=_collectives, starts_ranks=True)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or all of a job, before a long run",
        description="Check versions, names, ports, memory, limits, disk, GPUs and, with real ranks, the rendezvous, "
        "clocks, links and slow ranks: a verdict for each, and a fix. Starts processes on this machine, or takes part "
        "in a job of torchrun, mpirun or srun. Exits with 1 if a check failed.",
    )
    _add_machines(doctor)
    doctor.add_argument("--backend", choices=_BACKENDS, help="as for rung train")
    doctor.add_argument("--device", choices=_DEVICES, help="as for rung train")
    doctor.add_argument("--out", metavar="DIR", help="where runs will be written (default runs)")
    doctor.add_argument("--json", dest="as_json", action="store_true", help="the findings as JSON on standard output")
    doctor.set_defaults(call=_doctor, starts_ranks=True)

    calibrate = commands.add_parser(
        "calibrate",
        help="measure this machine for rung plan",
        description="Measure matrix products, memory bandwidth, the cost of an operation and collectives with several "
        "numbers of processes, and write them as a record of hardware. `rung plan TASK --cluster 2xhere` uses it. It "
        "takes less than two minutes.",
    )
    calibrate.add_argument(
        "--nproc",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of processes (default 1 2 4, or as many as there are GPUs)",
    )
    calibrate.add_argument("--out", metavar="FILE.toml", help="where the record goes (default runs/hardware.toml)")
    calibrate.add_argument("--json", dest="as_json", action="store_true", help="where it went, as JSON")
    calibrate.set_defaults(call=_calibrate, starts_ranks=True)

    report = commands.add_parser(
        "report",
        help="show runs and comparisons on one page",
        description="Show runs of `rung train` and comparisons of `rung compare` beside each other, on one page that "
        "needs no network: speed, memory, loss curves and, of comparisons, messages, timelines and predictions.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory, or a JSON file of rung compare")
    report.add_argument(
        "--out", default="report.html", metavar="FILE", help="FILE.html (default report.html), FILE.md or FILE.json"
    )
    report.set_defaults(call=_report)


def _add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="run a task under several strategies and measure each",
        description="Run the same job under each strategy, one after the other and in turns, in fresh processes: time, "
        "memory, messages, losses, and what the planner predicted. A strategy that fails is a row, and the others go "
        "on. Exits with 1 if all fail.",
        usage="rung compare [flags] task",
    )
    compare.add_argument("task", help="a task file, or a directory with a task.py")
    compare.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names, each with settings of its own if it has some: ddp 'ddp precision=bf16' (default: single ddp zero1 "
        "zero2 zero3)",
    )
    compare.add_argument("--repeats", type=int, metavar="N", help="runs of each, in turns (default 2)")
    compare.add_argument("--warmup", type=int, metavar="N", help="steps that are not measured (default 5, or half)")
    compare.add_argument("--device", choices=_DEVICES, help="as for rung train")
    add_settings(
        compare,
        _COMPARED,
        nproc="processes of strategies whose name has no size; default: one per GPU, or 2",
        steps="steps of each run (default 20)",
    )
    result = compare.add_argument_group("what comes out")
    result.add_argument("--out", metavar="FILE.html", help="the page (default compare.html)")
    result.add_argument("--json", dest="json_file", metavar="FILE.json", help="the same data as JSON")
    result.add_argument("--markdown", metavar="FILE.md", help="the same as Markdown, for a README or an issue")
    result.add_argument("--no-predict", dest="predicts", action="store_false", help="without the planner's figures")
    compare.set_defaults(call=_compare, starts_ranks=True)


def _add_collectives(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where")
    _add_machines(where)
    where.add_argument("--backend", choices=_BACKENDS, help="default: nccl with GPUs, else gloo")
    where.add_argument("--device", choices=_DEVICES, help="where the tensors are (default: as the backend)")
    what = parser.add_argument_group("what")
    what.add_argument("--ops", nargs="+", metavar="NAME", help="some of the collectives (default: all ten)")
    what.add_argument("--sizes", metavar="S", help="1K:256M (default) by powers of 4, 1K:1M:2 by 2, or a list: 4K,1M")
    what.add_argument("--dtypes", metavar="T,T", help="default float32,bfloat16")
    what.add_argument("--reduce", dest="reduction", choices=("sum", "avg", "min", "max"), help="default sum")
    what.add_argument("--seconds", type=float, metavar="X", help="to spend on timing one size (default 0.2)")
    result = parser.add_argument_group("what comes out")
    result.add_argument("--out", metavar="DIR", help="where records and chart go (default runs/bench)")
    result.add_argument("--json", dest="as_json", action="store_true", help="the records as JSON on standard output")


def _add_machines(group: argparse._ActionsContainer) -> None:
    group.add_argument("--nproc", type=int, metavar="N", help="processes here (default: one for each GPU, 2 without)")
    group.add_argument("--nnodes", type=int, metavar="N", help="machines on which this command is started (default 1)")
    group.add_argument("--rdzv", metavar="HOST:PORT", help="where they meet")
    group.add_argument("--rdzv-key", metavar="FILE", help=SETTINGS["rdzv_key"].metadata["help"])


def _given(options: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key != "call" and value is not None}


def _compare(options: argparse.Namespace) -> int:
    from rung.compare.command import Asked, compare_command

    place = outside_place()
    if place is not None:
        raise ConfigError(
            f"`rung compare` starts processes of its own, and {place.launcher} has started {place.size} of it. Start "
            "it once, by itself."
        )
    own = ("task", "repeats", "warmup", "out", "json_file", "markdown", "predicts")
    given = {key: value for key, value in _given(options).items() if key in own}
    if options.strategies:
        given["strategies"] = tuple(options.strategies)
    flags = {name: getattr(options, name) for names in _COMPARED.values() for name in names}
    return compare_command(
        Asked(
            **given,
            flags={**flags, "device": options.device},
            assignments=assignments_of(options.set),
            config_file=options.config,
        )
    )


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="which strategy to use, and what memory and time it costs",
        description="Look at all sensible layouts of a cluster by pretended steps of the real training code, and say "
        "which to use and what each costs. Nothing is trained and no device is needed, so that a job for many GPUs can "
        "be planned on a laptop. Exits with 1 if nothing fits.",
    )
    plan.add_argument("task", help="a task file, or a directory with a task.py")
    plan.add_argument("--cluster", metavar="WHAT", help="as in 8xH100, or '64 nodes x 8 H200, nvlink, 400Gb/s'")
    plan.add_argument("--hardware", metavar="FILE.toml", help="records of devices and links of your own")
    add_settings(plan, _PLANNED)
    result = plan.add_argument_group("what comes out")
    result.add_argument("--all", dest="show_all", action="store_true", help="every layout, not only the best")
    result.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    plan.set_defaults(call=run_plan)


def run_plan(options: argparse.Namespace) -> int:
    from rung.planner.command import plan_command

    flags = {name: getattr(options, name) for names in _PLANNED.values() for name in names}
    return plan_command(
        options.task,
        cluster=options.cluster,
        hardware=options.hardware,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        show_all=options.show_all,
        as_json=options.json,
    )


def _collectives(options: argparse.Namespace) -> int:
    from rung.bench.command import Asked, collectives_command

    return collectives_command(Asked(**_given(options)))


def _calibrate(options: argparse.Namespace) -> int:
    from rung.planner.calibrate import calibrate_command

    if options.nproc and min(options.nproc) < 1:
        raise ConfigError(f"--nproc {min(options.nproc)}: at least one process measures.")
    return calibrate_command(sorted(set(options.nproc or ())), options.out, as_json=options.as_json)


def _doctor(options: argparse.Namespace) -> int:
    from rung.doctor.command import Asked, doctor_command

    return doctor_command(Asked(**_given(options)))


def _report(options: argparse.Namespace) -> int:
    from rung.report.command import report_command

    return report_command(options.runs, options.out)
