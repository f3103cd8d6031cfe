"""A reader's console: a copy of the project, and a shell in it that is given one command after the other."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch

from tests.documents.pages import ROOT, Command, blocks
from tests.documents.running import HELD_TASKS, SERVES, SHORTENED, fill_in
from tests.faults.hosts import Hosts

_SECONDS = 1200.0  # against hanging
HANGS = -1  # the exit code of what is not done by then
_SERVES_SECONDS = 15.0
_COPIED = ("examples", "benchmarks", "docs", "src", "tests", "Makefile", "README.md", "pyproject.toml", "LICENSE")


def copy_project(folder: Path, page: str) -> None:
    """What a reader has after `make demo`, but with tasks that end early; and the files that the page shows."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, folder / name)
    os.utime(folder / "pyproject.toml", (0, 0))  # older than the environment, so that make installs nothing
    (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
    for name, (whole, short) in SHORTENED.items():
        text = (folder / name).read_text()
        assert whole in text, f"{name} has no {whole} any more; change SHORTENED in tests/documents/running.py"
        (folder / name).write_text(text.replace(whole, short, 1))
    for name in ("task.py", "broken/task.py"):
        _write(folder / name, HELD_TASKS[name])
    for block in blocks(page):
        if block.kind == "file":
            _write(folder / block.name, block.text)
    _write_images(folder)


class Shell:
    """One bash in a folder, for all commands of a page. Placeholders are filled in from what ran before."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / ".console"
        self._log.touch()
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=self._log.open("ab"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def run(self, command: Command) -> tuple[int, str]:
        text = self._fill_in(command)
        if re.search(r"--rdzv", text) and re.search(r"--nnodes", text):
            return self._run_on_hosts(text)
        if re.match(SERVES, text):
            # Started, alive for a while, and ended: 143 is what a shell says of a process that SIGTERM ended.
            text = (
                f"{text} & served=$!; sleep {_SERVES_SECONDS}; kill -0 $served && kill $served && "
                "{ wait $served; code=$?; [ $code = 143 ] || [ $code = 0 ]; }"
            )
        return self._run(text)

    def _run(self, text: str) -> tuple[int, str]:
        start = self._log.stat().st_size
        mark = f"end-{uuid.uuid4().hex}"
        assert self._process.stdin is not None
        # In this shell and not in one below it, so that cd, source and job numbers stay.
        self._process.stdin.write(f"{{ {text}\n}} < /dev/null\nended=$?; echo; echo {mark} $ended\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + _SECONDS
        while True:
            said = self._log.read_bytes()[start:].decode(errors="replace")
            found = re.search(rf"^{mark} (\d+)$", said, flags=re.MULTILINE)
            if found:
                return int(found.group(1)), said[: found.start()].strip()
            if self._process.poll() is not None:
                return self._process.returncode, f"{said}\nthe shell has ended"
            if time.monotonic() > deadline:
                return HANGS, f"{said}\nnot done after {_SECONDS:.0f} s"
            time.sleep(0.05)

    def _run_on_hosts(self, text: str) -> tuple[int, str]:
        """The same command on every machine, as the page says: network namespaces with addresses of their own."""
        asked = re.search(r"--nnodes[ =](\d+)(?::(\d+))?", text)
        assert asked is not None
        num_hosts = max(int(asked.group(1)), 2) if asked.group(2) else int(asked.group(1))
        with Hosts(num_hosts) as hosts:
            place = f"{hosts.address(0)}:{_free_port()}"
            text = re.sub(r"(--rdzv(?:-endpoint)?[ =])\S+", rf"\g<1>{place}", text)
            logs = [self._folder / f".host-{number}" for number in range(num_hosts)]
            processes = [
                subprocess.Popen(
                    [*hosts.prefix(number), "bash", "-c", text],
                    cwd=self._folder,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=logs[number].open("wb"),
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for number in range(num_hosts)
            ]
            try:
                codes = [process.wait(timeout=_SECONDS) for process in processes]
            except subprocess.TimeoutExpired:
                codes = [HANGS]
            finally:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
        return max(codes, key=abs), "\n".join(log.read_text(errors="replace") for log in logs)

    def _fill_in(self, command: Command) -> str:
        text = re.sub(r"\s*\[RUN \.\.\.\]", "", command.text)
        text = re.sub(r"(?<![\w/.-])(TASK|NAME)\b", lambda found: fill_in(found.group(), command.page), text)
        text = re.sub(r"=IMAGES\b", "=images", text)
        text = re.sub(r"=DIR\b", f"={'cifar' if 'channels=3' in text else 'mnist'}", text)
        text = re.sub(r"=IMAGES\b", "=pictures", text)
        if re.search(r"(?<![\w$/.])RUN\b", text):
            needed = {"profile": "profile", "export": "checkpoints", "checkpoints": "checkpoints"}
            part = next((part for word, part in needed.items() if f"rung {word}" in text), "metrics.jsonl")
            text = re.sub(r"(?<![\w$/.])RUN\b(?!=)", str(self._newest("*", part)), text)
        # A run that the page tells of: here it has another time, and where its task is not at hand, another name.
        return re.sub(r"runs/([\w+,:-]+?)-?(\.\.\.|\d{8}-\d{6})", lambda found: self._run_like(found.group(1)), text)

    def _run_like(self, name: str) -> str:
        has_like = any((self._folder / "runs").glob(f"{name}*"))
        return str(self._newest(f"{name}*" if has_like else "*", "metrics.jsonl"))

    def _newest(self, pattern: str, part: str) -> Path:
        if pattern == "*" and not any((self._folder / "runs").glob(f"*/{part}")):  # a page may take a run for granted
            command = ["rung", "train", "task.py", "--strategy", "single"]
            subprocess.run(command, cwd=self._folder, env=_environment(), check=True, timeout=_SECONDS)
        found = [path for path in (self._folder / "runs").glob(pattern) if (path / part).exists()]
        assert found, f"no run matches {pattern!r} with {part!r} in it"
        return max(found, key=lambda path: path.stat().st_mtime).relative_to(self._folder)


def _environment() -> dict[str, str]:
    """A reader's, with the project's own environment active; mpirun may have more ranks than there are cores."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "RUNG"))}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _write_images(folder: Path) -> None:
    """Two folders as examples/babycnn wants them: MNIST's files, and those of CIFAR-10, with noise for images. And one
    as examples/imagenet does: a directory a class."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, below: int = 256) -> bytes:
        return torch.randint(below, shape, generator=generator, dtype=torch.uint8).numpy().tobytes()

    mnist, cifar = folder / "mnist", folder / "cifar"
    mnist.mkdir()
    cifar.mkdir()
    for part, count in (("train", 128), ("t10k", 32)):
        images = struct.pack(">IIII", 2051, count, 28, 28) + draw(count, 28, 28)
        (mnist / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        labels = struct.pack(">II", 2049, count) + draw(count, below=10)
        (mnist / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        rows = (draw(1, below=10) + draw(3072) for _ in range(32))
        (cifar / f"{name}.bin").write_bytes(b"".join(rows))
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (folder / "pictures" / part / name).mkdir(parents=True)
            for number in range(8):  # of a format that can be written by hand
                picture = b"P6 40 40 255\n" + draw(40, 40, 3)
                (folder / "pictures" / part / name / f"{number}.ppm").write_bytes(picture)
    for part, number in itertools.product(("train", "val"), range(10)):
        file = folder / "images" / part / f"class{number}" / "0.ppm"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"P6 32 32 255\n" + draw(32, 32, 3))
