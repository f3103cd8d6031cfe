"""Training while ranks are killed: how long it takes to finish, and how much work is done again, beside torchrun.

python -m benchmarks.faults
python -m benchmarks.faults --steps 300 --distance 100 --out /tmp/faults.json
python -m benchmarks.faults --show benchmarks/results/faults.json

The same small job on two ranks, gloo, one thread each: Rung with checkpoints; Rung that also copies its state into
memory in every step; and a DDP loop by hand under torchrun (benchmarks/contenders/restarted_ddp.py), which saves as
often. Ranks are killed when a job first reaches certain steps, the same for all: the distances are exponentially
distributed, with a mean of `--distance` step times. Each job is run without faults, too. The table and the picture of
docs/elastic.md are written from the results; --show does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import fill_page, machine_facts, write
from benchmarks.tasks.faults import BATCH_SIZE
from rung.distributed.status_board import read_statuses
from rung.system.svg import BLUE, GREEN, GREY, INK, LINE, MARGIN, ORANGE, WIDTH, Page

_PAGE, _PICTURE = Path("docs/elastic.md"), Path("docs/faults.svg")
_TASK = Path(__file__).parent / "tasks" / "faults.py"
_COLOURS = {"rung": BLUE, "rung --replicate-state": GREEN, "torchrun": ORANGE}
_STALL_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_POINT_SECONDS = 0.25  # between two points of a curve


@dataclass(frozen=True)
class Started:
    """A job that runs."""

    process: subprocess.Popen[bytes]
    steps: Path  # a line is added for each step that is done
    read: Callable[[bytes], tuple[str, int] | None]  # "step" or "resume" and its number; None for other lines
    victim: Callable[[int], int | None]  # the process of a rank


def start_rung(folder: Path, options: argparse.Namespace, *flags: str) -> Started:
    run = folder / "run"
    command = [
        sys.executable, "-m", "rung", "train", str(_TASK), "--strategy", "ddp", "--nproc", "2",
        "--steps", str(options.steps), "--checkpoint-every", str(options.checkpoint_every), "--max-restarts", "5",
        "--out", str(run), *flags,
    ]  # fmt: skip

    def victim(rank: int) -> int | None:
        status = read_statuses(run / ".state" / "status").get(rank)
        return status.pid if status is not None else None

    def read(line: bytes) -> tuple[str, int] | None:
        row = json.loads(line)
        return (row["event"], int(row["step"])) if row["event"] in ("step", "resume") else None

    return Started(_start(command, folder), run / "metrics.jsonl", read, victim)


def start_torchrun(folder: Path, options: argparse.Namespace) -> Started:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=1000",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1",
        "--monitor-interval=0.1", "-m", "benchmarks.contenders.restarted_ddp",
        str(folder), str(options.steps), str(options.checkpoint_every),
    ]  # fmt: skip

    def victim(rank: int) -> int | None:
        file = folder / f"pid-{rank}"
        return int(file.read_text() or 0) if file.exists() else None

    return Started(_start(command, folder), folder / "steps", lambda line: ("step", int(line)), victim)


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    # The second setting: without it restarts under torchrun find the addresses of dead ranks, and fail.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


_CONTENDERS: dict[str, Callable[[Path, argparse.Namespace], Started]] = {
    "rung": start_rung,
    "rung --replicate-state": lambda folder, options: start_rung(folder, options, "--replicate-state"),
    "torchrun": start_torchrun,
}


def follow(started: Started, faults: list[tuple[int, int]]) -> dict[str, Any]:
    """To its end, killing a rank whenever a fault's step is first done."""
    began = moved = time.perf_counter()
    curve: list[tuple[float, int]] = [(0.0, 0)]
    done: dict[int, int] = {}  # how often each step was done
    pending, num_faults, offset, reached = list(faults), 0, 0, 0
    while True:
        is_over = started.process.poll() is not None
        lines, offset = _new_lines(started.steps, offset)
        now = time.perf_counter()
        for line in lines:
            found = started.read(line)
            if found is None:
                continue
            kind, step = found
            moved = now
            if kind == "resume":  # all steps up to it are in the state, also one whose line a killed rank did not write
                done = {**dict.fromkeys(range(1, step + 1), 1), **done}
                continue
            done[step] = done.get(step, 0) + 1
            if now - began >= curve[-1][0] + _POINT_SECONDS or step < curve[-1][1]:
                curve.append((now - began, step))
            reached = max(reached, step)
        if is_over:
            break
        if pending and reached >= pending[0][0]:
            pid = started.victim(pending[0][1])
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    num_faults += 1
                pending.pop(0)
        if now - moved > _STALL_SECONDS:
            raise RuntimeError("the job does not go on")
        time.sleep(_LOOK_SECONDS)
    if started.process.returncode != 0:
        raise RuntimeError(f"the job ended with {started.process.returncode}")
    seconds = time.perf_counter() - began
    curve.append((moved - began, reached))
    return {
        "seconds": seconds,
        "faults": num_faults,
        "steps_done_again": sum(count - 1 for count in done.values()),
        "samples_done_again": sum(count - 1 for count in done.values()) * BATCH_SIZE,
        "samples_never_seen": (reached - len(done)) * BATCH_SIZE,
        "curve": [[round(when, 2), step] for when, step in curve],
    }


