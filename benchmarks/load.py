"""How costs grow with what a run is made of: ranks, checkpoints, lines of metrics, parameters, samples.

python -m benchmarks.load
python -m benchmarks.load --parts metrics checkpoints --small --out /tmp/load.json
python -m benchmarks.load --show benchmarks/results/load.json

Each part is measured at several sizes, and the exponent of the growth between the two largest is shown: 1 is linear.
Wall time, and memory: the largest resident size of any process of the command, or for ranks the sum of what all of them
take (PSS: forked ranks share torch's pages). 64 ranks are on two machines of our own making, network namespaces, which
needs root. The largest metrics file has 10 million lines and 2.5 GB, in the folder of --scratch. The table of
docs/launching.md is written from the results; --show does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.limited import Cable
from benchmarks.report import fill_page, machine_facts, write
from benchmarks.usage import descendants, usage_of
from rung.checkpoint.manifest import folder_of, read_checkpoint, steps_in, write_manifest

_PAGE = Path("docs/launching.md")
_RUNG = [sys.executable, "-m", "rung"]
_MOST_BYTES = 10 * 2**30  # that all ranks together may take
_LIMIT_SECONDS = 900.0
# Of ranks that share the cores, each sends to each in every collective. All else may grow as its size does.
_POWERS = {"ranks": 2.0}
_NOISE = 0.15  # an exponent that is larger by more counts as larger
_GLOO_ALONE = "gloo alone"
_MATTERS_SECONDS = 1.0  # a quicker command is not judged by its growth, which would be noise

_TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

defaults = {"batch_size": 64, "eval_every": "never", "log_every": 1}


class Samples(Dataset):
    \"\"\"As many as asked for, and none of them kept.\"\"\"

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x = torch.full((8,), (index % 1009) / 1009)
        return x, x


def model(parameters=8):
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))


def train_data(count=4096):
    return Samples(count)


def loss(output, target):
    return F.mse_loss(output, target)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""


# Runs a command and says how large its largest process was. From a small process: one that is forked begins with the
# largest size of its parent, and this program has imported torch.
_MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[2:])
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024))
sys.exit(code)
"""


@dataclass(frozen=True)
class Ran:
    """What a command took."""

    seconds: float
    peak_bytes: int  # of its largest process
    total_bytes: int = 0  # of all its processes together, where they were looked at


