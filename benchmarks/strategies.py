"""The figures of docs/strategies.md: two examples under every strategy, on two processes and on four, on this machine.

python -m benchmarks.strategies
python -m benchmarks.strategies --cases gpt-2 --steps 20 --repeats 1
python -m benchmarks.strategies --show benchmarks/results/strategies.json

`rung compare` measures. What it found is kept as JSON, case by case, and the page's tables are written anew between
their marks; --show only does the latter. Times are those of this machine, which should have nothing else to do; memory
and messages are counted, and are the same on a busy one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import machine_facts
from rung.system.units import human_size

_PAGE = Path("docs/strategies.md")
_KINDS = ("parameters", "gradients", "optimizer", "activations")  # and other, which is what is left of the whole


@dataclass(frozen=True)
class Case:
    """One comparison: a task, a number of processes, and the strategies by the mark of the page that shows them."""

    task: str
    processes: int
    marks: dict[str, tuple[str, ...]]
    settings: tuple[str, ...] = ()

    @property
    def strategies(self) -> list[str]:
        return [name for names in self.marks.values() for name in names]


_EIGHT_LAYERS = ("--set", "model.layers=8")  # so that four ranks can have two stages each
CASES = {
    "gpt-2": Case(
        "gpt",
        2,
        {
            "single": ("single",),
            "dp": ("dp2",),
            "ddp": ("ddp",),
            "zero": ("zero1", "zero2", "zero3"),
            "tp": ("tp2", "tp2 sequence_parallel=true"),
            "pp": ("pp2:gpipe", "pp2:1f1b", "pp2:interleaved", "pp2:zb"),
            "ps": ("ps",),
            "rpc": ("rpc-pp2",),
            "less": ("ddp compress=fp16", "ddp compress=topk:0.01", "ddp local_steps=8"),
        },
        _EIGHT_LAYERS,
    ),
    "gpt-4": Case(
        "gpt",
        4,
        {
            "single": ("single",),
            "dp": ("dp4",),
            "ddp": ("ddp",),
            "zero": ("zero1", "zero2", "zero3"),
            "hsdp": ("hsdp2x2",),
            "tp": ("tp4", "tp4 sequence_parallel=true"),
            "pp": ("pp4:gpipe", "pp4:1f1b", "pp4:interleaved", "pp4:zb"),
            "composed": ("pp2,ddp2", "pp2,fsdp2", "pp2,tp2", "ddp2,tp2", "fsdp2,tp2"),
            "ps": ("ps", "ps servers=2"),
            "async": ("ps-async",),
            "rpc": ("rpc-pp4",),
        },
        _EIGHT_LAYERS,
    ),
    "gpt-2 context": Case("gpt", 2, {"single": ("single",), "cp": ("cp2", "cp2 cp_form=gather")}, _EIGHT_LAYERS),
    "gpt-4 context": Case("gpt", 4, {"single": ("single",), "cp": ("cp4", "fsdp2,cp2")}, _EIGHT_LAYERS),
    "babycnn-2": Case(
        "babycnn",
        2,
        {
            "single": ("single",),
            "dp": ("dp2",),
            "ddp": ("ddp", "ddp batch_norm=local"),
            "zero": ("zero1", "zero2", "zero3"),
            "pp": ("pp2:1f1b",),
        },
    ),
    "babycnn-4": Case(
        "babycnn",
        4,
        {
            "single": ("single",),
            "dp": ("dp4",),
            "ddp": ("ddp", "ddp batch_norm=local"),
            "zero": ("zero1", "zero2", "zero3"),
            "hsdp": ("hsdp2x2",),
            "pp": ("pp4:1f1b",),
            "composed": ("pp2,fsdp2",),
        },
    ),
    "recommender-3": Case("recommender", 3, {"single": ("single",), "hybrid": ("ddp", "ddp+ps")}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="others stay as they are")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/strategies.json"))
    parser.add_argument("--show", type=Path, help="write the page from these figures and measure nothing")
    options = parser.parse_args()
    file = options.show or options.out
    if options.show is None:
        facts = machine_facts("cpu")  # before the load of our own
        for name in options.cases:
            found = json.loads(file.read_text()) if file.exists() else {}
            found[name] = measure(CASES[name], options.steps, options.repeats, facts)
            file.write_text(json.dumps({key: found[key] for key in CASES if key in found}, indent=1) + "\n")
    _PAGE.write_text(fill_in(_PAGE.read_text(), tables(json.loads(file.read_text()))))
    print(f"{file} -> {_PAGE}")


def measure(case: Case, steps: int, repeats: int, facts: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "compare.json")
        asked = ["compare", f"examples/{case.task}/task.py", "--nproc", str(case.processes), "--device", "cpu"]
        asked += ["--steps", str(steps), "--repeats", str(repeats), "--no-predict", *case.settings]
        asked += ["--json", str(file), "--out", str(Path(folder, "compare.html")), "--strategies", *case.strategies]
        subprocess.run([sys.executable, "-m", "rung", *asked], check=True)
        document = json.loads(file.read_text())
    return {
        "date": datetime.date.today().isoformat(),
        "machine": facts,
        "steps": steps,
        "repeats": repeats,
        "rows": {row["strategy"]: _figures(row) for row in document["rows"]},
    }


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    if row["status"] != "ok":
        raise RuntimeError(f"{row['strategy']} failed: {row['reason']}")
    fullest = max(row["memory"], key=lambda rank: rank["peak_bytes"])
    return {
        "ranks": row["ranks"],
        "step_seconds": row["step_seconds"]["median"],
        "speedup": row["speedup"],
        "peak_bytes": fullest["peak_bytes"],
        "kinds": fullest["kinds"],
        "bytes_per_step": row["bytes_per_step"],
        "calls_per_step": sum(message["calls"] for message in row["messages"]),
        "parameters_differ_by": row["largest_difference"]["parameters"],
    }


def tables(figures: dict[str, Any]) -> dict[str, str]:
    """What the page shows, by the names of its marks."""
    marks = dict.fromkeys(mark for case in CASES.values() for mark in case.marks)
    return {"machine": _machine(figures)} | {mark: _table(mark, figures) for mark in marks}


def _machine(figures: dict[str, Any]) -> str:
    """Cases measured on one machine are told together."""
    together: dict[str, list[str]] = {}
    for name, found in figures.items():
        machine = found["machine"]
        where = f"{machine['cores']} cores ({machine['cpu']}), no GPU, torch {machine['torch']}, {found['date']}"
        how = f"{name} ({found['repeats']} x {found['steps']} steps, load before {machine['load_average_before']})"
        together.setdefault(where, []).append(how)
    return textwrap.fill(". ".join(f"{where}: {', '.join(how)}" for where, how in together.items()) + ".", 118)


def _table(mark: str, figures: dict[str, Any]) -> str:
    head = ["task, ranks", "strategy", "a step", "speed-up", "sent", "memory", f"of it {', '.join(_KINDS)}"]
    lines = [f"| {' | '.join(head)} |", "|---" * 2 + "|--:" * (len(head) - 2) + "|"]
    seen = set()
    for name, found in figures.items():
        task = CASES[name].task
        for strategy in CASES[name].marks.get(mark, ()):
            if strategy == "single" and task in seen:
                continue  # one process is the same, however many the others have
            seen.add(task)
            row = found["rows"][strategy]
            cells = [f"{task}, {row['ranks']}", f"`{strategy}`", *_cells(row)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    sent = f"{human_size(row['bytes_per_step'])} in {row['calls_per_step']:.0f}"
    kinds = [f"{row['kinds'][kind] / 1e6:.3g}" for kind in _KINDS] if row["kinds"] else []
    cells = [
        f"{row['step_seconds'] * 1000:.3g} ms",
        f"{row['speedup']:.2f}",
        sent if row["calls_per_step"] else "nothing",
        human_size(row["peak_bytes"]),
        f"{' + '.join(kinds)} MB" if kinds else "not traced",
    ]
    return [cell.replace(" ", "&nbsp;") for cell in cells]  # a figure and its unit stay on one line


def fill_in(page: str, told: dict[str, str]) -> str:
    """The page with what stands between its marks replaced. A mark without a figure, or the reverse, is an error."""
    marks = set(re.findall(r"<!-- measured: (\w+) -->", page))
    if marks != set(told):
        raise RuntimeError(f"marks and figures differ: {sorted(marks ^ set(told))}")
    for name, text in told.items():
        start, end = f"<!-- measured: {name} -->", "<!-- end -->"
        page = re.sub(f"{start}.*?{end}", lambda _, new=f"{start}\n\n{text}\n\n{end}": new, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    main()
