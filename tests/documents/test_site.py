"""The site is built without a warning, and asks nothing of the network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from tests.documents.pages import ROOT, page_names

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="the site's tools come with `make docs`"),
]


def test_the_site_is_whole(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-c", "docs"]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "trees"), ".", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for page in page_names():
        file = (tmp_path / "site" / page).with_suffix(".html")
        assert file.exists(), f"{page} is not on the site"
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', file.read_text())
        assert not loaded, f"{page} loads {loaded}"
    commands = (tmp_path / "site" / "docs" / "commands.html").read_text()
    assert "--checkpoint-every" in commands
    assert "rung.open_session" in (tmp_path / "site" / "docs" / "api.html").read_text()
