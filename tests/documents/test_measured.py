"""Figures between marks are those of the results beside the benchmarks: nobody has typed one."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import speed
from benchmarks.report import fill_marks
from tests.documents.pages import ROOT

_PAGES = {
    "faults": "elastic.md", "endurance": "elastic.md", "load": "launching.md", "models": "models.md",
    "compiled-cpu": "speed.md", "compiled-cuda": "speed.md", "forms": "strategies.md", "launch": "speed.md",
    "speed-cpu": "speed.md", "speed-cuda": "speed.md",
}  # fmt: skip


@pytest.mark.parametrize("name", _PAGES)
def test_the_page_shows_what_was_measured(name: str, tmp_path: Path) -> None:
    results, page = ROOT / "benchmarks" / "results" / f"{name}.json", ROOT / "docs" / _PAGES[name]
    if not results.exists():
        assert "Not measured yet." in page.read_text()
        return
    benchmark = importlib.import_module(f"benchmarks.{name.partition('-')[0]}")
    figures = json.loads(results.read_text())
    again = tmp_path / page.name
    again.write_text(page.read_text())
    fill_marks(again, benchmark.marks(figures))
    show = f"python -m {benchmark.__name__} --show {results.relative_to(ROOT)}"
    assert again.read_text() == page.read_text(), f"run: {show}"
    if name == "faults":
        assert (ROOT / "docs" / "faults.svg").read_text() == benchmark.picture(figures)


def test_the_readme_shows_the_speed_that_was_measured(tmp_path: Path) -> None:
    cuda, cpu = (
        json.loads((ROOT / f"benchmarks/results/speed-{device}.json").read_text()) for device in ("cuda", "cpu")
    )
    again = tmp_path / "README.md"
    again.write_text((ROOT / "README.md").read_text())
    fill_marks(again, speed.summary(cuda, cpu))
    assert again.read_text() == (ROOT / "README.md").read_text(), "run: python -m benchmarks.speed --show"


def test_a_mark_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It took <!-- measured: time -->\nlong. <!-- end -->\n")
    fill_marks(page, {"time": "3 s."})
    assert page.read_text() == "It took <!-- measured: time -->\n3 s. <!-- end -->\n"
    with pytest.raises(RuntimeError, match="no mark <!-- measured: table -->"):
        fill_marks(page, {"table": "| a |"})
