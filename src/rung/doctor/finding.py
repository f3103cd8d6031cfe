"""What a check says. Plain records: they travel between ranks and into JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

OK, WARNING, FAILED, NOT_HERE = "ok", "warning", "failed", "not here"
_ORDER = (NOT_HERE, OK, WARNING, FAILED)


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: str
    found: str  # what was seen, in figures where there are any
    fix: str = ""  # in one line; empty unless something is wrong
    where: str = ""  # a machine, or nothing where it is about the job as a whole


def ok(check: str, found: str) -> Finding:
    return Finding(check, OK, found)


def warning(check: str, found: str, fix: str) -> Finding:
    return Finding(check, WARNING, found, fix)


def failed(check: str, found: str, fix: str) -> Finding:
    return Finding(check, FAILED, found, fix)


def not_here(check: str, why: str) -> Finding:
    return Finding(check, NOT_HERE, why)


def at(where: str, findings: Sequence[Finding]) -> list[Finding]:
    """The same, said of a machine."""
    return [replace(finding, where=where) for finding in findings]


def worst(findings: Sequence[Finding]) -> str:
    return max((finding.verdict for finding in findings), key=_ORDER.index, default=OK)


def fold(findings: Sequence[Finding]) -> list[Finding]:
    """What several machines say alike, said once: all that is well with a check, and the rest by machine."""
    folded: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        is_well = finding.where and finding.verdict in (OK, NOT_HERE)
        about = (finding.verdict,) if is_well else (finding.verdict, finding.found, finding.fix)
        folded.setdefault((finding.check, *about), []).append(finding)
    # In the order in which checks were made first, whoever said it.
    order = list(dict.fromkeys(finding.check for finding in findings))
    rows = sorted(folded.values(), key=lambda same: order.index(same[0].check))
    return [replace(same[0], where=_places([finding.where for finding in same])) for same in rows]


def _places(names: list[str]) -> str:
    if len(names) <= 2:
        return ", ".join(filter(None, names))
    return f"{names[0]} and {len(names) - 1} others"
