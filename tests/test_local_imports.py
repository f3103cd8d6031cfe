"""A function imports a module itself only for a reason, which stands beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import rung

PACKAGE = Path(rung.__file__).parent
# Each file of the command line imports the code of its command when that is called: `rung --help` must be quick.
LAZY = set((PACKAGE / "cli").glob("*.py"))
# These say at their top why all of their functions do it.
EXPLAINED = {PACKAGE / "launch" / "prepare.py", PACKAGE / "launch" / "train_command.py"}


def _unexplained(path: Path) -> list[str]:
    lines = path.read_text().splitlines()
    found = []
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        for body in (node.body for node in ast.walk(function) if isinstance(getattr(node, "body", None), list)):
            is_explained = False
            for node in body:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    # A comment on the line or above it; further imports of the same block share it.
                    above = lines[node.lineno - 2].strip()
                    is_explained = is_explained or "#" in lines[node.lineno - 1] or above.startswith("#")
                    if not is_explained:
                        found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {lines[node.lineno - 1].strip()}")
                else:
                    is_explained = False
    return found


def test_every_import_inside_a_function_has_its_reason() -> None:
    files = set(PACKAGE.rglob("*.py")) - LAZY - EXPLAINED
    assert not [line for path in sorted(files) for line in _unexplained(path)]
