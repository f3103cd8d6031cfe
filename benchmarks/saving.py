"""For how long training stands still when its state is saved, and what the write beside it costs.

python -m benchmarks.saving
python -m benchmarks.saving --strategies ddp --rounds 3

All contenders save the state of the same run in turn, between its steps, in an order that rotates:

    rung        as `rung train` does by default: a copy to host memory, and a thread that writes
    rung-sync   the same with async_save off
    dcp         torch.distributed.checkpoint.save, as it comes
    dcp-async   torch.distributed.checkpoint.async_save, with a process group of its own, without which it hangs
    torch.save  rank 0 saves the whole state, gathered where it is sharded

The stall is the time of the call, on the rank that waits longest. `then` is what the steps after it take longer than
usual, in sum: a thread that hashes and writes needs a core, and where every core computes it takes it from the steps.
Rung and dcp wait until the disk has the data (fsync), in the background or not; torch.save does not.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from benchmarks import report
from benchmarks.loading import gpt_task
from benchmarks.ranks import on_ranks
from rung.checkpoint import Position, Saver
from rung.data.batch_shard import LocalBatch
from rung.distributed.world import World, open_world
from rung.runtime import Runtime, build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches

_RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("rung", "rung-sync", "dcp", "dcp-async", "torch.save")


@dataclass(frozen=True)
class Plan:
    strategy: str
    layers: int
    width: int
    rounds: int  # saves of each contender that count; one before them does not
    steps_after: int

    def order(self, number: int) -> list[str]:
        shift = number % len(CONTENDERS)
        return [*CONTENDERS[shift:], *CONTENDERS[:shift]]


class _Savers:
    """Every contender behind one call, which returns when training may go on, and one that waits for the rest."""

    def __init__(self, runtime: Runtime, world: World, folder: Path) -> None:
        self._runtime, self._world, self._folder = runtime, world, folder
        self._savers = {
            name: Saver(folder / name, runtime, keep=1, background=name == "rung") for name in ("rung", "rung-sync")
        }
        self._group = dist.new_group(backend="gloo")
        self._pending: Any = None
        self.write_seconds: list[float] = []  # of Rung's thread

    def save(self, name: str, step: int) -> None:
        folder = self._folder / name / f"{step:06d}"
        if name in self._savers:
            self._savers[name].save(Position(step, 0, step, step))
        elif name == "torch.save":
            state = self._whole_state()
            if self._world.is_main:
                folder.mkdir(parents=True)
                torch.save(state, folder / "state.pt")
        elif name == "dcp":
            dcp.save(self._state(), checkpoint_id=folder)
        else:
            self._pending = dcp.async_save(self._state(), checkpoint_id=folder, process_group=self._group)

    def finish(self, name: str) -> None:
        """Wait until it is written, and remove it."""
        if name in self._savers:
            self._savers[name].wait()
            (record,) = self._savers[name].finished()
            assert record.error is None, record.error
            if name == "rung":
                self.write_seconds.append(record.write_seconds)
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        self._world.barrier()
        if self._world.is_main:
            shutil.rmtree(self._folder / name, ignore_errors=True)
        self._world.barrier()

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._runtime.model, self._runtime.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _whole_state(self) -> dict[str, Any]:
        model, optimizer = self._runtime.model, self._runtime.optimizer
        if not self._world.layout.uses_fully_shard:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=whole), strict=True))


def measure_on_rank(plan: Plan, folder: str) -> dict[str, Any]:
    """Seconds of each contender's stalls and of every step after them, the longest over the ranks."""
    task = gpt_task(plan.layers, plan.width)
    config = RunConfig(
        batch_size=2 * environment_size(), steps=10**6, device="cpu", eval_every="never", log_every=10**6
    )
    with open_world(parse(plan.strategy, environment_size()), device="cpu") as world:
        runtime = build_runtime(task, world, config, total_steps=10**6)
        windows = runtime.place(make_batches(task, config, world))
        savers = _Savers(runtime, world, Path(folder))
        found: dict[str, Any] = {name: {"stall": [], "steps": []} for name in CONTENDERS}
        _take_steps(runtime, world, windows, 2)
        for number in range(plan.rounds + 1):
            for name in plan.order(number):
                stall = _timed(world, lambda name=name, number=number: savers.save(name, number + 1))
                steps = _take_steps(runtime, world, windows, plan.steps_after)
                savers.finish(name)
                _take_steps(runtime, world, windows, 1)
                found[name]["stall"].append(stall)
                found[name]["steps"].append(steps)
        return {
            "contenders": found,
            "state_bytes": sum(runtime.state_bytes().values()),
            "write_seconds": savers.write_seconds,
        }


