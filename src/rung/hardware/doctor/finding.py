"""The result of a check. Plain records: ranks send them to each other, and `--json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

OK, WARNING, FAILED, NOT_HERE = "ok", "warning", "failed", "not here"
_ORDER = (NOT_HERE, OK, WARNING, FAILED)


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: str
    found: str  # the observation, with numbers if there are any
    fix: str = ""  # one line; empty for ok and not here
    where: str = ""  # the machine; empty if the finding is about the whole job


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, WARNING, found, fix)


def failed(check: str, found: str, fix: str) -> Finding:
    return Finding(check, FAILED, found, fix)


def not_here(check: str, why: str) -> Finding:
    return Finding(check, NOT_HERE, why)


def at(where: str, findings: Sequence[Finding]) -> list[Finding]:
    """The findings with their machine set."""
    return [replace(finding, where=where) for finding in findings]


def worst(findings: Sequence[Finding]) -> str:
    return max((finding.verdict for finding in findings), key=_ORDER.index, default=OK)


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """Merge equal findings of several machines: all ok ones of a check, and problems with the same text."""
    folded: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        is_fine = finding.where and finding.verdict in (OK, NOT_HERE)
        key = (finding.verdict,) if is_fine else (finding.verdict, finding.found, finding.fix)
        folded.setdefault((finding.check, *key), []).append(finding)
    # In the order of the first finding of each check, on any machine.
    order = list(dict.fromkeys(finding.check for finding in findings))
    rows = sorted(folded.values(), key=lambda same: order.index(same[0].check))
    return [replace(same[0], where=_places([finding.where for finding in same])) for same in rows]


def _places(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(filter(None, names))
    return f"{names[0]} and {len(names) - 1} others"
