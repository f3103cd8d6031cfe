"""The ladder's page says what was measured, and its marks can be filled in again."""

from __future__ import annotations

import json

import pytest

from benchmarks.ladder import fill_in, sentences
from tests.documents.pages import ROOT

PAGE = (ROOT / "docs" / "ladder.md").read_text()
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "ladder.json").read_text())


def test_the_page_has_the_figures_of_its_results():
    assert fill_in(PAGE, sentences(FIGURES)) == PAGE, (
        "python -m benchmarks.ladder --show benchmarks/results/ladder.json"
    )


def test_other_figures_give_another_page():
    other = json.loads(json.dumps(FIGURES))
    other["rows"]["ddp"]["samples_per_second"] = 12345.0
    other["elastic"]["seconds_to_next_step"] = 77.7
    page = fill_in(PAGE, sentences(other))
    assert "12345 samples/s" in page and "| `ddp` | 12345 |" in page and "77.7 s later" in page
    assert fill_in(page, sentences(FIGURES)) == PAGE


def test_a_mark_without_a_figure_is_an_error():
    with pytest.raises(RuntimeError, match="nothing"):
        fill_in(PAGE + "<!-- measured: nothing --><!-- end -->", sentences(FIGURES))


def test_a_busy_machine_is_told_of():
    busy, idle = (dict(FIGURES, machine=FIGURES["machine"] | {"load_average_before": load}) for load in (9.0, 0.1))
    assert "speeds may be too low" in sentences(busy)["machine"]
    assert "speeds may be too low" not in sentences(idle)["machine"]