def _new_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    whole = content[: content.rfind(b"\n") + 1]
    return whole.splitlines(), offset + len(whole)


def moments(steps: int, distance: float, seed: int) -> list[tuple[int, int]]:
    """Steps after which a rank is killed, and which rank."""
    chance = random.Random(seed)
    found: list[tuple[int, int]] = []
    at = 0.0
    while True:
        at += chance.expovariate(1 / distance)
        if at >= steps:
            return found
        found.append((max(1, round(at)), chance.randrange(2)))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    machine = machine_facts("cpu")
    faults = moments(options.steps, options.distance, options.seed)
    rows: dict[str, dict[str, list[Any]]] = {name: {"with faults": [], "without": []} for name in _CONTENDERS}
    for number in range(options.repeats):
        for kind, planned in (("without", []), ("with faults", faults)):
            for name, start in _CONTENDERS.items():
                with tempfile.TemporaryDirectory() as folder:
                    started = start(Path(folder), options)
                    try:
                        found = follow(started, planned)
                    except RuntimeError as error:
                        told = Path(folder, "output").read_text(errors="replace")[-2000:]
                        raise RuntimeError(f"{name}: {error}\n{told}") from None
                    finally:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(started.process.pid, signal.SIGKILL)
                        started.process.wait()
                rows[name][kind].append(found)
                print(
                    f"{number + 1}: {name}, {kind}: {found['seconds']:.1f} s, {found['faults']} faults, "
                    f"{found['steps_done_again']} steps done again, {found['samples_never_seen']} samples never seen"
                )
    return {
        "command": shlex.join(["python", "-m", "benchmarks.faults", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "steps": options.steps,
        "checkpoint_every": options.checkpoint_every,
        "batch_size": BATCH_SIZE,
        "mean_distance_steps": options.distance,
        "faults": faults,
        "left_out": {"torchft": torchft_reason()},
        "rows": rows,
    }


def torchft_reason() -> str:
    """Why it is not among them, on this machine."""
    if platform.machine() != "x86_64":
        return (
            f"torchft 0.2.0 and its nightly releases have wheels for x86_64 only, and this machine is "
            f"{platform.machine()}; its source distribution is built with Rust from crates that have to be downloaded, "
            "and could not be built"
        )
    return "this program has no job for it"


# -- the page --------------------------------------------------------------------------------------------------------


def marks(figures: dict[str, Any]) -> dict[str, str]:
    shown = "![progress while ranks are killed: Rung, Rung with copies in memory, torchrun](faults.svg)"
    return {"faults": sentence(figures), "faults_table": table(figures), "faults_picture": shown}


def table(figures: dict[str, Any]) -> str:
    lines = ["| | time to finish | without faults | a fault costs | steps done again | samples never seen |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in figures["rows"].items():
        hit, plain = (_median(row[kind]) for kind in ("with faults", "without"))
        each = (hit["seconds"] - plain["seconds"]) / max(1, hit["faults"])
        shown = "torchrun, a DDP loop by hand" if name == "torchrun" else name.replace("rung --", "rung with --")
        lines.append(
            f"| {shown} | {hit['seconds']:.1f} s | {plain['seconds']:.1f} s | {each:.2f} s | "
            f"{hit['steps_done_again']} of {figures['steps']} | {hit['samples_never_seen']} |"
        )
    return "\n".join(lines)


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time."""
    return sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]


def sentence(figures: dict[str, Any]) -> str:
    machine = figures["machine"]
    count = _median(figures["rows"]["rung"]["with faults"])["faults"]
    repeats = len(figures["rows"]["rung"]["with faults"])
    often = f", the median of {repeats} runs" if repeats > 1 else ""
    return (
        f"{figures['steps']:,} steps of {figures['batch_size']} samples on two ranks, a checkpoint every "
        f"{figures['checkpoint_every']} steps, {count} kills at a mean distance of "
        f"{figures['mean_distance_steps']:g} steps, at the same steps for all; {machine['cores']} cores "
        f"({machine['cpu']}), torch {machine['torch']}, {figures['date']}{often}. Not among them: "
        + "; ".join(f"{name} ({why})" for name, why in figures["left_out"].items())
        + "."
    )


def picture(figures: dict[str, Any]) -> str:
    """Steps over time, for each job with faults."""
    page = Page()
    title = "Progress while ranks are killed"
    page.text(MARGIN, page.y + 8, title, size=17, bold=True)
    page.text(MARGIN, page.y + 28, f"steps done over seconds, of {figures['steps']:,}", size=12, fill=GREY)
    left, right, top, height = MARGIN + 44.0, WIDTH - MARGIN - 190.0, page.y + 48, 320.0
    chosen = {name: _median(row["with faults"]) for name, row in figures["rows"].items()}
    longest = max(row["seconds"] for row in chosen.values())

    def place(when: float, step: float) -> tuple[float, float]:
        return left + (right - left) * when / longest, top + height * (1 - step / figures["steps"])

    for part in range(5):
        step = figures["steps"] * part / 4
        _, y = place(0, step)
        page.line([(left, y), (right, y)], LINE)
        page.text(left - 8, y + 4, f"{step:,.0f}", size=11, fill=GREY, anchor="end")
        x, _ = place(longest * part / 4, 0)
        page.text(x, top + height + 18, f"{longest * part / 4:.0f} s", size=11, fill=GREY, anchor="middle")
    for number, (name, row) in enumerate(chosen.items()):
        page.line([place(when, step) for when, step in row["curve"]], _COLOURS[name], width=2)
        y = top + 16 + 40 * number
        page.line([(right + 16, y - 4), (right + 36, y - 4)], _COLOURS[name], width=3)
        page.text(right + 42, y, name, size=12, fill=INK)
        told = f"{row['seconds']:.0f} s, {row['steps_done_again']} steps again"
        page.text(right + 42, y + 15, told, size=11, fill=GREY)
    page.y = top + height + 24
    return page.render(title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--distance", type=float, default=250, help="mean number of steps between two faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults.json"))
    parser.add_argument("--show", type=Path, help="write the page and the picture from these figures, measure nothing")
    options = parser.parse_args()
    if options.show is None:
        write(options.out, measure(options))
    if (figures := fill_page(_PAGE, options.show or options.out, marks)) is not None:
        _PICTURE.write_text(picture(figures))


if __name__ == "__main__":
    main()
