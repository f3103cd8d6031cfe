"""The drawings of docs/strategies.md and docs/architecture.md, and the tables of the former, are those of the scripts
that make them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from benchmarks.strategies import CASES, fill_in, tables
from rung.spec.presets import PRESETS, SCHEDULES
from tests.documents.pages import ROOT

_FOLDER = ROOT / "docs" / "drawings"
_PAGE = (ROOT / "docs" / "strategies.md").read_text()


def _script():
    found = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    module = importlib.util.module_from_spec(found)
    sys.modules["drawings"] = module  # where a dataclass looks for its own module
    found.loader.exec_module(module)
    return module


DRAWINGS = _script()


@pytest.mark.parametrize("name", DRAWINGS.drawings())
def test_a_drawing_is_the_one_that_its_script_makes(name):
    drawing = DRAWINGS.drawings()[name]
    assert (_FOLDER / f"{name}.svg").read_text() == DRAWINGS.draw(drawing), "run: python docs/drawings.py"
    ElementTree.parse(_FOLDER / f"{name}.svg")


@pytest.mark.parametrize("name", DRAWINGS.drawings())
def test_every_part_of_the_model_is_kept_by_somebody(name):
    drawing = DRAWINGS.drawings()[name]
    for kind in ("parameters", "optimizer"):
        cells = [getattr(rank, kind) for rank in drawing.ranks]
        assert all(len(text) == len(DRAWINGS.WHOLE) for text in cells)
        assert all("#" in place or " " in place for place in zip(*cells, strict=True)), kind


@pytest.mark.slow
def test_the_drawn_schedules_are_those_of_the_training_code():
    assert (_FOLDER / "schedules.svg").read_text() == DRAWINGS.draw_schedules(), (
        "run: python docs/drawings.py schedules"
    )


def test_the_drawing_of_the_packages_follows_the_imports():
    assert (_FOLDER / "rooms.svg").read_text() == DRAWINGS.draw_rooms(), "run: python docs/drawings.py rooms"
    ElementTree.parse(_FOLDER / "rooms.svg")


def test_imports_between_packages_are_found_and_go_downward():
    rooms = [room for layer in DRAWINGS.room_layers() for room in layer]
    assert list(DRAWINGS.ROOM_WORDS) == rooms
    imports = DRAWINGS.find_imports()
    assert all(rooms.index(one) < rooms.index(other) for one, other in imports)
    assert {("train", "runtime"), ("spec", "errors")} <= imports


def test_the_pages_show_every_drawing():
    shown = re.findall(r"\(drawings/([\w-]+)\.svg\)", _PAGE)
    assert sorted(shown) == sorted([*DRAWINGS.drawings(), "schedules"])
    assert "(drawings/rooms.svg)" in (ROOT / "docs" / "architecture.md").read_text()
    assert {path.stem for path in _FOLDER.iterdir()} == {*shown, "rooms"}


def test_the_tables_are_those_of_the_figures():
    figures = json.loads((ROOT / "benchmarks" / "results" / "strategies.json").read_text())
    assert set(figures) == set(CASES)
    assert fill_in(_PAGE, tables(figures)) == _PAGE, (
        "run: python -m benchmarks.strategies --show benchmarks/results/strategies.json"
    )


def test_every_strategy_and_schedule_is_measured():
    measured = [part for case in CASES.values() for name in case.strategies for part in name.split()[0].split(",")]
    for name in PRESETS:
        # fsdp is another name for zero3, and the measured tasks have no experts.
        assert name in ("fsdp", "ep") or any(
            re.fullmatch(rf"{re.escape(name)}(x?\d+)*(:\w+)?", part) for part in measured
        ), name
    for name in SCHEDULES:
        assert f"pp4:{name}" in measured
