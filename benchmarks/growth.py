"""How the time of a step, the start and the memory grow with parameters, layers, micro-batches and ranks.

python -m benchmarks.growth --device cuda --parts parameters --out benchmarks/results/growth-cuda.json
python -m benchmarks.growth --parts layers --small --out /tmp/growth.json
python -m benchmarks.growth --show

Each point is a run of `rung train`. A step is the median of those after the first ones; start and end are the
rest of the command's time. The number of parameters is varied on the chosen device, all else on the CPU, with a thread
for each rank, so it wants as many cores as ranks. Samples, checkpoints and the launcher's memory are those of
benchmarks.load. The exponents are between the two largest sizes; 1 is linear. The table and the picture of
docs/speed.md are written from the results of all machines; --show does only that.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import growth, rows_of, run, show
from benchmarks.report import fill_marks, machine_facts, write
from rung.system.svg import BLUE, GREEN, GREY, INK, LINE, MARGIN, ORANGE, PURPLE, RED, SKY, WIDTH, Page

_PAGE, _PICTURE, _RESULTS = Path("docs/speed.md"), Path("docs/growth.svg"), Path("benchmarks/results")
_GPT = Path(__file__).parents[1] / "examples/gpt/task.py"
_SKIPPED = 3  # first steps, which allocate
_NOISE = 0.15  # an exponent that is larger than 1 by more counts as larger

# layers, width, heads
_SIZES = {"cuda": [(6, 128, 4), (6, 384, 6), (12, 768, 12), (24, 1024, 16), (24, 2048, 16)]}
_SIZES["cpu"] = _SIZES["cuda"][:2]


def gpt(folder: Path, *flags: str, steps: int = 13) -> dict[str, float]:
    """Train the GPT example for some steps: seconds of a step and of all but steps, memory of the largest rank."""
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "rung", "train", str(_GPT), "--out", str(out / "run"), "--steps", str(steps)]
    settings = ("eval_every=never", "save_weights=false", "log_every=1")
    for setting in settings:
        command += ["--set", setting]
    ran = run([*command, *flags], out)
    rows = rows_of(out / "run", "step")
    return {
        "seconds": statistics.median(row["step_seconds"] for row in rows[_SKIPPED:]),
        "rest_seconds": ran.seconds - sum(row["step_seconds"] for row in rows),
        "peak_bytes": max(row["peak_memory_bytes"] for row in rows),
        "parameters": rows_of(out / "run", "start")[0]["parameters"],
    }


def _row(what: str, size: int, found: dict[str, float]) -> dict[str, Any]:
    return {"what": what, "size": size, "seconds": found["seconds"], "peak_bytes": found["peak_bytes"]}


def _shape(layers: int, width: int, heads: int) -> list[str]:
    sets = {"model.layers": layers, "model.width": width, "model.heads": heads}
    return [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]


def _context(length: int) -> list[str]:
    names = ("model", "train_data", "eval_data")
    return [word for name in names for word in ("--set", f"{name}.context={length}")]


def measure_parameters(folder: Path, device: str, small: bool) -> list[dict[str, Any]]:
    rows = []
    flags = ["--set", f"device={device}", "--batch-size", "16", *(["--precision", "bf16"] if device == "cuda" else [])]
    for shape in _SIZES[device][: 2 if small else None]:
        found = gpt(folder, *flags, *_context(512 if device == "cuda" else 64), *_shape(*shape))
        rows.append(_row(f"a step, 16 sequences, {device}", int(found["parameters"]), found))
        print(rows[-1], flush=True)
    return rows


def measure_layers(folder: Path, device: str, small: bool) -> list[dict[str, Any]]:
    rows = []
    for strategy in ("single", "zero3x2", "tp2", "pp2"):
        for layers in (4, 8) if small else (4, 12, 32, 96):
            flags = ["--set", "device=cpu", "--strategy", strategy.replace("zero3x2", "zero3"), "--batch-size", "4"]
            flags += ["--nproc", "1" if strategy == "single" else "2", "--no-check", "--micro-batch", "2"]
            found = gpt(folder, *flags, *_context(32), *_shape(layers, 64, 2))
            rows.append(_row(f"{strategy}: a step", layers, found))
            print(rows[-1], flush=True)
    return rows


def measure_micro_batches(folder: Path, device: str, small: bool) -> list[dict[str, Any]]:
    rows = []
    for strategy in ("ddp", "zero3", "pp2"):
        for count in (1, 2) if small else (1, 4, 16, 64):
            ranks = 1 if strategy == "pp2" else 2  # that have samples of their own
            flags = ["--set", "device=cpu", "--strategy", strategy, "--nproc", "2", "--micro-batch", "2", "--no-check"]
            found = gpt(folder, *flags, "--batch-size", str(2 * ranks * count), *_context(32), *_shape(4, 64, 2))
            rows.append(_row(f"{strategy}: a step", count, found))
            print(rows[-1], flush=True)
    return rows


def measure_ranks(folder: Path, device: str, small: bool) -> list[dict[str, Any]]:
    """Each rank has as many samples as any other number of ranks gives it."""
    rows = []
    for strategy in ("ddp", "zero3"):
        for count in (1, 2) if small else (1, 2, 4, 8):
            flags = [
                "--set",
                "device=cpu",
                "--strategy",
                strategy,
                "--nproc",
                str(count),
                "--batch-size",
                str(8 * count),
            ]
            found = gpt(folder, *flags, "--no-check", *_context(64), *_shape(4, 128, 4))
            rows.append(_row(f"{strategy}: a step", count, found))
            rows.append({"what": f"{strategy}: start and end", "size": count, "seconds": found["rest_seconds"]})
            print(rows[-2], flush=True)
    return rows


_PARTS: dict[str, Callable[[Path, str, bool], list[dict[str, Any]]]] = {
    "parameters": measure_parameters,
    "layers": measure_layers,
    "micro-batches": measure_micro_batches,
    "ranks": measure_ranks,
}


def too_fast(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What grows faster than its size."""
    return [
        f"{what}: {key} grows by a power of {power:.2f}"
        for what, each in growth(list(rows)).items()
        for key, power in each.items()
        if power > 1 + _NOISE
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def joined(results: Path) -> dict[str, Any]:
    """The parts of several measurements, with the machines they were made on; of the load, what grows with samples."""
    found: dict[str, Any] = {"parts": {}, "machines": {}}
    for file in [*sorted(results.glob("growth*.json")), results / "load.json"]:
        content = json.loads(file.read_text())
        parts = {name: part for name, part in content["parts"].items() if file.stem != "load" or name == "samples"}
        found["parts"] |= parts
        found["machines"] |= dict.fromkeys(parts, content["machine"])
    return found


def _where(machine: dict[str, Any]) -> str:
    where = f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}"
    return f"{machine['gpu']}, {where}" if "gpu" in machine else where


