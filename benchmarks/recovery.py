"""How long a run stands still when a rank is killed: from the kill to the next finished step.

Rung under several strategies, and a hand-written DDP loop under torchrun, take turns. Both save every ten steps; the
steps take 20 ms and the model is small, so what is measured is noticing the death, starting processes and loading.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rung.distributed.status_board import StatusBoard

_TASK = """
import time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def forward(self, x):
        time.sleep(0.02)
        return self.layers(x)


def model():
    return Model()


def train_data():
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x)


def loss(output, target):
    return F.mse_loss(output, target)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""


class Contender:
    """A run that can be hit."""

    def __init__(self, command: list[str], steps: Path, victim: Callable[[], int | None]) -> None:
        self._steps, self._victim = steps, victim
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def recover(self) -> float:
        """Seconds from a kill to the next step."""
        self._wait(self._size(), 5)
        pid = self._victim()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        time.sleep(0.1)  # what the other rank was at is over by then: no step ends without the dead one
        self._wait(self._size(), 1)
        return time.perf_counter() - killed

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _size(self) -> int:
        return self._steps.read_text().count("\n") if self._steps.exists() else 0

    def _wait(self, known: int, more: int) -> None:
        deadline = time.monotonic() + 60
        while self._size() < known + more:
            assert time.monotonic() < deadline, "the run does not go on"
            assert self._process.poll() is None, "the run has ended"
            time.sleep(0.005)


def rung(folder: Path, strategy: str) -> Contender:
    (folder / "task.py").write_text(_TASK)
    run = folder / "run"

    def victim() -> int | None:
        return StatusBoard(run / ".state" / "status", 2).read(1).pid

    command = [
        sys.executable, "-m", "rung", "train", str(folder / "task.py"), "--strategy", strategy, "--nproc", "2",
        "--steps", "100000", "--checkpoint-every", "10", "--max-restarts", "9", "--set", "log_every=1",
        "--set", "eval_every=never", "--out", str(run),
    ]  # fmt: skip
    return Contender(command, run / "metrics.jsonl", victim)


def torchrun(folder: Path) -> Contender:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=9",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=1",
        "--monitor-interval=0.1", "-m", "benchmarks.contenders.elastic_torchrun", str(folder), "10", "0.02",
    ]  # fmt: skip
    return Contender(command, folder / "steps", lambda: int((folder / "pid-1").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=["ddp", "zero3", "pp2"])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/recovery.json"))
    options = parser.parse_args()
    makers: dict[str, Callable[[Path], Contender]] = {"torchrun": torchrun}
    for strategy in options.strategies:
        makers[f"rung {strategy}"] = lambda folder, strategy=strategy: rung(folder, strategy)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(options.rounds):
        for name, make in makers.items():
            with tempfile.TemporaryDirectory() as folder:
                contender = make(Path(folder))
                try:
                    seconds[name].append(contender.recover())
                finally:
                    contender.close()
    hand = statistics.median(seconds["torchrun"])
    rows: dict[str, Any] = {}
    for name, values in seconds.items():
        median = statistics.median(values)
        rows[name] = {"median": median, "worst": max(values), "ratio": median / hand, "seconds": values}
        print(f"{name:<12} median {median:.2f} s, worst {max(values):.2f} s, {median / hand:.2f} of torchrun")
    content = {
        "command": shlex.join(["python", "-m", "benchmarks.recovery", *sys.argv[1:]]),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__},
        "rows": rows,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
