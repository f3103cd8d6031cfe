"""`rung report`: renders runs and comparisons as a page, Markdown or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rung.compare.report.markdown import as_markdown
from rung.compare.report.page import finite, write_page
from rung.compare.report.runs import read_all
from rung.errors import ReportError

_SUFFIXES = (".html", ".md", ".json")


def report_command(runs: Sequence[str], out: str) -> int:
    path = Path(out)
    if path.suffix not in _SUFFIXES:
        raise ReportError(f"--out {out}: the name must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}.")
    data = read_all([Path(run) for run in runs])
    if path.suffix == ".html":
        write_page(data, path)
    else:
        content = as_markdown(data) if path.suffix == ".md" else json.dumps(finite(data), indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except OSError as error:
            raise ReportError(f"{path} cannot be written: {error.strerror}. Name another file with --out.") from None
    sys.stdout.write(f"{path}\n")
    return 0