def marks(content: dict[str, Any]) -> dict[str, str]:
    parts_on: dict[str, list[str]] = {}
    for part, machine in content["machines"].items():
        parts_on.setdefault(_where(machine), []).append(part)
    where = "; ".join(f"{', '.join(parts)}: {machine}" for machine, parts in parts_on.items())
    return {"growth": f"{where}.", "growth_picture": "![steps grow no faster than what they do](growth.svg)",
            "growth_table": table(content)}  # fmt: skip


def table(content: dict[str, Any]) -> str:
    lines = ["| what | sizes | milliseconds | memory of the largest rank at the largest | time grows by a power of |"]
    lines.append("|---|---|---|---|---|")
    for part, found in content["parts"].items():
        for what, rows in _by_name(found["rows"]).items():
            sizes = ", ".join(f"{row['size']:,}" for row in rows)
            times = ", ".join(f"{row['seconds'] * 1000:.3g}" for row in rows)
            memory = f"{rows[-1]['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in rows[-1] else ""
            power = found["exponents"].get(what, {}).get("seconds")
            lines.append(
                f"| {part}: {what} | {sizes} | {times} | {memory} | {'' if power is None else f'{power:.2f}'} |"
            )
    return "\n".join(lines)


def _by_name(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    names = dict.fromkeys(row["what"] for row in rows)
    return {name: sorted((row for row in rows if row["what"] == name), key=lambda row: row["size"]) for name in names}


def picture(content: dict[str, Any]) -> str:
    """One panel for each part, both axes logarithmic; a dashed line is linear growth."""
    page = Page()
    title = "How the time of a step grows"
    page.text(MARGIN, page.y + 8, title, size=17, bold=True)
    page.text(MARGIN, page.y + 28, "seconds over size, both logarithmic; dashed: linear growth", size=12, fill=GREY)
    width, height, top = (WIDTH - 2 * MARGIN) / 2 - 30, 210.0, page.y + 60
    for number, (part, found) in enumerate(content["parts"].items()):
        left = MARGIN + 46 + (number % 2) * (width + 60)
        bottom = top + (number // 2) * (height + 110) + height
        _panel(page, part, _by_name(found["rows"]), left, bottom, width - 50, height)
    page.y = top + math.ceil(len(content["parts"]) / 2) * (height + 110)
    return page.render(title)


def _panel(
    page: Page,
    part: str,
    series: dict[str, list[dict[str, Any]]],
    left: float,
    bottom: float,
    width: float,
    height: float,
) -> None:
    every = [row for rows in series.values() for row in rows]
    sizes, times = [math.log10(row["size"]) for row in every], [math.log10(row["seconds"]) for row in every]
    least, most = min(sizes), max(max(sizes), min(sizes) + 0.1)
    low, high = math.floor(min(times)), max(math.ceil(max(times)), math.floor(min(times)) + 1)

    def place(size: float, seconds: float) -> tuple[float, float]:
        return left + width * (size - least) / (most - least), bottom - height * (seconds - low) / (high - low)

    page.text(left, bottom - height - 12, part, size=13, bold=True)
    for power in range(low, high + 1):
        _, y = place(least, power)
        page.line([(left, y), (left + width, y)], LINE)
        page.text(left - 6, y + 4, f"{10.0**power:g} s", size=10.5, fill=GREY, anchor="end")
    for size in sorted({row["size"] for row in every}):
        x, _ = place(math.log10(size), low)
        page.text(x, bottom + 16, _short(size), size=10.5, fill=GREY, anchor="middle")
    end = min(most, least + high - low)
    page.line([place(least, low), place(end, low + end - least)], GREY, dash="4 4")
    for number, ((what, rows), colour) in enumerate(zip(series.items(), _COLOURS, strict=False)):
        points = [place(math.log10(row["size"]), math.log10(row["seconds"])) for row in rows]
        page.line(points, colour, width=2)
        for (x, y), row in zip(points, rows, strict=True):
            page.dot(x, y, 3, colour, tip=f"{what}, {row['size']:,}: {row['seconds']:.4f} s")
        x, y = left + (number % 2) * width / 2, bottom + 36 + 16 * (number // 2)
        page.line([(x, y - 4), (x + 16, y - 4)], colour, width=3)
        page.text(x + 22, y, what, size=11, fill=INK)


_COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY)


def _short(size: int) -> str:
    for factor, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if size >= factor:
            return f"{size / factor:.3g}{letter}"
    return str(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for the number of parameters")
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/growth.json"))
    parser.add_argument("--show", action="store_true", help="write the page from all results, and measure nothing")
    options = parser.parse_args()
    if not options.show:
        content: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "benchmarks.growth", *sys.argv[1:]]),
            "machine": machine_facts(options.device),
            "parts": {},
        }
        for part in options.parts:
            with tempfile.TemporaryDirectory() as folder:
                rows = _PARTS[part](Path(folder), options.device, options.small)
            show(part, rows)
            content["parts"][part] = {"rows": rows, "exponents": growth(rows), "too_fast": too_fast(rows)}
            write(options.out, content)
    content = joined(_RESULTS)
    fill_marks(_PAGE, marks(content))
    _PICTURE.write_text(picture(content))


if __name__ == "__main__":
    main()
