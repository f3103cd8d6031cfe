"""The page, the Markdown and the JSON of a comparison, without a browser; and runs that are read into one."""

from __future__ import annotations

import json
import math
import re
from copy import deepcopy
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rung.cli.main import main
from rung.compare.report import as_markdown, as_page, write_page
from rung.compare.report.curves import _spread_labels
from rung.compare.report.marks import ticks
from rung.compare.report.runs import read_all
from rung.errors import ReportError
from tests.comparison import HOSTILE, MIB, sample


class _Reader(HTMLParser):
    """Elements that are open, by name; every attribute that could reach for a network; scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset", "data")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.words.append(data)


def test_a_page_is_whole_and_asks_for_nothing() -> None:
    reader = _Reader(as_page(sample()))
    assert reader.open == []
    assert set(reader.addresses) == {"data:,", "#strategies"}
    assert "url(http" not in as_page(sample()) and "@import" not in as_page(sample())


def test_the_data_are_in_the_page_as_they_were() -> None:
    reader = _Reader(as_page(sample()))
    assert json.loads(reader.scripts[0]) == sample()


def test_every_word_of_the_data_is_escaped() -> None:
    data = _with_words(sample(), HOSTILE)
    clean, hostile = _Reader(as_page(sample())), _Reader(as_page(data))
    assert len(hostile.scripts) == len(clean.scripts) == 2
    assert hostile.scripts[1] == clean.scripts[1]
    assert "b" not in set(hostile.elements) - set(clean.elements)
    assert hostile.elements.count("script") == 2
    assert json.loads(hostile.scripts[0]) == data


def _with_words(value: Any, words: str) -> Any:
    """Every string that is no name of the format's own gets `words`."""
    if isinstance(value, dict):
        return {
            key: entry if key in ("format", "status") else _with_words(entry, words) for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_with_words(entry, words) for entry in value]
    return f"{value} {words}" if isinstance(value, str) else value


def test_numbers_that_are_none_leave_a_page_that_is_whole() -> None:
    data = sample()
    data["rows"][1]["losses"][3][1] = math.nan
    data["rows"][1]["largest_difference"]["loss"] = "inf"
    data["rows"][2]["step_seconds"]["median"] = math.inf
    reader = _Reader(as_page(data))
    embedded = json.loads(reader.scripts[0], parse_constant=pytest.fail)
    assert embedded["rows"][1]["losses"][3][1] == "nan"
    assert "nan" not in "".join(re.findall(r'points="[^"]*"', as_page(data)))
    assert "| `zero1` | 2 |  |" in as_markdown(data)


def _failed() -> dict[str, Any]:
    data = sample()
    data["rows"] = data["rows"][-1:]
    return data


def _alone() -> dict[str, Any]:
    data = sample()
    data["rows"] = data["rows"][:1]
    data["rows"][0].update(predicted=None, not_predicted=None, timeline=None, memory=None)
    return data


def _empty() -> dict[str, Any]:
    return {"format": "rung-compare 1", "rows": []}


@pytest.mark.parametrize(
    ("data", "figures"), [(_failed(), set()), (_alone(), {"throughput", "losses", "experts"}), (_empty(), set())]
)
def test_what_is_not_known_is_not_drawn(data: dict[str, Any], figures: set[str]) -> None:
    page = as_page(data)
    assert _Reader(page).open == []
    assert set(re.findall(r'<figure id="([\w-]+)"', page)) == figures
    assert ("nothing to draw" in page) == (not figures)
    assert as_markdown(data).endswith("\n")


def test_markdown_has_the_figures_and_the_failures() -> None:
    lines = as_markdown(sample()).splitlines()
    assert lines[0] == "## On 2 processes, ddp trains babycnn 1.67 times as fast as one process."
    head, rule, first, *_ = [line for line in lines if line.startswith("|")]
    assert head.startswith("| strategy | ranks | step | samples/s | speed-up | peak memory |")
    assert head.count("|") == rule.count("|") == first.count("|")
    assert any(line.startswith("| `ddp` | 2 | 72 ms | 889 | 1.67× | 135 MiB |") for line in lines)  # noqa: RUF001
    assert any(line.startswith("| `ps-async` | 8 | **64 ms** |") for line in lines)
    (failed,) = [line for line in lines if line.startswith("- `tp2` failed")]
    assert "<script>" not in failed and r"\<script\>" in failed
    assert any(
        line == "| `ddp` | 79.2 ms / 72 ms (+10 %) | 132 MiB / 135 MiB (\N{MINUS SIGN}2 %) | 24 MiB / 24 MiB (+0 %) |"
        for line in lines
    )
    assert "- ps-async: the planner knows nothing of servers" in lines


