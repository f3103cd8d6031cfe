"""How fast Rung takes a step, beside a hand-written torch loop and the libraries that are installed.

python -m benchmarks.speed --device cpu
python -m benchmarks.speed --device cuda --compile both
python -m benchmarks.speed --show

The tables of README.md and docs/speed.md are written from the results of both; --show does only that.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import report
from benchmarks.cases import Case, find_cases
from benchmarks.contenders import CONTENDERS, can_take, missing_package
from benchmarks.contenders.common import LOG_EVERY
from benchmarks.measure import Plan, measure
from rung.system.processes import num_cores

_RESULTS = Path(__file__).parent / "results"
_LIBRARIES = {
    "rung": "Rung", "accelerate": "Accelerate", "fabric": "Fabric", "trainer": "Hugging Face Trainer",
    "lightning": "Lightning Trainer", "deepspeed": "DeepSpeed", "ray": "Ray Train", "torchtitan": "torchtitan",
}  # fmt: skip
_JOBS = {
    "gpt124m": "GPT 124 M on an H200", "gpt124m-compile": "the same, compiled",
    "gpt": "GPT 0.8 M, one process", "gpt-ddp2": "GPT 0.8 M, DDP on two",
    "mlp": "MLP on a CPU, one process", "mlp-ddp2": "MLP on a CPU, DDP on two",
}  # fmt: skip
_COMPILE = {"no": [False], "yes": [True], "both": [False, True]}


def main(arguments: list[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.show:
        show()
        return 0
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
        taking_part = tuple(name for name in contenders if can_take(name, case))
        plan = Plan(case, taking_part, options.steps or case.steps, options.repeats, threads)
        content["cases"][case.name] = report.summarise(plan, measure(plan))
        report.write(out, content)  # after each case, so that an interruption costs one case alone
    console.print(report.table(content["cases"]))
    console.print(f"written to {out}")
    if options.out is None and options.only is None:
        show()
    return 0


def marks(content: dict[str, Any]) -> dict[str, str]:
    """The table of docs/speed.md for the device of these figures."""
    cases = content["cases"]
    cells = {
        name: {
            one: f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
            for one, row in case["contenders"].items()
            if (ratio := row.get("ratio_to_hand"))
        }
        for name, case in cases.items()
    }
    return {f"speed on a {'GPU' if 'gpu' in content['machine'] else 'CPU'}": _table(cases, cells)}


def summary(cuda: dict[str, Any], cpu: dict[str, Any]) -> dict[str, str]:
    """The table of README.md."""
    cases = {**cuda["cases"], **{name: case for name, case in cpu["cases"].items() if name.startswith("mlp")}}
    cells = {
        name: {one: f"{row['ratio_to_hand']['median']:.2f}" for one, row in case["contenders"].items()}
        for name, case in cases.items()
    }
    return {"speed": _table(cases, cells)}


def _table(cases: dict[str, Any], cells: dict[str, dict[str, str]]) -> str:
    """A column for each case and a row for each contender, the quickest first: by the mean of its medians."""
    heads = []
    for name, case in cases.items():
        milliseconds = case["contenders"]["hand"]["seconds_per_step"]["median"] * 1000
        heads.append(f"{_JOBS[name]}; by hand {milliseconds:.{1 if milliseconds > 10 else 2}f} ms")
    medians: dict[str, list[float]] = {}
    for case in cases.values():
        for name, row in case["contenders"].items():
            medians.setdefault(name, []).append(row["ratio_to_hand"]["median"])
    names = sorted(medians.keys() - {"hand"}, key=lambda name: statistics.mean(medians[name]))
    lines = [f"| | {' | '.join(heads)} |", f"|---{'|--:' * len(heads)}|"]
    for name in names:
        library, _, how = name.partition("-")
        how = ", tuned" if how else ", as documented" if f"{name}-tuned" in names else ""
        lines.append(f"| {_LIBRARIES[library]}{how} | {' | '.join(row.get(name, '') for row in cells.values())} |")
    return "\n".join(lines)


def show() -> None:
    """Write the pages from the results of both devices."""
    found = {device: json.loads((_RESULTS / f"speed-{device}.json").read_text()) for device in ("cuda", "cpu")}
    for content in found.values():
        report.fill_marks(Path("docs/speed.md"), marks(content))
    report.fill_marks(Path("README.md"), summary(**found))


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
    parser.add_argument("--show", action="store_true", help="write the pages and measure nothing")
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
