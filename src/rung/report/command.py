"""`rung report`: runs and comparisons to a page, to Markdown or to JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rung.errors import ReportError
from rung.report.markdown import as_markdown
from rung.report.page import finite, write_page
from rung.report.runs import read_all

_ENDINGS = (".html", ".md", ".json")


def report_command(runs: Sequence[str], out: str) -> int:
    path = Path(out)
    if path.suffix not in _ENDINGS:
        raise ReportError(f"--out {out}: the name ends in {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}.")
    data = read_all([Path(run) for run in runs])
    if path.suffix == ".html":
        write_page(data, path)
    else:
        words = as_markdown(data) if path.suffix == ".md" else json.dumps(finite(data), indent=1) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(words, encoding="utf-8")
        except OSError as error:
            raise ReportError(f"{path} cannot be written: {error.strerror}. Name another file with --out.") from None
    sys.stdout.write(f"{path}\n")
    return 0