def test_what_could_not_be_predicted_is_said_once(tmp_path: Path) -> None:
    data = sample()
    for row in data["rows"][:3]:
        row["predicted"]["step_seconds"], row["not_predicted"] = None, "there is no record: run `rung calibrate`"
    page = as_page(data)
    assert page.count("<b>single, ddp, zero1</b>: there is no record: run <code>rung calibrate</code>") == 1
    assert 'id="predicted-seconds"' in page  # of the others
    for row in data["rows"][3:5]:
        row["predicted"]["step_seconds"] = None
    assert set(re.findall(r'id="predicted-(\w+)"', as_page(data))) == {"peak", "sent"}
    assert "| `ddp` | - / 72 ms | 132 MiB / 135 MiB (\N{MINUS SIGN}2 %) |" in as_markdown(data)


def test_a_comparison_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="rung compare TASK"):
        as_page({"format": "rung-compare 2", "rows": []})
    with pytest.raises(ReportError, match="damaged: KeyError 'strategy'"):
        as_page({"format": "rung-compare 1", "rows": [{"ranks": 1}]})
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="cannot be written"):
        write_page(sample(), tmp_path / "file" / "page.html")


def test_names_at_the_edge_do_not_lie_on_each_other() -> None:
    for places in ([250.0] * 6, [0.0, 1.0, 2.0, 259.0], [10.0, 200.0, 205.0], [130.0] * 20):
        found = _spread_labels(places)
        ordered = sorted(found)
        assert all(after - before >= 15.9 for before, after in pairwise(ordered))
        assert sorted(range(len(places)), key=lambda index: found[index]) == sorted(
            range(len(places)), key=lambda index: places[index]
        )
        assert len(places) > 16 or max(found) <= 260


def test_a_long_name_beside_the_curves_is_cut_and_told_whole() -> None:
    data = sample()
    data["rows"][1]["strategy"] = "ddp precision=bf16 compress=topk"
    page = as_page(data)
    assert ">ddp precision=bf1…<title>ddp precision=bf16 compress=topk</title></text>" in page
    assert "--names: 162px" in page


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.44, 2.2, 4) == [0.5, 1.0, 1.5, 2.0]
    assert ticks(0, 0.12, 6) == pytest.approx([0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12])


def _run(folder: Path, strategy: str, ranks: int, seconds: float, *, batch_size: int = 64) -> Path:
    """A directory as `rung train` leaves it."""
    folder.mkdir(parents=True)
    steps = [
        {
            "event": "step", "step": step, "epoch": 0, "samples": step * batch_size, "loss": 2.0 / step, "lr": 0.1,
            "step_seconds": seconds, "samples_per_second": batch_size / seconds, "data_wait_seconds": 0.001,
            "slowest_reader": 0, "peak_memory_bytes": 400 * MIB,
        }
        for step in range(1, 9)
    ]  # fmt: skip
    start = {"event": "start", "task": "circle", "strategy": strategy, "ranks": ranks, "device": "cpu"}
    state = {"parameters": 4 * MIB, "gradients": 0, "optimizer": 8 * MIB, "buffers": MIB}
    end = {"event": "end", "steps": 8, "seconds": 1.0, "state_bytes": [state] * ranks}
    lines = [start, *steps, end]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text(f'strategy = "{strategy}"\nbatch_size = {batch_size}\nprecision = "fp32"\n')
    return folder


