"""Reads `metrics.jsonl` of a run that ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def committed(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, without the steps that a resumed run repeated: the last occurrence counts."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["event"] in ("start", "resume"):
            reached = row.get("step", 0)
            rows = [kept for kept in rows if kept["event"] in ("start", "resume") or kept.get("step", 0) <= reached]
        if row["event"] == "eval":  # an interrupted or unsaved evaluation is repeated
            rows = [kept for kept in rows if kept["event"] != "eval" or kept["step"] != row["step"]]
        rows.append(row)
    return rows
