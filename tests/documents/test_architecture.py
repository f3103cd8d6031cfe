"""docs/architecture.md and CONTRIBUTING.md name modules, classes and functions that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.documents.pages import ROOT, inline_code

_TORCH = {"DistributedDataParallel", "DTensor", "GradScaler", "DataParallel"}
_TORCH |= {"no_sync", "fully_shard", "parallelize_module", "_BatchNorm", "_parameters", "_buffers", "_version"}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_a_page_names_exist(page):
    folders = ("src", "tests", "docs", "benchmarks")
    files = [f"/{path.relative_to(ROOT).as_posix()}" for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {code for _, code in inline_code(page) if re.fullmatch(r"[\w/-]+\.py", code)}
    assert len(named) > 5
    missing = sorted(name for name in named if not any(file.endswith(f"/{name}") for file in files))
    assert not missing, f"{page} names {missing}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_classes_and_functions_that_a_page_names_exist(page):
    """Names with a capital or an underscore; other words in backticks may be flags, values or folders."""
    known = _TORCH | _defined()
    named = {
        part
        for _, code in inline_code(page)
        if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\w*\))?", code)
        for part in re.split(r"\W+", code)
        if re.search(r"[a-z]", part) and re.search(r"[A-Z]|\w_\w", part)
    }
    missing = sorted(named - known)
    assert not missing, f"{page} names {missing}, which the code does not define"


def _defined() -> set[str]:
    """Modules, classes, functions, parameters and fields of the package and of its tests."""
    found: set[str] = set()
    for path in [*(ROOT / "src" / "rung").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found
