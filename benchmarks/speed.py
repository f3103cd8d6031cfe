"""How fast Rung takes a step, beside a hand-written torch loop, Accelerate, Fabric, and the Trainers of both makers.

python -m benchmarks.speed --device cpu
python -m benchmarks.speed --device cuda --compile both
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.cases import Case, find_cases
from benchmarks.contenders import CONTENDERS, missing_package
from benchmarks.contenders.common import LOG_EVERY
from benchmarks.measure import Plan, measure
from rung.system.processes import num_cores

_RESULTS = Path(__file__).parent / "results"
_COMPILE = {"no": [False], "yes": [True], "both": [False, True]}


def main(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.steps is not None and (options.steps < 1 or options.steps % LOG_EVERY):
        parser.error(
            f"--steps must be a multiple of {LOG_EVERY}: the clock is read with the loss, every {LOG_EVERY} steps"
        )
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    compile_choice = options.compile or ("both" if options.device == "cuda" else "no")
    known = find_cases(options.device, _COMPILE[compile_choice])
    cases = _chosen(parser, known, options.only, options.ddp_of_one)
    console = Console() if sys.stdout.isatty() else Console(width=110)  # a file takes the whole table
    contenders = []
    for name in [name for name in CONTENDERS if name in options.contenders]:
        missing = missing_package(name)
        if missing is None:
            contenders.append(name)
        else:
            console.print(f"{name} is left out: {missing} is not installed")
    out = options.out or _RESULTS / f"speed-{options.device}.json"
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.speed", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts(options.device),
        "cases": {},
    }
    for case in cases:
        threads = options.threads or case.threads or max(1, num_cores() // case.num_ranks)
        plan = Plan(case, tuple(contenders), options.steps or case.steps, options.repeats, threads)
        content["cases"][case.name] = report.summarise(plan, measure(plan))
        report.write(out, content)  # after each case, so that an interruption costs one case alone
    console.print(report.table(content["cases"]))
    console.print(f"written to {out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, help="steps in a timed block; default: as fits the case")
    parser.add_argument("--repeats", type=int, default=7, help="timed blocks of each contender")
    parser.add_argument("--threads", type=int, help="of each process; default: the cores, shared out")
    parser.add_argument("--compile", choices=tuple(_COMPILE), help="default: both on cuda, no on cpu")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="only these cases")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--ddp-of-one", action="store_true", help="also ddp with a single process")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/speed-DEVICE.json")
    return parser


def _chosen(parser: argparse.ArgumentParser, known: list[Case], only: list[str] | None, ddp_of_one: bool) -> list[Case]:
    if only is None:
        return [case for case in known if not case.only_on_request or (ddp_of_one and case.is_ddp_of_one)]
    names = [case.name for case in known]
    unknown = [name for name in only if name not in names]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r} here; there are: {', '.join(names)}")
    return [case for case in known if case.name in only]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
