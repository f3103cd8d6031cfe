"""CONTRIBUTING.md adds a strategy with one file and one row; a test adds both to a copy of the package and runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.documents.pages import ROOT

_TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
defaults = {"batch_size": 10, "device": "cpu"}
def model(): return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3))
def train_data():
    x = torch.randn(103, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.argmax(1) % 3)
def loss(output, target): return nn.functional.cross_entropy(output, target)
def optimizer(model): return torch.optim.AdamW(model.parameters(), lr=0.01)
"""


def _rung(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-m", "rung", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_strategy_is_one_file_and_one_row(tmp_path: Path) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    path, module = re.search(r"```python\n# (src/rung/runtime/\w+\.py)\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    row = re.search(r"```text\n(\"\w+\": Preset\(.*?\n\),\n)```", page, re.DOTALL).group(1)  # type: ignore[union-attr]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (tmp_path / path).write_text(module)
    presets = tmp_path / "src" / "rung" / "spec" / "presets.py"
    table = presets.read_text()
    opening = "PRESETS: dict[str, Preset] = {\n"
    assert table.count(opening) == 1
    presets.write_text(table.replace(opening, opening + row))
    (tmp_path / "task.py").write_text(_TASK)

    assert "all gradients in one message" in _rung(tmp_path, "strategies").stdout
    done = _rung(tmp_path, "verify", "task.py", "--nproc", "3", "--strategies", "flat", "--micro-batch", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["flat", "flat"] and all(row["parameters"] < 1e-9 for row in rows)