def _take_steps(runtime: Runtime, world: World, windows: Iterator[LocalBatch], count: int) -> list[float]:
    return [_timed(world, lambda: runtime.step(next(windows))) for _ in range(count)]


def _timed(world: World, action: Callable[[], Any]) -> float:
    """From a moment that all ranks share until the last of them has done it."""
    world.barrier()
    started = time.perf_counter()
    action()
    return max(row[0] for row in world.gather([time.perf_counter() - started]))


def summarise(found: dict[str, Any]) -> dict[str, Any]:
    """Medians and worst cases over the rounds, the first of which warmed up."""
    calm = [
        s for name in ("rung-sync", "dcp", "torch.save") for row in found["contenders"][name]["steps"][1:] for s in row
    ]
    usual = statistics.median(calm)
    rows: dict[str, Any] = {}
    for name, seconds in found["contenders"].items():
        stalls, steps = seconds["stall"][1:], seconds["steps"][1:]
        extra = [sum(step - usual for step in row) for row in steps]
        rows[name] = {
            "stall_seconds": {"median": statistics.median(stalls), "worst": max(stalls), "all": stalls},
            "first_stall_seconds": seconds["stall"][0],
            "next_step_seconds": {
                "median": statistics.median(row[0] for row in steps),
                "worst": max(row[0] for row in steps),
            },
            "extra_seconds_of_steps_after": {"median": statistics.median(extra), "worst": max(extra), "all": extra},
            "steps_after_seconds": steps,
        }
    base = found["contenders"]["rung"]["stall"][1:]
    for row in rows.values():
        ratios = [own / other for own, other in zip(row["stall_seconds"]["all"], base, strict=True)]
        row["stall_ratio_to_rung"] = {
            "median": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return {
        "usual_step_seconds": usual,
        "state_bytes_of_rank_0": found["state_bytes"],
        "rung_write_seconds": found["write_seconds"][1:],
        "contenders": rows,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="saves of each contender that count")
    parser.add_argument("--steps-after", type=int, default=3, help="steps that are looked at after each save")
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where to save to; default: a temporary directory")
    parser.add_argument("--out", type=Path, default=_RESULTS / "saving.json")
    options = parser.parse_args(arguments)
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.saving", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts("cpu"),
        "ranks": options.ranks,
        "strategies": {},
    }
    console = Console() if sys.stdout.isatty() else Console(width=110)
    for strategy in options.strategies:
        plan = Plan(strategy, options.layers, options.width, options.rounds, options.steps_after)
        with tempfile.TemporaryDirectory(prefix="rung-saving-", dir=options.folder) as folder:
            found = on_ranks(measure_on_rank, options.ranks, plan, folder)
        summary = summarise(found[0])
        content["strategies"][strategy] = summary
        report.write(options.out, content)
        console.print(
            f"{strategy} on {options.ranks} ranks; {summary['state_bytes_of_rank_0'] / 1e6:.0f} MB of state on rank 0; "
            f"a step takes {summary['usual_step_seconds']:.2f} s"
        )
        console.print(_table(summary))
    console.print(f"written to {options.out}")
    return 0


def _table(summary: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("", "stall", "worst", "first", "to rung", "then", "worst"):
        table.add_column(column, justify="left" if not column else "right")
    for name, row in summary["contenders"].items():
        stall, extra = row["stall_seconds"], row["extra_seconds_of_steps_after"]
        seconds = [stall["median"], stall["worst"], row["first_stall_seconds"]]
        ratio = f"{row['stall_ratio_to_rung']['median']:.1f}x"
        table.add_row(
            name, *(f"{s:.3f} s" for s in seconds), ratio, *(f"{extra[k]:+.2f} s" for k in ("median", "worst"))
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
