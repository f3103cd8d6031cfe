"""Some thousands of hostile files through the readers of the commands; `python -m tests.security.fuzz` takes more."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rung.errors import ReportError
from tests.security import fuzz
from tests.security.guard import Guard

GUARD = Guard()
INPUTS = {"comparison": 150, "metrics": 200}  # those that take longest


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_hostile_files_are_refused_or_shown(name: str) -> None:
    result = fuzz.fuzz(name, range(INPUTS.get(name, 300)), seed=20261116, guard=GUARD)
    assert result.findings == []
    assert result.inputs == INPUTS.get(name, 300) and result.accepted + result.refused == result.inputs


@pytest.mark.parametrize(
    "kind", ["an error", "a write", "a delete", "a read", "a process", "too long", "markup", "a bell"]
)
def test_the_fuzzer_finds_what_it_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    other = tmp_path / "other"
    other.write_text("mine")

    def read(folder: Path, made: bytes) -> None:
        if kind == "an error":
            raise KeyError("median")
        if kind == "a write":
            (folder / ".." / ".." / f"rung-fuzz-mark-{os.getpid()}").open("a").close()
        elif kind == "a delete":
            (tmp_path / "none").unlink(missing_ok=True)
        elif kind == "a read":
            other.read_text()
        elif kind == "a process":
            subprocess.run(["true"], check=True)
        elif kind == "too long":
            while True:
                pass
        elif kind == "markup":
            fuzz.check_page('<p>"><xss></p><script></script><script></script>')
        else:
            fuzz.check_shown("ding\x07")

    monkeypatch.setattr(fuzz, "SECONDS", 0.2)
    target = fuzz.Target(lambda folder: folder.mkdir(), lambda draw, sound: b"", read)
    monkeypatch.setitem(fuzz.TARGETS, "made", fuzz.Target(target.prepare, target.make, _only_armed(read)))
    result = fuzz.fuzz("made", range(1), 1, GUARD)
    (Path(os.environ.get("TMPDIR", "/tmp")) / f"rung-fuzz-mark-{os.getpid()}").unlink(missing_ok=True)
    assert len(result.findings) == 1, result


def _only_armed(read):  # type: ignore[no-untyped-def]
    """The first call is a warm-up, which nobody watches."""
    calls = []

    def later(folder: Path, made: bytes) -> None:
        calls.append(made)
        if len(calls) == 1:
            raise ReportError("not yet")
        read(folder, made)

    return later
