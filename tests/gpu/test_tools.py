"""`rung bench collectives` over NCCL and `rung doctor` on a CUDA device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rung.cli.main import main
from rung.hardware.collective_records import OPS, read_sweeps

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_nccl_is_right_with_one_rank(tmp_path: Path) -> None:
    flags = ["--nproc", "1", "--sizes", "1K,1M", "--dtypes", "float32,bfloat16,bool", "--seconds", "0.01"]
    assert main(["bench", "collectives", "--backend", "nccl", *flags, "--out", str(tmp_path)]) == 0
    (sweep,) = read_sweeps(tmp_path)
    states = {record.op: record.state for record in sweep.records}
    assert states == {op: "not supported" if op == "send_recv" else "ok" for op in OPS}


def test_the_doctor_sees_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--nproc", "1", "--json", "--out", str(tmp_path)])
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert "TFLOP/s" in checks["GPU speed"]["found"]
    assert "nccl" in checks["rendezvous"]["found"]
