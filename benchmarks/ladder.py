"""The figures of docs/ladder.md: the GPT example on every rung of the ladder, on this machine.

python -m benchmarks.ladder
python -m benchmarks.ladder --steps 20 --repeats 1
python -m benchmarks.ladder --show benchmarks/results/ladder.json

`rung compare` measures the rungs of one machine. Two machines are two network namespaces with a cable of 1 Gbit/s
between them, and one core each; a rank of an elastic run is killed. That needs root. What was measured is kept as JSON,
and the page's own sentences are written anew between their marks; --show only does the latter.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

from benchmarks.limited import Cable
from benchmarks.report import machine_facts
from rung.distributed.status_board import StatusBoard
from rung.system.units import human_size

_TASK = "examples/gpt/task.py"
_STRATEGIES = ("single", "dp2", "ddp", "zero1", "zero2", "fsdp", "tp2", "pp2")
_PAGE = Path("docs/ladder.md")
_MEGABITS = 1000
_RUNG = [sys.executable, "-m", "rung"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ladder.json"))
    parser.add_argument("--show", type=Path, help="write the page from these figures and measure nothing")
    options = parser.parse_args()
    if options.show is None:
        options.out.write_text(json.dumps(measure(options.steps, options.repeats), indent=1) + "\n")
    figures = json.loads((options.show or options.out).read_text())
    _PAGE.write_text(fill_in(_PAGE.read_text(), sentences(figures)))
    print(f"{options.show or options.out} -> {_PAGE}")


def measure(steps: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts = machine_facts("cpu")  # before the load of our own
        rows = _compare(folder, steps, repeats)
        return {
            "command": shlex.join(["python", "-m", "benchmarks.ladder", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "machine": facts,
            "steps": steps,
            "repeats": repeats,
            "rows": rows,
            "machines": _on_two_machines(folder, steps),
            "elastic": _lose_a_rank(folder, steps),
        }


def _compare(folder: Path, steps: int, repeats: int) -> dict[str, Any]:
    file = folder / "compare.json"
    asked = ["compare", _TASK, "--nproc", "2", "--steps", str(steps), "--repeats", str(repeats), "--no-predict"]
    asked += ["--json", str(file), "--out", str(folder / "compare.html"), "--strategies", *_STRATEGIES]
    subprocess.run([*_RUNG, *asked], check=True)
    found = {}
    for row in json.loads(file.read_text())["rows"]:
        if row["status"] != "ok":
            raise RuntimeError(f"{row['strategy']} failed: {row['reason']}")
        found[row["strategy"]] = {
            "samples_per_second": row["samples_per_second"]["median"],
            "speedup": row["speedup"],
            "peak_bytes": max(rank["peak_bytes"] for rank in row["memory"]),
            "bytes_per_step": row["bytes_per_step"],
            "parameters_differ_by": row["largest_difference"]["parameters"],
        }
    return found


def _on_two_machines(folder: Path, steps: int) -> dict[str, Any]:
    """ddp with one process on each of two machines."""
    with Cable() as cable:
        for number in range(2):
            code = f"from benchmarks.limited import limit; limit({_MEGABITS})"
            subprocess.run([*cable.prefix(number), sys.executable, "-c", code], check=True)
        asked = ["train", _TASK, "--strategy", "ddp", "--nproc", "1", "--nnodes", "2", "--steps", str(steps)]
        asked += ["--rdzv", f"{cable.address(0)}:29400", "--out", str(folder / "machines"), "--set", "eval_every=never"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*cable.prefix(number), *_RUNG, *asked], env=environment, stdout=subprocess.DEVNULL)
            for number in range(2)
        ]
        codes = [process.wait() for process in ranks]
    if any(codes):
        raise RuntimeError(f"the two machines ended with {codes}")
    seconds = [line["step_seconds"] for line in _lines(folder / "machines", "step")][5:]
    return {"samples_per_second": _batch_size(folder / "machines") / statistics.median(seconds), "megabits": _MEGABITS}


def _lose_a_rank(folder: Path, steps: int) -> dict[str, Any]:
    """An elastic run on two processes, of which one is killed half way."""
    run = folder / "elastic"
    every = max(steps // 6, 1)
    asked = ["train", _TASK, "--strategy", "ddp", "--nproc", "1:2", "--steps", str(steps), "--out", str(run)]
    asked += ["--checkpoint-every", str(every), "--set", "log_every=1", "--set", "eval_every=never"]
    process = subprocess.Popen([*_RUNG, *asked], stdout=subprocess.DEVNULL)
    _wait_for(lambda: len(_lines(run, "step")) > steps // 2, process)
    pid = StatusBoard(run / ".state" / "status", 2).read(1).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed, known = time.perf_counter(), len(_lines(run, "step"))
    time.sleep(0.1)  # a step that was as good as done
    known = max(known, len(_lines(run, "step")))
    _wait_for(lambda: len(_lines(run, "step")) > known, process)
    seconds = time.perf_counter() - killed
    if process.wait() != 0:
        raise RuntimeError("the elastic run did not come to its end")
    done = [line["step"] for line in _lines(run, "step")]
    return {"seconds_to_next_step": seconds, "steps_done_again": len(done) - len(set(done)), "steps": steps}


def _wait_for(is_so: Any, process: subprocess.Popen[bytes]) -> None:
    while not is_so():
        if process.poll() is not None:
            raise RuntimeError("the run has ended too early")
        time.sleep(0.01)


def _lines(run: Path, event: str) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    whole = (
        [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []
    )
    return [record for line in whole if (record := json.loads(line)).get("event") == event]


def _batch_size(run: Path) -> int:
    found = re.search(r"^batch_size = (\d+)", (run / "config.toml").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found.group(1))


def sentences(figures: dict[str, Any]) -> dict[str, str]:
    """What the page says, by the names of its marks."""
    rows = figures["rows"]
    single = rows["single"]
    found = {"single": f"{_speed(single)}, {human_size(single['peak_bytes'])} of tensors at the peak, nothing sent."}
    for name, row in rows.items():
        if name != "single":
            found[name] = (
                f"{_speed(row)}, {row['speedup']:.2f} times one process; {human_size(row['peak_bytes'])} on the "
                f"fullest rank ({row['peak_bytes'] / single['peak_bytes']:.2f} times); "
                f"{human_size(row['bytes_per_step'])} sent in a step."
            )
    machines, elastic, machine = figures["machines"], figures["elastic"], figures["machine"]
    share = machines["samples_per_second"] / single["samples_per_second"]
    found["machines"] = (
        f"{_speed(machines)}, {share:.2f} times one process, over a cable of {machines['megabits'] // 1000} Gbit/s."
    )
    found["elastic"] = (
        f"a rank was killed; the next step was done {elastic['seconds_to_next_step']:.1f} s later by the process that "
        f"was left, {elastic['steps_done_again']} of {elastic['steps']} steps were done again."
    )
    found["machine"] = (
        f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, {figures['date']}; "
        f"{figures['repeats']} x {figures['steps']} steps of each, in turns, of which the first five do not count."
    )
    if machine["load_average_before"] > machine["cores"] / 3:
        found["machine"] += (
            f" The machine had been busy when this began (load {machine['load_average_before']}): memory and bytes "
            "hold, speeds may be too low."
        )
    found["table"] = _table(rows)
    return found


def _speed(row: dict[str, Any]) -> str:
    return f"{row['samples_per_second']:.0f} samples/s"


def _table(rows: dict[str, Any]) -> str:
    lines = ["| strategy | samples/s | times one process | memory of the fullest rank | sent in a step | weights |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in rows.items():
        differ = row["parameters_differ_by"]
        apart = "one process" if name == "single" else "not measured" if differ is None else f"{differ:.0e} apart"
        lines.append(
            f"| `{name}` | {row['samples_per_second']:.0f} | {row['speedup']:.2f} | {human_size(row['peak_bytes'])} | "
            f"{human_size(row['bytes_per_step']) if row['bytes_per_step'] else 'nothing'} | {apart} |"
        )
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 105, break_on_hyphens=False)


def fill_in(page: str, told: dict[str, str]) -> str:
    """The page with what stands between its marks replaced. A mark without a figure, or the reverse, is an error."""
    marks = set(re.findall(r"<!-- measured: (\w+) -->", page))
    if marks != set(told):
        raise RuntimeError(f"marks and figures differ: {sorted(marks ^ set(told))}")
    for name, text in told.items():
        start = f"<!-- measured: {name} -->"
        # A mark at the beginning of a line would end the paragraph.
        new = f"{start}\n\n{text}\n\n<!-- end -->" if name == "table" else f"{start}\n{_wrapped(text)} <!-- end -->"
        page = re.sub(rf"{start}.*?<!-- end -->", lambda _, new=new: new, page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    main()
