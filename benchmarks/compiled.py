"""What --compile gives under each strategy: a step beside the eager one, the time of compiling, what is kept on disk.

python -m benchmarks.compiled
python -m benchmarks.compiled --strategies ddp zero3 --repeats 1 --out /tmp/compiled.json
python -m benchmarks.compiled --show benchmarks/results/compiled.json

The GPT example under each strategy, on the CPU with a thread for each rank: eager and compiled runs alternate. A step
is the median of those after the first ones, which compile. The first compiled run has an empty cache on disk, the
others find what it left. The weights after the last step are compared with those of the eager run, in fp32 with AdamW.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.load import rows_of, run
from benchmarks.report import fill_page, machine_facts, write

_PAGE = Path("docs/speed.md")
_GPT = Path(__file__).parents[1] / "examples/gpt/task.py"
_SKIPPED = 4  # first steps, of which some compile
_RANKS = {
    "single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp1x2": 2, "tp2": 2, "cp2": 2, "pp2": 2,
    "fsdp2,tp2": 4, "pp2,fsdp2": 4,
}  # fmt: skip


def train(folder: Path, strategy: str, steps: int, compiles: bool) -> dict[str, Any]:
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "rung", "train", str(_GPT), "--out", str(out / "run"), "--steps", str(steps)]
    command += ["--strategy", strategy, "--nproc", str(_RANKS[strategy]), "--batch-size", "16", "--no-check"]
    for setting in ("device=cpu", "eval_every=never", "log_every=1", "model.layers=4"):
        command += ["--set", setting]
    ran = run([*command, *(["--compile"] if compiles else [])], out)
    rows = rows_of(out / "run", "step")
    return {
        "seconds": [row["step_seconds"] for row in rows[_SKIPPED:]],
        "compile_seconds": sum(row.get("compile_seconds") or 0.0 for row in rows),
        "compiled_late": sum(bool(row.get("compile_seconds")) for row in rows[_SKIPPED:]),
        "job_seconds": ran.seconds,
        "weights": load_file(out / "run/model.safetensors"),
    }


def measure(strategy: str, steps: int, repeats: int) -> dict[str, Any]:
    eager: list[dict[str, Any]] = []
    compiled: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        # Empty for each strategy, or one would find what another has compiled.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        for _ in range(repeats):
            eager.append(train(Path(folder), strategy, steps, False))
            compiled.append(train(Path(folder), strategy, steps, True))
    expected, found = eager[0].pop("weights"), compiled[0].pop("weights")
    ratios = [
        statistics.median(each["seconds"]) / statistics.median(beside["seconds"])
        for each, beside in zip(compiled, eager, strict=True)
    ]
    return {
        "ranks": _RANKS[strategy],
        "eager_seconds": statistics.median(second for each in eager for second in each["seconds"]),
        "compiled_seconds": statistics.median(second for each in compiled for second in each["seconds"]),
        "ratio": {"median": statistics.median(ratios), "all": ratios},
        "compile_seconds_without_cache": compiled[0]["compile_seconds"],
        "compile_seconds_with_cache": [each["compile_seconds"] for each in compiled[1:]],
        "steps_that_compiled_late": sum(each["compiled_late"] for each in compiled),
        "job_seconds": [each["job_seconds"] for each in compiled],
        "largest_difference": max(float((found[name] - value).abs().max()) for name, value in expected.items()),
    }


def marks(content: dict[str, Any]) -> dict[str, str]:
    lines = [
        "| strategy, ranks | eager | compiled | ratio | compiling, first run | later runs |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for strategy, row in content["strategies"].items():
        later = row["compile_seconds_with_cache"]
        ratios = row["ratio"]
        lines.append(
            f"| `{strategy}`, {row['ranks']} | {row['eager_seconds'] * 1000:.0f} ms "
            f"| {row['compiled_seconds'] * 1000:.0f} ms "
            f"| {ratios['median']:.2f} ({min(ratios['all']):.2f}..{max(ratios['all']):.2f}) "
            f"| {row['compile_seconds_without_cache']:.1f} s | {f'{statistics.median(later):.1f} s' if later else ''} |"
        )
    return {"compiled": "\n".join(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=_RANKS, default=list(_RANKS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/compiled.json"))
    parser.add_argument("--show", type=Path, help="write the page from these figures and measure nothing")
    options = parser.parse_args()
    if options.show is None:
        content: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "benchmarks.compiled", *sys.argv[1:]]),
            "machine": machine_facts("cpu"),
            "strategies": {},
        }
        for strategy in options.strategies:
            content["strategies"][strategy] = row = measure(strategy, options.steps, options.repeats)
            write(options.out, content)  # after each one, so that an interruption costs one alone
            print(strategy, {key: value for key, value in row.items() if key != "job_seconds"}, flush=True)
        print(f"written to {options.out}")
    fill_page(_PAGE, options.show or options.out, marks)


if __name__ == "__main__":
    main()
