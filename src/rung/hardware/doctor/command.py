"""`rung doctor`: checks this machine, then starts ranks (or is one of them) and checks their communication."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from rung.hardware.doctor.finding import FAILED, NOT_HERE, OK, WARNING, Finding, fold, worst
from rung.hardware.doctor.options import DoctorOptions
from rung.hardware.machines import apply_environment
from rung.launch.signals import leaving_at_once

_STYLES = {OK: "green", WARNING: "yellow", FAILED: "red", NOT_HERE: "dim"}


def doctor_command(options: DoctorOptions) -> int:
    """Run the command. Returns the exit code: 1 if a check failed."""
    with leaving_at_once():
        options, place = apply_environment(options, ["rung.hardware.doctor.ranks"])
        # Loads torch, which takes seconds, while a signal may still end this process at once; the fork server, which
        # has just started, loads it at the same time.
        from rung.hardware.doctor.run import check_as_rank, check_this_machine, check_with_ranks
    console = Console(file=sys.stderr, markup=False)
    with console.status("checking this machine") if place is None else contextlib.nullcontext():
        local = check_this_machine(options, place)
        if place is not None:
            is_printed, findings = check_as_rank(options, place, local)
        else:
            is_printed, findings = check_with_ranks(options, local)
    if is_printed:
        _print(findings, as_json=options.as_json)
    return int(worst(findings) == FAILED)


def _print(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        content = {"verdict": worst(findings), "checks": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    console = Console(file=sys.stdout, highlight=False, markup=False)
    width = max(len(finding.check) for finding in findings)
    for finding in fold(findings):
        where = f" [{finding.where}]" if finding.where else ""
        verdict = (f"{finding.verdict:<9}", _STYLES[finding.verdict])
        row = Text.assemble(verdict, (f" {finding.check:<{width}}  ", "bold"), f"{finding.found}{where}")
        console.print(row, soft_wrap=True)
        if finding.fix:
            console.print(Text(f"{'':<9} {'':<{width}}  fix: {finding.fix}"), soft_wrap=True)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _STYLES}
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
