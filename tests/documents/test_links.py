"""Every link of the documents leads somewhere: files and headings are looked for, other addresses only read."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

import pytest

from tests.documents.pages import ROOT, anchors, links, page_names


@pytest.mark.parametrize("page", page_names())
def test_links_lead_somewhere(page):
    wrong = [f"{page}:{link.line}: {link.target} {problem}" for link in links(page) if (problem := _problem(link))]
    assert not wrong, "\n".join(wrong)


def _problem(link) -> str:
    parts = urlsplit(link.target)
    if parts.scheme:
        is_address = (parts.scheme in ("http", "https") and "." in parts.netloc) or parts.scheme == "mailto"
        return "" if is_address else "is no address"
    file = (ROOT / link.page).parent / unquote(parts.path) if parts.path else ROOT / link.page
    if ROOT not in [file.resolve(), *file.resolve().parents]:
        return "leaves the project"
    if not file.exists():
        return "does not exist"
    if parts.fragment and file.suffix == ".md":
        name = file.resolve().relative_to(ROOT).as_posix()
        if parts.fragment not in anchors(name):
            return f"has no heading #{parts.fragment}; there are {', '.join(sorted(anchors(name)))}"
    return ""


def test_links_that_lead_nowhere_are_seen():
    from tests.documents.pages import Link

    assert _problem(Link("README.md", 1, "docs/nothing.md")) == "does not exist"
    assert "no heading" in _problem(Link("README.md", 1, "docs/tasks.md#nothing"))
    assert _problem(Link("docs/tasks.md", 1, "../../elsewhere")) == "leaves the project"
    assert _problem(Link("README.md", 1, "https://nothing")) == "is no address"
    assert _problem(Link("docs/tasks.md", 1, "../README.md#a-task")) == ""
