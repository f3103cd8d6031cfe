"""Is the layout that a plan recommends on a CPU the quickest there is? Over models that nobody here tuned it for.

A seed draws the settings: a model of the zoo or one written by hand, its sizes, batch, optimizer, and 2 or 4
processes. Each is planned from `rung calibrate`'s record of this machine; then every layout trains, those that the plan
passed over included, and the quickest ones train again in turns.

    python -m rung calibrate && python -m benchmarks.choices --out FILE
    taskset -c 2,3 python -m benchmarks.choices --part 1/4 --out FILE      # every fourth setting: for a larger machine
    python -m benchmarks.choices --join FILE [FILE ...]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import shlex
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.foresight import MODELS, OPTIMIZERS, Job
from benchmarks.step_time import kendall
from benchmarks.zoo import Scale
from rung.distributed.world import open_world
from rung.errors import RungError
from rung.hardware.cluster import parse_cluster
from rung.launch.spawn import on_ranks
from rung.planner.candidates import micro_batches_for
from rung.planner.plan import make_plan
from rung.runtime import build_runtime
from rung.spec.strategy import Layout, parse
from rung.train.worker import make_batches

SEED = 24
NUM_SETTINGS = 24
_RESULTS = Path("benchmarks/results/choices.json")
_WARM_UP, _STEPS = 2, 12
_NEAR = 1.25  # of the quickest: what may be the quickest in truth, and trains again
_SECONDS = 60.0  # without a sign of life from a rank


@dataclass(frozen=True)
class Setting:
    job: Job
    num_ranks: int

    @property
    def name(self) -> str:
        job, scale = self.job, self.job.scale
        return f"{job.number}: {job.model}, {scale.named_sizes}, {job.optimizer}, {self.num_ranks} ranks"


def settings(seed: int) -> list[Setting]:
    draw = random.Random(seed)
    models = list(MODELS)
    draw.shuffle(models)
    found = []
    for number in range(NUM_SETTINGS):
        heads = draw.choice((4, 8))
        samples, length = draw.choice(((8, 64), (16, 32), (16, 64), (32, 32)))
        scale = Scale(
            samples=samples,
            length=length,
            vocabulary=draw.choice((256, 2048)),
            width=32 * heads,
            layers=draw.choice((2, 4)),
            heads=heads,
            key_heads=draw.choice((2, 4)),
            image=64,
            patch=8,
            photo=64,
        )
        optimizer, ranks = draw.choice(list(OPTIMIZERS)), draw.choice((2, 4))
        job = Job(number, models[number % len(models)], scale, "fp32", "none", optimizer, is_held_out=seed == SEED)
        found.append(Setting(job, ranks))
    return found


def try_setting(setting: Setting) -> dict[str, Any]:
    """What the plan says, and the milliseconds of a step under every layout that trains."""
    started = time.perf_counter()
    plan = make_plan(setting.job.task(), setting.job.config, parse_cluster(f"{setting.num_ranks}xhere"), advises=False)
    took = time.perf_counter() - started
    layouts = {row.layout.name: (row.layout, row.micro_batch) for row in plan.rows}
    for one in plan.rejected:
        share = setting.job.scale.samples // one.layout.num_data_ranks
        layouts[one.layout.name] = one.layout, micro_batches_for(one.layout, max(1, share))[0]
    times: dict[str, list[float]] = {}
    refused: dict[str, str] = {}
    for name, (layout, micro_batch) in layouts.items():
        try:
            times[name] = [_train(setting, layout, micro_batch)]
        except RungError as error:
            refused[name] = str(error).strip().splitlines()[-1][:200]
    quickest = min((measured[0] for measured in times.values()), default=0.0)
    again = [name for name, measured in times.items() if measured[0] <= _NEAR * quickest]
    if plan.chosen is not None and plan.chosen.layout.name in times.keys() - again:
        again.append(plan.chosen.layout.name)
    for name in again if len(again) > 1 else []:
        times[name].append(_train(setting, *layouts[name]))
    return {
        "predicted": {row.layout.name: 1e3 * row.time.seconds for row in plan.rows},
        "passed over": {one.layout.name: one.reason for one in plan.rejected},
        "chosen": plan.chosen.layout.name if plan.chosen is not None else None,
        "measured": times,
        "refused": refused,
        "plan seconds": took,
    }


def _train(setting: Setting, layout: Layout, micro_batch: int) -> float:
    return 1e3 * max(on_ranks(train_rank, layout.num_ranks, setting, layout.name, micro_batch, timeout=_SECONDS))


def train_rank(setting: Setting, strategy: str, micro_batch: int) -> float:
    layout = parse(strategy, setting.num_ranks if strategy != "single" else 1)
    config = replace(setting.job.config, micro_batch=micro_batch, steps=_WARM_UP + _STEPS)
    with open_world(layout, device="cpu", timeout_seconds=int(_SECONDS)) as world:
        task = setting.job.task()
        runtime = build_runtime(task, world, config, total_steps=config.steps)
        (window,) = runtime.place(make_batches(task, replace(config, steps=1), world))
        times = []
        for _ in range(_WARM_UP + _STEPS):
            world.barrier()
            began = time.perf_counter()
            runtime.step(window)
            world.barrier()
            times.append(time.perf_counter() - began)
    return statistics.median(times[_WARM_UP:])


def judge(row: dict[str, Any]) -> dict[str, Any]:
    """How much slower than the quickest the recommended layout was, and how far off the predicted times were."""
    measured = {name: min(times) for name, times in row["measured"].items()}
    fastest = min(measured, key=lambda name: measured[name], default=None)
    pairs = [(row["predicted"][name], measured[name]) for name in row["predicted"] if name in measured]
    several = [name for name in row["predicted"] if name != "single" and name in measured]
    best = min(several, key=lambda name: row["predicted"][name], default=None)
    rest = min((time for name, time in measured.items() if name != "single"), default=math.inf)
    return {
        "fastest": fastest,
        # None: nothing was recommended, or what was does not train.
        "slower": measured[row["chosen"]] / measured[fastest] - 1 if row["chosen"] in measured else None,
        "best of several": best,
        "slower of several": measured[best] / rest - 1 if best is not None else None,
        "errors": {name: row["predicted"][name] / measured[name] - 1 for name in row["predicted"] if name in measured},
        "kendall": kendall(pairs) if len(pairs) > 1 else None,
    }


def join(files: list[Path]) -> None:
    """All in one file, and as a table: the worst first."""
    rows = {name: row for file in files for name, row in json.loads(file.read_text())["settings"].items()}
    done = {name: {**row, **judge(row)} for name, row in rows.items() if "error" not in row}
    slower = {name: math.inf if row["slower"] is None else row["slower"] for name, row in done.items()}
    order = sorted(done, key=lambda name: -slower[name])
    errors = [abs(error) for row in done.values() for error in row["errors"].values()]
    summary = {
        "settings": len(rows),
        "plans that failed": len(rows) - len(done),
        "recommended within 5 % of the fastest": sum(value <= 0.05 for value in slower.values()),
        "the fastest itself": sum(value == 0 for value in slower.values()),
        "settings with several processes": sum(row["best of several"] is not None for row in done.values()),
        "best of these within 5 %": sum(
            row["best of several"] is not None and row["slower of several"] <= 0.05 for row in done.values()
        ),
        "pairs": len(errors),
        "median error of a step": statistics.median(errors),
        "steps within 25 %": sum(error <= 0.25 for error in errors) / len(errors),
    }
    print(json.dumps(summary, indent=1))
    print("| setting | recommended | ms | fastest | ms | slower |\n|---|---|---|---|---|---|")
    for name in order:
        row = done[name]
        cells = [name]
        for layout in (row["chosen"], row["fastest"]):
            cells += [str(layout), f"{min(row['measured'].get(layout, [math.nan])):.1f}"]
        print(f"| {' | '.join(cells)} | {100 * slower[name]:.0f} % |")
    failed = {name: row for name, row in rows.items() if "error" in row}
    for name, row in failed.items():
        print(f"FAILED {name}: {row['error']}")
    command = shlex.join(["python", "-m", "benchmarks.choices", *sys.argv[1:]])
    content = {"command": command, "summary": summary, "settings": {**failed, **{name: done[name] for name in order}}}
    _RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", default="0/1", help="K/N: settings K, K + N, K + 2 N, ...")
    parser.add_argument("--seed", type=int, default=SEED, help="another draws settings to build with")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no setting after this time")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    if options.join:
        join(options.join)
        return
    if options.out is None:
        parser.error("--out FILE is needed, or --join FILE ...")
    # Ranks are forks of a process that has imported what takes long.
    multiprocessing.set_forkserver_preload(
        ["benchmarks.step_time", "benchmarks.foresight", "transformers.modeling_utils", "timm", "diffusers", "peft"]
    )
    began = time.monotonic()
    file = json.loads(options.out.read_text()) if options.out.exists() else {"settings": {}}
    first, step = (int(number) for number in options.part.split("/"))
    for setting in settings(options.seed)[first::step]:
        if setting.name in file["settings"] or time.monotonic() - began > options.seconds:
            continue
        begun = time.monotonic()
        try:
            row = try_setting(setting)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}"}
        file["settings"][setting.name] = row
        options.out.write_text(json.dumps(file, indent=1) + "\n")
        verdict = row.get("error") or f"{row['chosen']}, fastest {judge(row)['fastest']}"
        print(f"{setting.name}: {verdict[:200]} in {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
