"""What is installed is whole: the files beside the code, and the extras that commands and words of advice name."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_files_beside_the_code_are_installed_with_it() -> None:
    """An editable installation has them anyway; a wheel, and so an image, only if they are listed."""
    package = ROOT / "src" / "rung"
    listed = PROJECT["tool"]["setuptools"]["package-data"]["rung"]
    files = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    others = [name for name in files if not name.endswith((".py", ".pyc"))]
    assert "hardware/records/devices.toml" in others
    assert [name for name in others if not any(fnmatch.fnmatch(name, one) for one in listed)] == []


def test_extras_that_are_named_exist() -> None:
    """pip takes a name that is not there for a warning."""
    texts = [ROOT / "Makefile", ROOT / "Dockerfile", *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    texts += [*ROOT.glob("src/**/*.py"), *ROOT.glob("examples/**/*.py"), *ROOT.glob("examples/**/*.md")]
    named = {
        extra: path.name
        for path in texts
        for names in re.findall(r"""(?:rung|["' ]\.)\[([a-z0-9, ]+)\]""", path.read_text())
        for extra in re.split(r"[, ]+", names)
    }
    assert {"dev", "docs", "examples", "k8s"} <= named.keys()
    assert {
        extra: name for extra, name in named.items() if extra not in PROJECT["project"]["optional-dependencies"]
    } == {}