def test_runs_beside_each_other(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", "single", 1, 0.1), _run(tmp_path / "b", "fsdp", 2, 0.05)]
    slow = {"rank": 1, "phase": "backward", "seconds": 0.04, "others_seconds": 0.0095}
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"event": "slow", "step": 8, **slow, "text": "rank 1 is slow"}) + "\n")
    data = read_all(runs)
    alone, other = data["rows"]
    assert other["speedup"] == pytest.approx(2.0) and data["reference"] == "single"
    assert other["samples_per_second"]["median"] == pytest.approx(1280)
    assert other["losses"] == [[step, 2.0 / step] for step in range(1, 9)]
    assert other["process_bytes"] == 400 * MIB
    assert [entry["kinds"]["other"] for entry in other["kept"]] == [MIB, MIB]
    assert other["slow"] == [slow]
    assert alone["slow"] == []
    assert data["settings"] == {"batch_size": 64, "precision": "fp32"}
    assert "fsdp was the fastest: 1,280 samples a second, 2.00" in data["verdict"]["sentence"]
    page = as_page(data)
    assert set(re.findall(r'<figure id="([\w-]+)"', page)) == {"throughput", "kept", "losses", "slow"}
    assert "no peak memory by kind" in page


def test_figures_that_the_task_logs_have_charts(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a", "ddp", 2, 0.1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:-1]:
        line["<accuracy>"] = "nan" if line["step"] == 1 else line["step"] / 10
    lines.insert(5, {"event": "log", "step": 4, "norm": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = read_all([folder])
    (row,) = data["rows"]
    assert row["logged"]["norm"] == [[4, 3.0]]
    assert row["logged"]["<accuracy>"] == [[1, "nan"], *([step, step / 10] for step in range(2, 9))]
    page = as_page(data)
    assert "logged-0" in page and ">&lt;accuracy&gt;</h2>" in page and "<accuracy>" not in page
    assert "ddp from 0.2 to 0.8" in page


def test_the_experts_of_a_run_are_a_map_of_its_last_step(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a", "ep", 2, 0.1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for step in (8, 4, 1):
        layers = {"experts": {"rows": [step, 8 - step], "choices": 10, "dropped": 2}}
        lines.insert(step + 1, {"event": "experts", "step": step, "layers": layers})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = read_all([folder])
    assert [one["step"] for one in data["rows"][0]["experts"]] == [1, 8]
    page = as_page(data)
    assert "experts, expert 0: 8 rows, 100 %, 2.00 x an even share" in page
    assert "busiest 100 %, least 0 %" in page and "20 % of choices dropped" in page


def test_a_run_without_an_end_is_said_to_have_none(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a", "single", 1, 0.1), _run(tmp_path / "b", "fsdp", 2, 0.05)]
    lines = (runs[1] / "metrics.jsonl").read_text().replace("circle", "square").splitlines(keepends=True)
    damaged = ['{"event": "st\n', "[1, 2]\n", "{}\n"]
    (runs[1] / "metrics.jsonl").write_text("".join([*lines[:5], *damaged]))
    data = read_all(runs)
    notes = data["notes"]
    assert [row["speedup"] for row in data["rows"]] == [None, None]
    assert any("run b has no end" in note and "is 4" in note for note in notes)
    assert not any("run a" in note for note in notes)
    assert any("different tasks: circle, square" in note for note in notes)


def test_the_directory_of_a_comparison_stands_for_it(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "comparison.json").write_text(json.dumps(sample()))
    assert read_all([tmp_path / "first"]) == sample()
    names = [row["strategy"] for row in read_all([tmp_path / "first", tmp_path / "second"])["rows"]]
    assert "single (first)" in names and "single (second)" in names


def test_runs_that_differ_are_said_to(tmp_path: Path) -> None:
    data = read_all([_run(tmp_path / "a", "ddp", 2, 0.1), _run(tmp_path / "b", "ddp", 2, 0.1, batch_size=32)])
    assert [row["strategy"] for row in data["rows"]] == ["ddp (a)", "ddp (b)"]
    assert any("differ in batch size: 64, 32" in note for note in data["notes"])
    assert data["reference"] == "" and data["rows"][0]["speedup"] is None


def test_steps_that_were_done_again_count_once(tmp_path: Path) -> None:
    folder = _run(tmp_path / "a", "ddp", 2, 0.1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    again = {**lines[4], "loss": 7.0}  # step 4
    lines = [*lines[:7], {**lines[0], "event": "resume", "step": 3, "ranks": 4}, again]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')
    (row,) = read_all([folder])["rows"]
    assert row["losses"] == [[1, 2.0], [2, 1.0], [3, 2.0 / 3], [4, 7.0]]
    assert row["ranks"] == 4 and "kept" not in row


def test_a_run_of_any_length_is_read_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one restart: what is kept of it, and how many lines are parsed, must not follow the number of steps."""
    start = {"event": "start", "task": "circle", "strategy": "ddp", "ranks": 2, "device": "cpu"}

    def step(number: int) -> dict[str, Any]:
        rate = 640.0 if number % 10 else 64.0  # every tenth is slow, as where a run logs or saves
        return {
            "step": number, "loss": 1 / number, "step_seconds": 64 / rate, "samples_per_second": rate,
            "data_wait_seconds": 0.01, "peak_memory_bytes": number, "event": "step",
        }  # fmt: skip

    monkeypatch.setattr("rung.compare.report.runs._MOST_STEPS", 100)
    parsed = {}
    for length in (2_000, 20_000):
        folder = tmp_path / str(length)
        folder.mkdir()
        again = length // 2
        lines = [start, *map(step, range(1, again + 51)), {**start, "event": "resume", "step": again}]
        lines += map(step, range(again + 1, length + 1))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        seen: list[Any] = []
        counted = lambda text, seen=seen: seen.append(1) or json.loads(text)  # noqa: E731
        monkeypatch.setattr("rung.compare.report.runs._usable", counted)
        data = read_all([folder])
        (row,) = data["rows"]
        steps = [number for number, _ in row["losses"]]
        assert len(steps) <= 102 and steps == sorted(set(steps)) and steps[-1] == length
        assert row["losses"] == [[number, 1 / number] for number in steps]
        assert f"last recorded step is {length}" in data["notes"][0]
        assert row["process_bytes"] == length
        # A stride of 2 would see a slow step in every fifth place, and one of 10 nothing else.
        assert row["step_seconds"]["median"] == row["step_seconds"]["low"] == pytest.approx(0.1)
        parsed[length] = len(seen)
    assert parsed[20_000] < parsed[2_000] + 300


def test_a_comparison_and_a_run_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "compared.json"
    file.write_text(json.dumps(sample()))
    assert read_all([file]) == sample()
    data = read_all([file, _run(tmp_path / "later", "ddp", 2, 0.1)])
    names = [row["strategy"] for row in data["rows"]]
    assert names == ["single", "ddp (compared)", "zero1", "zero3", "pp2", "ps-async", "tp2", "ddp (later)"]
    assert {"memory", "kept"} <= set(re.findall(r'<figure id="([\w-]+)"', as_page(data)))


def test_the_command_writes_what_the_name_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compared.json"
    file.write_text(json.dumps(sample()))
    for ending, begin in ((".html", "<!doctype html>"), (".md", "## On 2"), (".json", "{")):
        out = tmp_path / "new" / f"report{ending}"
        assert main(["report", str(file), "--out", str(out)]) == 0
        assert capsys.readouterr().out.strip() == str(out)
        assert out.read_text().startswith(begin)


@pytest.mark.parametrize(
    ("content", "out", "said"),
    [
        (None, "report.html", "does not exist"),
        ("no json", "report.html", "is not a JSON file"),
        ("[1]", "report.html", "holds no comparison"),
        ('{"format": "other"}', "report.html", "its format is 'other', not 'rung-compare 1'"),
        ("{}", "report.pdf", "the name must end in .html, .md or .json"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, out: str, said: str
) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    assert main(["report", str(file), "--out", str(tmp_path / out)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / out).exists()


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["report", str(tmp_path)]) == 2
    assert "has no start event" in capsys.readouterr().err


def test_the_sample_is_not_changed_by_what_shows_it() -> None:
    data = sample()
    before = deepcopy(data)
    as_page(data)
    as_markdown(data)
    assert data == before
