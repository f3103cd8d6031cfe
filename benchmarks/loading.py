"""How much memory a rank needs to take up a checkpoint, against its share of the state.

python -m benchmarks.loading
python -m benchmarks.loading --cases zero3:4 single:1 --layers 8

A model of 400 MB and its Adam state (1.2 GB in all) is saved under ddp on 2 ranks, and taken up under other strategies:
the model built without values, and each rank's part read from the files. The peak is the most memory that was resident
at any moment (VmHWM, which is reset before), less what an idle rank has that took up a tiny model before.

`by torch` is what a process needs that makes tensors of this rank's shapes and fills them, and reads no checkpoint:
torch gives large tensors huge pages on some machines, which round up. What is above it is the price of loading.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks import report
from benchmarks.ranks import on_ranks
from rung.checkpoint import Position, Saver, StorageTopology, choose, restore, state_folders
from rung.distributed.world import open_world
from rung.runtime import Runtime, build_runtime
from rung.runtime.optimizer import local_part
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from rung.system.launcher_env import environment_size

_RESULTS = Path(__file__).parent / "results"
_TASK = Path(__file__).parent / "tasks" / "gpt.py"
_CONFIG = RunConfig(batch_size=4, steps=2, device="cpu", eval_every="never")
_CASES = ("zero3:4", "zero3:2", "fsdp2,tp2:4", "tp2:2", "pp2:2", "zero1:2", "ddp:2", "single:1")
MIB = 2**20


def gpt_task(layers: int, width: int) -> Task:
    sizes = {"layers": layers, "width": width, "heads": max(1, width // 128), "context": 32, "vocabulary": 256}
    data = {"context": 32, "vocabulary": 256}
    settings = {f"model.{key}": value for key, value in sizes.items()}
    return load_task(_TASK).bind({**settings, **{f"train_data.{key}": value for key, value in data.items()}})


def save_on_rank(strategy: str, models: dict[str, tuple[int, int]]) -> int:
    """Save each model after one update, so that the optimizer has its state. The bytes of the last one."""
    with open_world(parse(strategy, environment_size()), device="cpu") as world:
        for folder, sizes in models.items():
            runtime = build_runtime(gpt_task(*sizes), world, _CONFIG, total_steps=2)
            for parameter in runtime.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            runtime.optimizer.step()
            saver = Saver(Path(folder) / "checkpoints", runtime, background=False)
            saver.save(Position(1, 0, 4, 4), wait=True)
            num_bytes = saver.finished()[0].num_bytes
        return num_bytes


def load_on_rank(strategy: str, models: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Take up each model; the figures of the last one, before which all that Python loads on first use is there."""
    with open_world(parse(strategy, environment_size()), device="cpu") as world:
        for folder, sizes in models.items():
            run_dir, task = Path(folder), gpt_task(*sizes)
            sites = StorageTopology(world, run_dir)
            gc.collect()
            world.barrier()
            _forget_peak()
            idle = _memory()["VmRSS"]
            checkpoint = choose(state_folders(run_dir), world, sites)
            assert checkpoint is not None
            runtime = build_runtime(task, world, _CONFIG, total_steps=2, seeded=False)
            built = _memory()["VmHWM"]
            started = time.perf_counter()
            restore(runtime, checkpoint, seed=0)
            seconds = time.perf_counter() - started
            peak = _memory()["VmHWM"]
            tensors = _state(runtime)
            share = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            shapes = [(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
            del runtime, tensors
        return {
            "share_bytes": share,
            "peak_bytes": peak - idle,
            "peak_while_building_bytes": built - idle,
            "idle_bytes": idle,
            "seconds": seconds,
            "shapes": shapes,
        }


def make_by_torch(shapes: list[tuple[tuple[int, ...], str]]) -> int:
    """What tensors of these shapes take, and nothing else."""
    idle = _memory()["VmRSS"]
    kept = [torch.ones(shape, dtype=getattr(torch, dtype)) for shape, dtype in shapes]
    return _memory()["VmRSS"] - idle if kept else 0


def _state(runtime: Runtime) -> list[Tensor]:
    kept = [*runtime.model.parameters(), *runtime.model.buffers()]
    kept += [v for values in runtime.optimizer.state.values() for v in values.values() if isinstance(v, Tensor)]
    return [local_part(tensor).detach() for tensor in kept if not getattr(tensor, "is_absent", False)]


def _memory() -> dict[str, int]:
    """Figures of this process, as the kernel has them, in bytes."""
    rows = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[0] in ("VmRSS:", "VmHWM:")}


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--saved", default="ddp:2", metavar="STRATEGY:RANKS", help="how it was saved (default ddp:2)")
    parser.add_argument("--cases", nargs="+", default=list(_CASES), metavar="STRATEGY:RANKS")
    parser.add_argument("--out", type=Path, default=_RESULTS / "loading.json")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    made: dict[str, int] = {}  # most ranks have the same shapes
    table = Table(box=None, header_style="bold")
    for column in ("resumed under", "ranks", "share", "peak", "peak/share", "rank 0", "by torch", "above", "seconds"):
        table.add_column(column, justify="left" if column == "resumed under" else "right")
    with tempfile.TemporaryDirectory(prefix="rung-loading-") as base:
        models = {f"{base}/tiny": (1, 128), f"{base}/large": (options.layers, options.width)}
        strategy, _, ranks = options.saved.rpartition(":")
        num_bytes = on_ranks(save_on_rank, int(ranks), strategy, models)[0]
        for case in options.cases:
            strategy, _, ranks = case.rpartition(":")
            found = on_ranks(load_on_rank, int(ranks), strategy, models)
            for rank in found:
                shapes = rank.pop("shapes")
                if str(shapes) not in made:
                    made[str(shapes)] = on_ranks(make_by_torch, 1, shapes)[0]
                rank["by_torch_bytes"] = made[str(shapes)]
            rows.append({"strategy": strategy, "ranks": int(ranks), "each": found})
            worst = max(found, key=lambda rank: rank["peak_bytes"] / rank["share_bytes"])
            table.add_row(
                strategy,
                ranks,
                *(_mib(worst[key]) for key in ("share_bytes", "peak_bytes")),
                f"{worst['peak_bytes'] / worst['share_bytes']:.2f}",
                _mib(found[0]["peak_bytes"]),
                _mib(worst["by_torch_bytes"]),
                _mib(max(rank["peak_bytes"] - rank["by_torch_bytes"] for rank in found)),
                f"{max(rank['seconds'] for rank in found):.1f}",
            )
    content = {
        "command": shlex.join(["python", "-m", "benchmarks.loading", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts("cpu"),
        "saved": options.saved,
        "checkpoint_bytes": num_bytes,
        "rows": rows,
    }
    report.write(options.out, content)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(f"saved under {options.saved}, {num_bytes / 1e9:.2f} GB; the rank with the highest ratio, in MiB:")
    console.print(table)
    console.print(f"written to {options.out}")
    return 0


def _mib(count: float) -> str:
    return f"{count / MIB:,.0f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
