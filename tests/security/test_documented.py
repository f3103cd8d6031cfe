"""The claims of docs/security.md are tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_HERE = Path(__file__).parent
_PAGE = _HERE.parents[1] / "docs" / "security.md"


def _tests_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_claim_names_a_test_that_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", _PAGE.read_text())
    assert len(named) > 25
    assert [pair for pair in named if not (_HERE / pair[0]).exists() or pair[1] not in _tests_of(_HERE / pair[0])] == []


def test_every_list_of_claims_names_tests() -> None:
    """A point of a list that names none would be a promise that nothing holds; what is not protected has no test."""
    text = _PAGE.read_text()
    claims = text[: text.index("## What is not protected")] + text[text.index("## What a run, a checkpoint") :]
    points = re.findall(r"^- .*?(?=^- |^\S|\Z)", claims.replace("\n\n", "\n\nEND\n"), flags=re.M | re.S)
    assert [point for point in points if "::test_" not in point] == []
