"""Many faults: `python -m tests.faults.chaos --faults 1000`. The long form of the fault tests, with figures.

Jobs are drawn by a seed. `--seed S --only N` plays the job of that number alone, with the same faults.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tests.faults.kinds import KINDS, available_pairs
from tests.faults.plans import JobPlan, draw_plans
from tests.faults.play import Result, play
from tests.faults.scene import Fault, stage

_MEDIAN_SECONDS, _WORST_SECONDS = 1.0, 15.0  # from a fault to the next step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="the jobs of these numbers alone")
    parser.add_argument("--kinds", nargs="+", choices=sorted(KINDS), help="faults of these kinds alone")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    pairs = available_pairs()
    missing = sorted(set(KINDS) - {kind for own in pairs.values() for kind, _ in own})
    if missing:
        print(f"this machine cannot do {', '.join(missing)} (root, network namespaces, a C compiler)", flush=True)
    plans = draw_plans(options.seed, pairs)
    if options.only is not None:
        plans = (plan for plan in islice(plans, max(options.only) + 1) if plan.number in options.only)
    print(f"chaos: {options.faults} faults, seed {options.seed}", flush=True)
    kept = Path(tempfile.mkdtemp(prefix="rung-chaos-failed-"))
    started, results = time.monotonic(), list[Result]()

    def write_figures() -> dict[str, Any]:
        figures = {
            "command": shlex.join(["python", "-m", "tests.faults.chaos", *sys.argv[1:]]),
            "seed": options.seed,
            "minutes": round((time.monotonic() - started) / 60, 1),
            "not_tried": missing,
            **summarise(results, options.seed),
        }
        if options.out is not None:
            options.out.write_text(_as_text(figures) + "\n")
        return figures

    with stage() as base:
        for result in _play_all(plans, options.faults, options.kinds, base, kept):
            results.append(result)
            _tell(result, sum(len(one.faults) for one in results), kept)
            shutil.rmtree(result.folder, ignore_errors=True)
            write_figures()  # after each job: a run that is cut short has them, too
    figures = write_figures()
    print(_as_text(figures))
    if not any(result.problems for result in results):
        shutil.rmtree(kept)
    return 1 if figures["jobs_failed"] else 0  # slow recoveries are listed; a busy machine is no mistake


def _play_all(
    plans: Iterator[JobPlan], num_faults: int, kinds: list[str] | None, base: Path, kept: Path
) -> Iterator[Result]:
    count = 0
    for plan in plans:
        if kinds is not None:
            faults = tuple(fault for fault in plan.faults if fault.kind in kinds)
            plan = JobPlan(plan.number, plan.row, faults, plan.salt)
            if not faults:
                continue
        try:
            result = play(plan, base, kept)
        except Exception:  # one job that cannot be played is no reason to leave out the others
            result = Result(plan, base / f"job-{plan.number}", problems=[traceback.format_exc()])
        count += len(result.faults)
        yield result
        if count >= num_faults:
            return


def _tell(result: Result, count: int, kept: Path) -> None:
    told = "; ".join(_describe(fault) for fault in result.faults)
    failed = "  FAILED" if result.problems else ""
    print(f"{count:5d}  job {result.plan.number}, {result.plan.row.name}: {told}{failed}", flush=True)
    for problem in result.problems:
        print(f"       {problem[-600:]}", flush=True)
    if result.problems:
        print(f"       its files: {kept / result.folder.name}", flush=True)


def _describe(fault: Fault) -> str:
    seconds = f" {fault.seconds:.1f} s" if fault.seconds is not None else ""
    return f"{fault.kind} in {fault.phase} after {fault.step}{seconds}{f' -{fault.lost}' if fault.lost else ''}"


# -- figures ---------------------------------------------------------------------------------------------------------


def summarise(results: list[Result], seed: int) -> dict[str, Any]:
    """Misses first, then the figures of all faults, and by kind, phase and strategy."""
    rows = [(result.plan.row.name, fault) for result in results for fault in result.faults]
    faults = [fault for _, fault in rows]
    figures = _figures(faults)
    misses: list[Any] = [
        {
            "job": result.plan.number,
            "strategy": result.plan.row.name,
            "faults": [_describe(fault) for fault in result.faults],
            "problems": [problem[-600:] for problem in result.problems],
            "reproduce": f"python -m tests.faults.chaos --seed {seed} --only {result.plan.number}",
        }
        for result in results
        if result.problems
    ]
    seconds = figures["seconds_to_next_step"]
    if seconds["median"] is not None and seconds["median"] >= _MEDIAN_SECONDS:
        misses.append(f"the median time to the next step is {seconds['median']} s, not under {_MEDIAN_SECONDS} s")
    slow = sorted((f.seconds, name, f.kind, f.phase) for name, f in rows if (f.seconds or 0.0) >= _WORST_SECONDS)
    misses += [f"{took:.1f} s to the next step: {kind} in {phase}, {name}" for took, name, kind, phase in slow]
    return {
        "misses": misses,
        "jobs": len(results),
        "jobs_failed": sum(bool(result.problems) for result in results),
        **figures,
        "by_kind": _grouped(rows, lambda name, fault: fault.kind),
        "by_phase": _grouped(rows, lambda name, fault: fault.phase),
        "by_strategy": _grouped(rows, lambda name, fault: name),
    }


def _as_text(figures: dict[str, Any]) -> str:
    """JSON with a line for each group."""
    rows = [f" {json.dumps(key)}: {_lines(value)}" for key, value in figures.items()]
    return "{\n" + ",\n".join(rows) + "\n}"


def _lines(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(own, dict) and "faults" in own for own in value.values()):
        return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(v)}" for v in value) + "\n ]"
    return json.dumps(value)


def _grouped(rows: list[tuple[str, Fault]], key: Callable[[str, Fault], str]) -> dict[str, Any]:
    groups: dict[str, list[Fault]] = {}
    for name, fault in rows:
        groups.setdefault(key(name, fault), []).append(fault)
    return {name: _figures(groups[name]) for name in sorted(groups)}


def _figures(faults: list[Fault]) -> dict[str, Any]:
    took = [fault.seconds for fault in faults if fault.seconds is not None]
    return {
        "faults": len(faults),
        "recoveries": sum(fault.recovered for fault in faults),
        "steps_done_again": sum(fault.lost for fault in faults),
        "most_steps_done_again": max((fault.lost for fault in faults), default=0),
        "seconds_to_next_step": {
            "median": round(statistics.median(took), 2) if took else None,
            "worst": round(max(took), 2) if took else None,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
