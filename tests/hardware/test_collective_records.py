"""Records of collectives: the bandwidths of nccl-tests, and files that come back as they were written."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from rung.errors import ConfigError, EnvironmentProblem
from rung.hardware.bench.chart import draw
from rung.hardware.bench.command import collectives_command
from rung.hardware.bench.options import BenchOptions, parse_sizes
from rung.hardware.bench.view import show
from rung.hardware.collective_records import (
    OPS,
    CollectiveRecord,
    Sweep,
    bus_factor,
    read_sweep,
    read_sweeps,
    write_sweep,
)

ENVIRONMENT = {
    "backend": "gloo",
    "ranks": 4,
    "hosts": ["a"],
    "device": "cpu",
    "device_names": ["a processor"],
    "threads_per_rank": [1],
    "torch": "2.13.0",
    "library": None,
}


def record(op: str = "all_reduce", num_bytes: int = 4096, **changed: object) -> CollectiveRecord:
    found = CollectiveRecord(op, "gloo", "cpu", "float32", "", num_bytes, 4, 1, "ok", 0.001, 0.0009, 30)
    return replace(found, **changed)  # type: ignore[arg-type]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = {op: bus_factor(op, 4) for op in OPS}
    assert factors["all_reduce"] == 2 * 3 / 4
    assert {factors[op] for op in ("scatter", "gather", "all_gather", "reduce_scatter", "all_to_all")} == {3 / 4}
    assert {factors[op] for op in ("broadcast", "reduce", "send_recv")} == {1.0}
    found = record(num_bytes=10**9, seconds=0.5)
    assert found.algorithm_bandwidth == 2e9
    assert found.bus_bandwidth == 3e9
    assert record("barrier", 0).algorithm_bandwidth is None
    assert record(seconds=None, state="not supported").bus_bandwidth is None


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    rows = [record(), record("barrier", 0), record(state="not supported", seconds=None, fastest_seconds=None, why="no")]
    sweep = Sweep(ENVIRONMENT, rows)
    path = write_sweep(sweep, tmp_path / "new" / "folder")
    assert path.name == "collectives-gloo-4.json"
    assert read_sweep(path) == sweep
    content = json.loads(path.read_text())
    assert content["records"][0]["busbw"] == pytest.approx(4096 / 0.001 * 1.5 / 1e9)
    write_sweep(replace(sweep, environment={**ENVIRONMENT, "hosts": ["a", "b"]}), path.parent)
    assert [found.file_name for found in read_sweeps(path.parent)] == [
        "collectives-gloo-4-2hosts",
        "collectives-gloo-4",
    ]
    assert [item.name for item in path.parent.iterdir() if "json" not in item.name] == []


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no measured collectives"):
        read_sweep(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sweep(tmp_path / "none.json")
    assert read_sweeps(tmp_path) == []


def test_sizes_are_powers_of_four_unless_said() -> None:
    sizes = parse_sizes("1K:256M")
    assert sizes == [1024 * 4**power for power in range(10)]
    assert parse_sizes("1K:8K:2") == [1024, 2048, 4096, 8192]
    assert parse_sizes("1M,4k,4K,1000") == [1000, 4096, 2**20]


@pytest.mark.parametrize("text", ["8K:1K", "1K:2K:1", "1K:2K:x", "1:2:3:4", "big", "0", "", "3T"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--sizes"):
        parse_sizes(text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (BenchOptions(ops=["all_reduse"]), "Did you mean 'all_reduce'"),
        (BenchOptions(dtypes="float"), "--dtypes knows"),
        (BenchOptions(backend="mpi"), "mpirun -n 4"),
        (BenchOptions(nnodes=2), "--rdzv"),
        (BenchOptions(nproc=0), "at least one"),
        (BenchOptions(seconds=0), "positive"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    asked: BenchOptions, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rung.hardware.machines.start_fork_server", lambda modules: None)
    with pytest.raises(ConfigError, match=message):
        collectives_command(asked)


def test_nccl_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rung.hardware.machines.start_fork_server", lambda modules: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="--backend gloo"):
        collectives_command(BenchOptions(backend="nccl"))


def sweep_with_holes() -> Sweep:
    rows = [record(op, 1024 * 4**power) for op in OPS[:-1] for power in range(3)] + [record("barrier", 0, dtype="")]
    cannot = {"state": "not supported", "seconds": None, "fastest_seconds": None, "why": "gloo <does> not know it"}
    rows += [record(op, 1024 * 4**power, dtype="float8_e5m2", **cannot) for op in OPS[:2] for power in range(3)]
    return Sweep(ENVIRONMENT, rows)


def test_the_chart_has_a_panel_for_each_collective() -> None:
    drawn = draw(sweep_with_holes())
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert {*OPS} <= {*texts}
    assert texts.count("without float8_e5m2") == 9
    assert drawn.count("<polyline") >= 9
    alone = Sweep({**ENVIRONMENT, "ranks": 1}, [record(ranks=1)])
    assert "Algorithm bandwidth" in draw(alone)
    ElementTree.fromstring(draw(Sweep(ENVIRONMENT, [record(seconds=None, state="wrong")])))


def test_the_table_names_what_cannot_be_done_once(capsys: pytest.CaptureFixture[str]) -> None:
    show(sweep_with_holes(), ["somewhere.json"])
    told = capsys.readouterr().out
    assert told.count("not supported (1)") == 2
    assert "1 KiB to 16 KiB" in told
    assert "(1) gloo <does> not know it" in told
    assert "28 correct, 6 not supported" in told
    assert "somewhere.json" in told