def run(command: Sequence[str], folder: Path, *, looks: bool = False, prefix: Sequence[str] = ()) -> Ran:
    """To its end; raises if it fails."""
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as peak:
        measured = [*prefix, sys.executable, "-S", "-c", _MEASURE, peak.name, *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = time.perf_counter()
        process = subprocess.Popen(
            measured, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        most = _Most(process.pid) if looks else None
        try:
            code: int | str = process.wait(_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = f"nothing within {_LIMIT_SECONDS:.0f} s"
        seconds = time.perf_counter() - started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        total = most.stop() if most is not None else 0
        if code != 0:
            output.seek(0)
            told = output.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"{shlex.join(command)} ended with {code} after {seconds:.0f} s:\n{told}")
        return Ran(seconds, int(Path(peak.name).read_text()), total)


class _Most:
    """The most memory that a process and those below it have together. Above the bound they are ended."""

    def __init__(self, pid: int) -> None:
        self._pid, self._most, self._done = pid, 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._most

    def _look(self) -> None:
        while not self._done.wait(1.0):
            found = [usage_of(pid) for pid in (self._pid, *(child for child, _ in descendants(self._pid)))]
            total = sum(usage.pss_bytes for usage in found if usage is not None)
            self._most = max(self._most, total)
            if total > _MOST_BYTES:
                os.killpg(self._pid, signal.SIGKILL)


def train(folder: Path, *flags: str) -> list[str]:
    return [*_RUNG, "train", str(folder / "task.py"), "--out", "run", *flags]


def rows_of(run_dir: Path, event: str) -> list[dict[str, Any]]:
    with (run_dir / "metrics.jsonl").open() as file:
        return [row for line in file if (row := json.loads(line))["event"] == event]


def step_seconds(run_dir: Path) -> float:
    return statistics.median(row["step_seconds"] for row in rows_of(run_dir, "step")[2:])


# -- the parts: each gives rows of {what, size, seconds, ...} --------------------------------------------------------


def measure_ranks(folder: Path, small: bool) -> list[dict[str, Any]]:
    rows = []
    for strategy in ("ddp", "zero3"):
        for count in (2, 4, 8) if small else (2, 4, 8, 16):
            place = _fresh(folder)
            flags = ["--strategy", strategy, "--nproc", str(count), "--steps", "20"]
            ran = run(train(place, *flags), place, looks=True)
            rows.append(_row(f"{strategy}: all", count, ran) | {"total_bytes": ran.total_bytes})
            rows.append(_of(f"{strategy}: a step", count, step_seconds(place / "run")))
        for count in (8, 16) if small else (16, 32, 64):
            if os.geteuid() != 0:
                print("  ranks on two machines are left out: network namespaces need root")
                break
            rows += _two_machines(folder, strategy, count)
    for count in (2, 4, 8, 16) if small else (2, 4, 8, 16, 32, 64):
        rows += _gloo_alone(count)
    return rows


def _gloo_alone(count: int) -> list[dict[str, Any]]:
    """What the ranks' messages take by themselves: all ranks share a few cores, and each sends to each."""
    command = [sys.executable, "-m", "benchmarks.contenders.bare_gloo", str(count)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=True).stdout
    return [_of(f"{_GLOO_ALONE}: {name}", count, seconds) for name, seconds in json.loads(told).items()]


def _two_machines(folder: Path, strategy: str, count: int) -> list[dict[str, Any]]:
    place = _fresh(folder)
    flags = ["--strategy", strategy, "--nproc", str(count // 2), "--nnodes", "2", "--steps", "20"]
    found: dict[int, Ran | Exception] = {}
    with Cable() as cable:
        flags += ["--rdzv", f"{cable.address(0)}:29400"]

        def launch(number: int) -> None:
            try:
                found[number] = run(train(place, *flags), place, looks=True, prefix=cable.prefix(number))
            except RuntimeError as error:
                found[number] = error

        threads = [threading.Thread(target=launch, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in found.values():
        if isinstance(one, Exception):
            raise one
    ran = [one for one in found.values() if isinstance(one, Ran)]
    whole = Ran(max(r.seconds for r in ran), max(r.peak_bytes for r in ran), sum(r.total_bytes for r in ran))
    name = f"{strategy}, two machines"
    return [
        _row(f"{name}: all", count, whole) | {"total_bytes": whole.total_bytes},
        _of(f"{name}: a step", count, step_seconds(place / "run")),
    ]


def measure_checkpoints(folder: Path, small: bool) -> list[dict[str, Any]]:
    rows = []
    for count in (30, 100) if small else (100, 300, 1000):
        place = _fresh(folder)
        flags = ["--strategy", "ddp", "--nproc", "2", "--checkpoint-every", "1"]
        run(train(place, *flags, "--steps", "2"), place)
        _copy_checkpoints(place / "run" / "checkpoints", count)
        rows.append(_row("rung checkpoints", count, run([*_RUNG, "checkpoints", "run"], place)))
        rows.append(_row("rung checkpoints --quick", count, run([*_RUNG, "checkpoints", "run", "--quick"], place)))
        more = ["--steps", str(count + 1), "--keep", str(count), "--resume"]
        rows.append(_row("--resume, one step", count, run(train(place, *flags, *more), place)))
        rows.append(_of("a save among them", count, rows_of(place / "run", "checkpoint")[-1]["write_seconds"]))
        more = ["--steps", str(count + 2), "--keep", "2", "--resume"]
        rows.append(_row("--resume, one step, all but 2 removed", count, run(train(place, *flags, *more), place)))
        left = len(steps_in(place / "run" / "checkpoints"))
        if left != 2:
            raise RuntimeError(f"{left} checkpoints are left, not 2")
    return rows


def _copy_checkpoints(folder: Path, count: int) -> None:
    """So many whole checkpoints, of the steps 1 to count: hard links to one and the same file of each rank."""
    last = read_checkpoint(max(steps_in(folder).items())[1])
    for step in range(1, count + 1):
        new = folder_of(folder, step)
        if not new.exists():
            new.mkdir()
            for name in last.files:
                (new / name).hardlink_to(last.path / name)
            write_manifest(
                new, {key: value for key, value in last.manifest.items() if key != "format"} | {"step": step}
            )


def measure_metrics(folder: Path, small: bool) -> list[dict[str, Any]]:
    rows = []
    for count in (10_000, 100_000) if small else (100_000, 1_000_000, 10_000_000):
        place = _fresh(folder)
        flags = ["--strategy", "ddp", "--nproc", "2", "--checkpoint-every", "3"]
        run(train(place, *flags, "--steps", "3"), place)
        file = place / "run" / "metrics.jsonl"
        _lengthen(file, count)
        rows.append(_row("rung watch --once", count, run([*_RUNG, "watch", "run", "--once"], place)))
        rows.append(_row("rung report", count, run([*_RUNG, "report", "run", "--out", "page.html"], place)))
        page = (place / "page.html").stat().st_size
        rows[-1] |= {"page_bytes": page}
        rows.append(_row("--resume", count, run(train(place, *flags, "--steps", "6", "--resume"), place)))
        file.unlink()
    return rows


def _lengthen(file: Path, count: int) -> None:
    """Lines as a run of so many steps would have written them, with one restart in the middle, before those there."""
    own = file.read_bytes()
    first = next(json.loads(line) for line in own.splitlines() if b'"event": "step"' in line)
    start = next(line for line in own.splitlines(keepends=True) if line.startswith(b'{"event": "start"'))
    before, _, after = json.dumps({**first, "step": "@", "loss": "#"}).partition('"@"')
    middle, _, end = after.partition('"#"')
    end += "\n"
    with file.open("wb") as written:
        written.write(start)
        for begin in range(1, count + 1, 10_000):
            steps = range(begin, min(begin + 10_000, count + 1))
            written.write("".join(f"{before}{n}{middle}{2 + 1 / n:.6f}{end}" for n in steps).encode())
            if begin // 10_000 == count // 20_000:
                written.write(json.dumps({**json.loads(start), "event": "resume", "step": begin}).encode() + b"\n")
        written.write(own.removeprefix(start))


def measure_parameters(folder: Path, small: bool) -> list[dict[str, Any]]:
    rows = []
    for count in (500, 1000) if small else (2500, 5000, 10_000):
        for strategy in ("ddp", "zero3", "pp2"):
            place = _fresh(folder)
            flags = ["--strategy", strategy, "--nproc", "2", "--batch-size", "8", "--checkpoint-every", "5"]
            flags += ["--set", f"model.parameters={count}"]
            ran = run(train(place, *flags, "--steps", "5"), place)
            rows.append(_row(f"{strategy}: 5 steps and a checkpoint", count, ran))
            rows.append(_of(f"{strategy}: a step", count, step_seconds(place / "run")))
            saved = rows_of(place / "run", "checkpoint")[-1]
            rows.append(_of(f"{strategy}: a save", count, saved["stall_seconds"] + saved["write_seconds"]))
            ran = run(train(place, *flags, "--steps", "6", "--resume"), place)
            rows.append(_row(f"{strategy}: --resume and a step", count, ran))
        place = _fresh(folder)
        plan = [*_RUNG, "plan", "task.py", "--cluster", "2xH100", "--set", f"model.parameters={count}"]
        rows.append(_row("rung plan", count, run(plan, place)))
    return rows


def measure_samples(folder: Path, small: bool) -> list[dict[str, Any]]:
    rows = []
    for count in (10**4, 10**6) if small else (10**6, 10**9, 10**12):
        for workers in (0, 1):
            place = _fresh(folder)
            flags = ["--strategy", "ddp", "--nproc", "2", "--steps", "20", "--set", f"train_data.count={count}"]
            ran = run(train(place, *flags, "--set", f"workers={workers}"), place)
            rows.append(_row(f"20 steps, {workers} loader processes", count, ran))
    return rows


_PARTS: dict[str, Callable[[Path, bool], list[dict[str, Any]]]] = {
    "ranks": measure_ranks,
    "checkpoints": measure_checkpoints,
    "metrics": measure_metrics,
    "parameters": measure_parameters,
    "samples": measure_samples,
}


def _fresh(folder: Path) -> Path:
    place = Path(tempfile.mkdtemp(dir=folder))
    (place / "task.py").write_text(_TASK)
    return place


def _row(what: str, size: int, ran: Ran) -> dict[str, Any]:
    return {"what": what, "size": size, "seconds": ran.seconds, "peak_bytes": ran.peak_bytes}


def _of(what: str, size: int, seconds: float) -> dict[str, Any]:
    return {"what": what, "size": size, "seconds": seconds}


def growth(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The exponents between the two largest sizes, of whatever was measured at both."""
    found: dict[str, dict[str, float]] = {}
    for what in dict.fromkeys(row["what"] for row in rows):
        same = sorted((row for row in rows if row["what"] == what), key=lambda row: row["size"])
        if len(same) < 2:
            continue
        less, more = same[-2:]
        found[what] = {
            key: math.log(more[key] / less[key]) / math.log(more["size"] / less["size"])
            for key in ("seconds", "peak_bytes", "total_bytes")
            if less.get(key) and more.get(key)
        }
    return found


def too_fast(part: str, rows: list[dict[str, Any]]) -> list[str]:
    """What grows faster than it may."""
    slow = {row["what"] for row in rows if row["seconds"] >= _MATTERS_SECONDS}
    return [
        f"{what}: {key} grows by a power of {value:.2f}"
        for what, each in growth(rows).items()
        for key, value in each.items()
        if value > (_POWERS.get(part, 1.0) if key == "seconds" else 1.0) + _NOISE and (key != "seconds" or what in slow)
    ]


def show(part: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{part}")
    exponents = growth(rows)
    for what in dict.fromkeys(row["what"] for row in rows):
        for row in (row for row in rows if row["what"] == what):
            memory = row.get("total_bytes") or row.get("peak_bytes")
            print(
                f"  {what:<42} {row['size']:>16,}  {row['seconds']:>9.3f} s"
                + (f"  {memory / 2**20:>8,.0f} MiB" if memory else "")
            )
        told = ", ".join(f"{key} ^{value:.2f}" for key, value in exponents.get(what, {}).items())
        print(f"  {'':<42} {told}")


def marks(content: dict[str, Any]) -> dict[str, str]:
    machine = content["machine"]
    told = f"{machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}."
    return {"load": told, "load_table": table(content)}


def table(content: dict[str, Any]) -> str:
    lines = ["| what | sizes | seconds | memory at the largest | seconds grow as size to the power of |"]
    lines.append("|---|---|---|---|---|")
    for part, found in content["parts"].items():
        for what in dict.fromkeys(row["what"] for row in found["rows"]):
            rows = sorted((row for row in found["rows"] if row["what"] == what), key=lambda row: row["size"])
            sizes = ", ".join(f"{row['size']:,}" if row["size"] < 10**6 else f"{row['size']:.0e}" for row in rows)
            seconds = ", ".join(f"{row['seconds']:.3g}" for row in rows)
            memory = rows[-1].get("total_bytes") or rows[-1].get("peak_bytes")
            power = found["exponents"].get(what, {}).get("seconds")
            lines.append(
                f"| {part}: {what} | {sizes} | {seconds} | {f'{memory / 2**20:,.0f} MiB' if memory else ''} | "
                f"{f'{power:.2f}' if power is not None else ''} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--scratch", type=Path, help="a folder on a disk with 10 GB to spare; default: that of TMPDIR")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/load.json"))
    parser.add_argument("--show", type=Path, help="write the page from these figures, and measure nothing")
    options = parser.parse_args()
    if options.show is not None:
        fill_page(_PAGE, options.show, marks)
        return
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.load", *sys.argv[1:]]),
        "machine": machine_facts("cpu"),
        "parts": {},
    }
    if options.out.exists() and set(options.parts) < set(_PARTS):  # parts that are measured by themselves are added
        content["parts"] = json.loads(options.out.read_text())["parts"]
    for part in options.parts:
        with tempfile.TemporaryDirectory(dir=options.scratch) as name:
            rows = _PARTS[part](Path(name), options.small)
        show(part, rows)
        content["parts"][part] = {"rows": rows, "exponents": growth(rows), "too_fast": too_fast(part, rows)}
        write(options.out, content)
    fill_page(_PAGE, options.out, marks)
    found = [line for part in content["parts"].values() for line in part["too_fast"]]
    print("\n" + ("\n".join(found) if found else "nothing grows faster than it may"))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
