"""What --compile gives under each strategy: a step beside the eager one, the time of compiling, what is kept on disk.

python -m benchmarks.compiled
python -m benchmarks.compiled --strategies ddp zero3 --repeats 3 --out /tmp/compiled.json
python -m benchmarks.compiled --device cuda
python -m benchmarks.compiled --show

A step: an eager and a compiled run of the same job are built in the same processes, and blocks of their steps
alternate. On a CPU it is the GPT example with a thread for each rank, on a GPU the GPT of 124 M parameters, one rank.
The time of compiling is that of whole jobs on a CPU: the first has an empty cache on disk, the second finds what the
first left. Their weights after the last step are compared with those of an eager job, in fp32 with AdamW.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import report
from benchmarks.cases import Case, find_cases
from benchmarks.contenders import build_contender
from benchmarks.contenders.common import Contender
from benchmarks.load import rows_of, run
from benchmarks.measure import Plan, measure
from rung.distributed.world import World

_RESULTS = Path(__file__).parent / "results"
_GPT = Path(__file__).parents[1] / "examples/gpt/task.py"
_STEPS = 6  # of a job whose time of compiling is taken
_BLOCK = 20  # steps
_RANKS = {
    "cpu": {
        "single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp1x2": 2, "tp2": 2, "cp2": 2, "pp2": 2,
        "fsdp2,tp2": 4, "pp2,fsdp2": 4,
    },
    "cuda": {"single": 1, "ddp": 1, "zero1": 1, "zero2": 1, "zero3": 1},
}  # fmt: skip


def build(name: str, case: Case, world: World) -> Contender:
    return build_contender("rung", replace(case, compile=name == "compiled"), world)


def step(device: str, strategy: str, repeats: int) -> dict[str, Any]:
    """Blocks of steps, eager and compiled in turns; the ratio within each repetition."""
    num_ranks = _RANKS[device][strategy]
    case = Case("gpt", "gpt", "cpu", batch_size=16, steps=_BLOCK, arguments={"model.layers": 4})
    if device == "cuda":
        case = next(case for case in find_cases("cuda", [False]) if case.name == "gpt124m")
    case = replace(case, name=strategy, strategy=strategy, num_ranks=num_ranks)
    measured = measure(Plan(case, ("eager", "compiled"), _BLOCK, repeats, threads=1), build)
    eager, compiled = measured.seconds_per_step["eager"], measured.seconds_per_step["compiled"]
    return {
        "ranks": num_ranks,
        "eager_seconds": report.spread(eager),
        "compiled_seconds": report.spread(compiled),
        "ratio": report.spread([one / other for one, other in zip(compiled, eager, strict=True)]),
        "blocks_seconds_per_step": measured.seconds_per_step,
        "stolen": measured.stolen,
    }


def compiling(strategy: str) -> dict[str, Any]:
    """What jobs take to compile, and how far their weights are from those of an eager one."""
    with tempfile.TemporaryDirectory() as folder:
        # Empty for each strategy, or one would find what another has compiled.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
        eager, first, second = (_job(Path(folder), strategy, compiles) for compiles in (False, True, True))
    return {
        "compile_seconds_without_cache": first["compile_seconds"],
        "compile_seconds_with_cache": second["compile_seconds"],
        "steps_that_compiled_late": first["compiled_late"] + second["compiled_late"],
        "largest_difference": max(
            float((first["weights"][name] - value).abs().max()) for name, value in eager["weights"].items()
        ),
    }


def _job(folder: Path, strategy: str, compiles: bool) -> dict[str, Any]:
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "rung", "train", str(_GPT), "--out", str(out / "run"), "--steps", str(_STEPS)]
    ranks = str(_RANKS["cpu"][strategy])
    command += ["--strategy", strategy, "--nproc", ranks, "--batch-size", "16", "--no-check"]
    for setting in ("device=cpu", "eval_every=never", "log_every=1", "model.layers=4"):
        command += ["--set", setting]
    run([*command, *(["--compile"] if compiles else [])], out)
    rows = rows_of(out / "run", "step")
    return {
        "compile_seconds": sum(row.get("compile_seconds") or 0.0 for row in rows),
        "compiled_late": sum(bool(row.get("compile_seconds")) for row in rows[_STEPS - 2 :]),
        "weights": load_file(out / "run/model.safetensors"),
    }


def marks(content: dict[str, Any]) -> dict[str, str]:
    on_gpu = "gpu" in content["machine"]
    further = "" if on_gpu else " compiling, first run | later runs |"
    lines = [
        f"| strategy, ranks | eager | compiled | ratio |{further}",
        f"|---|--:|--:|--:|{'' if on_gpu else '--:|--:|'}",
    ]
    for strategy, row in content["strategies"].items():
        ratio = row["ratio"]
        line = (
            f"| `{strategy}`, {row['ranks']} | {row['eager_seconds']['median'] * 1000:.0f} ms "
            f"| {row['compiled_seconds']['median'] * 1000:.0f} ms "
            f"| {ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f}) |"
        )
        if not on_gpu:
            line += f" {row['compile_seconds_without_cache']:.1f} s | {row['compile_seconds_with_cache']:.1f} s |"
        lines.append(line)
    return {f"compiled on a {'GPU' if on_gpu else 'CPU'}": "\n".join(lines)}


def show() -> None:
    """Write the page from the results of both devices."""
    for file in sorted(_RESULTS.glob("compiled-*.json")):
        report.fill_marks(Path("docs/speed.md"), marks(json.loads(file.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(_RANKS), default="cpu")
    parser.add_argument("--strategies", nargs="+", help="default: all that are measured on the device")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/compiled-DEVICE.json")
    parser.add_argument("--show", action="store_true", help="write the page and measure nothing")
    options = parser.parse_args()
    known = _RANKS[options.device]
    if unknown := [name for name in options.strategies or () if name not in known]:
        parser.error(f"{unknown[0]!r} is not measured on {options.device}; these are: {' '.join(known)}")
    if not options.show:
        out = options.out or _RESULTS / f"compiled-{options.device}.json"
        content: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "benchmarks.compiled", *sys.argv[1:]]),
            "machine": report.machine_facts(options.device),
            "strategies": {},
        }
        for strategy in options.strategies or known:
            row = step(options.device, strategy, options.repeats)
            row |= compiling(strategy) if options.device == "cpu" else {}
            content["strategies"][strategy] = row
            report.write(out, content)  # after each one, so that an interruption costs one alone
            print(strategy, {key: value for key, value in row.items() if "blocks" not in key}, flush=True)
        print(f"written to {out}")
    if options.show or (options.out is None and options.strategies is None):
        show()


if __name__ == "__main__":
    main()
