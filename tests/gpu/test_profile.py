"""`rung train --profile` on a CUDA device: kernels in the traces, and what filled the memory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch

from rung.cli.main import main
from tests.tasks import EXAMPLES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_traces_have_kernels_and_a_snapshot_of_the_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--strategy", "fsdp", "--nproc", "2", "--backend", "gloo", "--steps", "6", "--profile", "3:4"]
    assert main(["train", str(EXAMPLES / "gpt" / "task.py"), *flags, "--out", str(run)]) == 0
    for rank in (0, 1):
        with gzip.open(run / "profile" / f"rank-{rank}-steps-3-4.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        assert any(event.get("cat") == "kernel" for event in events)
        marks = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert [name for name in marks if name.startswith("step ")] == ["step 3", "step 4"]
        snapshot = pickle.loads((run / "profile" / f"rank-{rank}-steps-3-4-memory.pickle").read_bytes())
        assert any(entry["action"] == "alloc" for trace in snapshot["device_traces"] for entry in trace)
    assert main(["profile", "merge", str(run)]) == 0
    with gzip.open(run / "profile" / "steps-3-4.json.gz", "rt") as file:
        merged = json.load(file)["traceEvents"]
    assert {event["pid"] for event in merged} == {0, 1}
    assert {event["pid"] for event in merged if event.get("cat") == "kernel"} == {0, 1}
    live = json.loads((run / ".state" / "live.json").read_text())
    assert len(live["ranks"]) == 2 and live["ranks"][0]["memory_bytes"] > 2**20
