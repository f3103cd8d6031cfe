"""No class of the package is large, and runtimes are put together from parts that inherit nothing protected."""

from __future__ import annotations

import ast
from pathlib import Path

import rung

MAX_METHODS = 15
PACKAGE = Path(rung.__file__).parent
# They implement interfaces of torch that demand more: ProcessGroup, _PipelineStageBase, Store.
OF_TORCH = {"MpiGroup", "Stage", "SignedStore"}


def _classes(folder: Path) -> dict[str, ast.ClassDef]:
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _methods(one: ast.ClassDef) -> set[str]:
    return {node.name for node in one.body if isinstance(node, ast.FunctionDef)}


def test_no_class_of_the_package_is_large() -> None:
    found = _classes(PACKAGE)
    large = {name: len(_methods(one)) for name, one in found.items() if len(_methods(one)) > MAX_METHODS}
    assert large.keys() == OF_TORCH, large


def test_no_class_name_is_used_twice() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    at_top = [(one.name, path) for path, tree in trees.items() for one in tree.body if isinstance(one, ast.ClassDef)]
    names = [name for name, _ in at_top]
    assert not [(name, str(path)) for name, path in at_top if names.count(name) > 1]


def test_no_class_inherits_protected_methods_of_another() -> None:
    known = _classes(PACKAGE / "runtime")
    for name, one in known.items():
        for base in [known[b.id] for b in one.bases if isinstance(b, ast.Name) and b.id in known]:
            protected = {method for method in _methods(base) if method.startswith("_") and not method.endswith("__")}
            assert not protected, f"{name} inherits {protected} from {base.name}"
