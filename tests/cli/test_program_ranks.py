"""`rung.train` and `rung.compare`, called by programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rung
from rung.errors import ConfigError, JobFailed, TaskError

TASK = """
import os, time
import torch
from torch.utils.data import TensorDataset

defaults = {"batch_size": 4, "device": "cpu", "check": False, "steps": 3}
def model(width=2): return torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 2))
def train_data(): return TensorDataset(torch.randn(400, 2), torch.randn(400, 2))
def loss(output, target, fails=False, seconds=0.0):
    if fails and os.environ["RANK"] == "1":
        raise ValueError("planted")
    time.sleep(seconds)
    return ((output - target) ** 2).mean()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""

# No `if __name__ == "__main__"`: ranks that import this script again would start runs of their own.
SCRIPT = """
import threading, time
import torch
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
torch.ones(8, 8) @ torch.ones(8, 8)
import rung
print("script begins")
result = rung.train("task.py", strategy="ddp", nproc=2, log_every=1, set={"model.width": 3})
print(repr(result))
assert result.steps == 3 == len(result.records) and result.loss == result.records[-1]["loss"], result
assert result.weights.name == "model.safetensors" and "width = 3" in (result.folder / "config.toml").read_text()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_without_a_guard_trains_on_two_ranks(folder: Path) -> None:
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("script begins") == 1
    assert "done: 3 steps" in done.stdout and "<TrainResult: 3 steps, loss" in done.stdout


def test_failures_are_exceptions(folder: Path) -> None:
    with pytest.raises(JobFailed, match=r"rank 1 failed in step 1.*planted"):
        rung.train("task.py", nproc=2, set={"loss.fails": True})
    with pytest.raises(ConfigError, match="Did you mean 'batch_size'"):
        rung.train("task.py", batchsize=3)
    assert len(list((folder / "runs").iterdir())) == 1  # that of the first


def test_what_cannot_be_sent_is_refused(folder: Path) -> None:
    with pytest.raises(TaskError, match="%%writefile"):
        rung.train(rung.load_task("task.py"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="given twice"):
        rung.train("task.py", steps=1, set={"steps": 2})
    with pytest.raises(ConfigError, match="cannot be a setting"):
        rung.train("task.py", steps=object())
    with pytest.raises(ConfigError, match="strategies"):
        rung.compare("task.py", strategy="ddp")


def test_an_interrupt_ends_the_run(folder: Path) -> None:
    (folder / "script.py").write_text(
        "import rung\ntry: rung.train('task.py', nproc=2, epochs=9, steps=99, set={'loss.seconds': 0.1}, out='out')\n"
        "except KeyboardInterrupt: print('caught')\n"
    )

    def as_in_a_terminal() -> None:  # a shell starts what runs in the background with Ctrl-C ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal
    )
    metrics, deadline = folder / "out" / "metrics.jsonl", time.monotonic() + 60
    while not (metrics.exists() and '"step": 2' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "interrupted in step" in output and "caught" in output, output


def test_a_comparison_shows_its_page(folder: Path) -> None:
    result = rung.compare("task.py", strategies=["single", "ddp"], nproc=2, steps=4, repeats=1)
    assert [row["status"] for row in result.rows] == ["ok", "ok"]
    assert result.page.is_file() and result._repr_html_().startswith('<iframe srcdoc="&lt;!doctype')
    assert "ddp: " in repr(result)
