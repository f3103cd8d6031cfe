"""How long a whole job of one step takes, from the command to its end, beside a script written by hand.

python -m benchmarks.launch
python -m benchmarks.launch --repeats 3 --out /tmp/launch.json

`rung train` of BabyCNN on two ranks beside torchrun with the same model, data and optimizer in a DDP loop, `rung train`
on one beside `python script.py`, and `rung --help`. The commands alternate; the order rotates. BabyCNN's data comes
from scikit-learn, whose import is part of all of them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import fill_page, machine_facts, write

_TASK = Path(__file__).parents[1] / "examples/babycnn/task.py"

_ONE = f"""
import sys
sys.path.insert(0, {str(_TASK.parent)!r})
import task
from torch.utils.data import DataLoader

model = task.model()
optimizer = task.optimizer(model)
images, labels = next(iter(DataLoader(task.train_data(), batch_size=64, shuffle=True)))
task.loss(model(images), labels).backward()
optimizer.step()
"""

_TWO = f"""
import sys
sys.path.insert(0, {str(_TASK.parent)!r})
import task
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(task.model())
optimizer = task.optimizer(model)
data = task.train_data()
images, labels = next(iter(DataLoader(data, batch_size=32, sampler=DistributedSampler(data))))
task.loss(model(images), labels).backward()
optimizer.step()
dist.barrier()  # or a rank aborts at times, when the other has closed its connections
dist.destroy_process_group()
"""


def commands(folder: Path) -> dict[str, list[str]]:
    (folder / "one.py").write_text(_ONE)
    (folder / "two.py").write_text(_TWO)
    train = [sys.executable, "-m", "rung", "train", str(_TASK), "--steps", "1"]
    for setting in ("device=cpu", "eval_every=never"):
        train += ["--set", setting]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return {
        "rung train, ddp on 2": [*train, "--strategy", "ddp", "--nproc", "2"],
        "torchrun, by hand on 2": [*torchrun, str(folder / "two.py")],
        "rung train, single": [*train, "--strategy", "single"],
        "python, by hand": [sys.executable, str(folder / "one.py")],
        "its imports alone": [sys.executable, "-c", "import torch, sklearn.datasets"],
        "rung --help": [sys.executable, "-m", "rung", "--help"],
    }


def measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    chosen = commands(folder)
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program keeps what it has compiled
    for repetition in range(-1, repeats):  # the first does not count: it compiles modules and fills the page cache
        names = list(chosen)
        shift = repetition % len(names)
        for name in [*names[shift:], *names[:shift]]:
            started = time.perf_counter()
            done = subprocess.run(chosen[name], cwd=folder, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            if repetition >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def marks(content: dict[str, Any]) -> dict[str, str]:
    machine = content["machine"]
    told = {
        name: f"{row['median']:.1f} s ({row['min']:.1f} to {row['max']:.1f})"
        for name, row in content["seconds"].items()
    }
    words = (
        f"A whole job of one step with BabyCNN, on {machine['cores']} cores, torch {machine['torch']}: `rung train` "
        f"under ddp on two ranks {told['rung train, ddp on 2']}, torchrun with a script by hand "
        f"{told['torchrun, by hand on 2']}; on one process {told['rung train, single']} and {told['python, by hand']}, "
        f"of which {told['its imports alone']} for importing torch and scikit-learn; "
        f"`rung --help` {content['seconds']['rung --help']['median']:.2f} s. Medians and ranges."
    )
    return {"launch": words}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/launch.json"))
    options = parser.parse_args()
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.launch", *sys.argv[1:]]),
        "machine": machine_facts("cpu"),
    }
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(Path(folder), options.repeats)
    content["seconds"] = {
        name: {"median": statistics.median(each), "min": min(each), "max": max(each), "all": each}
        for name, each in seconds.items()
    }
    write(options.out, content)
    for name, row in content["seconds"].items():
        print(f"{name:<26}{row['median']:>7.2f} s  ({row['min']:.2f}..{row['max']:.2f})")
    print(f"written to {options.out}")
    fill_page(Path("docs/speed.md"), options.out, marks)


if __name__ == "__main__":
    main()
