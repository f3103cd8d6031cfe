"""Runs a function or a command on ranks that mpirun starts, as a user of MPI does. Also the program of such a rank."""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_BESIDE = Path(sys.executable).parent / "mpirun"
MPIRUN = str(_BESIDE) if _BESIDE.exists() else shutil.which("mpirun")
# Rows of the parity table of docs/mpi.md: strategy and processes.
ROWS = (
    ("ddp", 2),
    ("ddp", 4),
    ("zero1", 4),
    ("zero2", 4),
    ("zero3", 4),
    ("hsdp2x2", 4),
    ("tp2", 2),
    ("pp2", 2),
    ("pp2:zb", 2),
    ("fsdp2,tp2", 4),
    ("pp2,tp2", 4),
    ("pp2,fsdp2", 4),
)


def is_available() -> bool:
    return MPIRUN is not None and importlib.util.find_spec("mpi4py") is not None


def start(size: int, *command: str, cwd: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """A command on `size` ranks, with its output as one text."""
    assert MPIRUN is not None
    asked = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(size), *command]
    if os.getuid() == 0:
        asked.insert(1, "--allow-run-as-root")
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(asked, cwd=cwd, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def mpirun(size: int, *command: str, cwd: Path | None = None, code: int = 0, **environment: str) -> str:
    """What a command on `size` ranks says. It must end with the exit code `code`."""
    process = start(size, *command, cwd=cwd, **environment)
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def on_mpi_ranks(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """function(*args) on `size` ranks of MPI; the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.write_bytes(pickle.dumps((function, args)))
        mpirun(size, sys.executable, "-W", "ignore", "-m", "tests.mpi", str(job), cwd=_ROOT)
        return [pickle.loads(Path(f"{job}-{rank}").read_bytes()) for rank in range(size)]


def _rank(job: Path) -> None:
    from rung.system.launcher_env import environment_rank

    function, args = pickle.loads(job.read_bytes())
    Path(f"{job}-{environment_rank()}").write_bytes(pickle.dumps(function(*args)))


def support_table() -> str:
    """The rows as Markdown."""
    names = dict.fromkeys(strategy for strategy, _ in ROWS)
    lines = ["| strategy | processes |", "|---|---|"]
    lines += [f"| `{name}` | {', '.join(str(size) for strategy, size in ROWS if strategy == name)} |" for name in names]
    return "\n".join(lines)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
