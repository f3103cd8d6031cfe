"""Many faults: `python -m tests.faults.chaos --faults 200`. The long form of the fault tests, with figures."""

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
from pathlib import Path
from typing import Any

from tests.faults.harness import KINDS, STRATEGIES, Suffered, reference, suffer

PER_JOB = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    print(f"chaos: {options.faults} faults, seed {options.seed}", flush=True)
    base = Path(tempfile.mkdtemp(prefix="rung-chaos-"))
    faults: list[Suffered] = []
    problems: list[str] = []
    strategies = list(STRATEGIES)
    started, number = time.monotonic(), 0
    bag: list[str] = []
    while len(faults) < options.faults:
        strategy = strategies[number % len(strategies)]
        bag = bag if len(bag) >= PER_JOB else [*bag, *chance.sample(KINDS, len(KINDS))]  # all kinds equally often
        kinds, bag = bag[:PER_JOB], bag[PER_JOB:]
        seed = chance.randrange(10**9)
        known = reference(base, strategy, STRATEGIES[strategy])
        story = suffer(base / f"job-{number}", strategy, STRATEGIES[strategy], kinds, seed, known)
        faults += story.faults
        story.problems += [f"no recovery from {f.kind}" for f in story.faults if not f.recovered]
        problems += [f"{strategy}, {', '.join(kinds)}, seed {seed}: {problem[:200]}" for problem in story.problems]
        told = "; ".join(f"{f.kind} at {f.step}: {f.seconds:.1f} s, {f.lost} lost" for f in story.faults)
        print(f"{len(faults):4d}  {strategy:<7} {told}{'  FAILED' if story.problems else ''}", flush=True)
        for problem in story.problems:
            print(f"      {problem[:400]}  ({story.folder})", flush=True)
        if not story.problems:
            shutil.rmtree(story.folder, ignore_errors=True)
        number += 1
    figures = summary(faults, problems, number, time.monotonic() - started)
    figures["command"], figures["seed"] = (
        shlex.join(["python", "-m", "tests.faults.chaos", *sys.argv[1:]]),
        options.seed,
    )
    print(json.dumps(figures, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    if not problems:
        shutil.rmtree(base, ignore_errors=True)
    return 1 if problems else 0


def summary(faults: list[Suffered], problems: list[str], jobs: int, seconds: float) -> dict[str, Any]:
    by_kind = {}
    for kind in KINDS:
        own = [fault for fault in faults if fault.kind == kind]
        if own:
            by_kind[kind] = _figures(own)
    return {
        "jobs": jobs,
        "minutes": round(seconds / 60, 1),
        "problems": problems,
        **_figures(faults),
        "by_kind": by_kind,
    }


def _figures(faults: list[Suffered]) -> dict[str, Any]:
    took = [fault.seconds for fault in faults if fault.seconds]
    return {
        "faults": len(faults),
        "recoveries": sum(fault.recovered for fault in faults),
        "steps_lost": sum(fault.lost for fault in faults),
        "most_steps_lost": max(fault.lost for fault in faults),
        "seconds_to_next_step": {
            "median": round(statistics.median(took), 2) if took else None,
            "worst": round(max(took), 2) if took else None,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
