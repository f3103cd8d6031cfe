"""Runs what is compared: in fresh processes, one after the other, in turns. What fails is a row like the others."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rung.compare.measure import Look, RankFigures, look_closely, take_run
from rung.compare.rows import failed_row, loss_difference, make_row, without_infinities
from rung.compare.variants import REFERENCE, Variant
from rung.launch.crew import CrewFailed, on_ranks
from rung.train import Job

ROW_FILE = "comparison-row.json"
WHOLE_FILE = "comparison.json"
_WEIGHTS = "model.safetensors"
_LOOK_STEPS = 12
_LONGEST_REASON = 400
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Problem|Failed|Exit|Interrupt|Warning))(?:: (.*))?$")

Tell = Callable[[str, int], None]  # what is going on, and how many steps of it are done


@dataclass
class Measured:
    """What is known of one variant so far."""

    variant: Variant
    runs: list[list[RankFigures]] = field(default_factory=list)
    started: list[float] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    failed: str | None = None
    not_looked: str | None = None  # why its memory and messages are not told apart

    @property
    def is_going(self) -> bool:
        return self.failed is None


@dataclass(frozen=True)
class Bench:
    """How a comparison is made. `folder` keeps what each run leaves behind."""

    task_path: str
    arguments: dict[str, Any]
    folder: Path
    repeats: int
    warmup: int
    on_gpu: bool

    def compare(self, variants: list[Variant], tell: Tell) -> list[Measured]:
        """Every variant once, then every variant again: what disturbs the machine for a while disturbs all alike."""
        on_ranks(_nothing, 1)  # the fork server has imported everything when the first run starts
        found = [Measured(variant, failed=variant.refused) for variant in variants]
        for repeat in range(1, self.repeats + 1):
            for one in found:
                if one.is_going:
                    self._measure(one, repeat, tell)
        for one in found:
            if one.is_going and one.variant.layout is not None and one.variant.layout.kind != "ps-async":
                self._look(one, tell)
        return found

    def _measure(self, one: Measured, repeat: int, tell: Tell) -> None:
        variant = one.variant
        folder = self._new_folder(f"{file_name(variant.text)}-{repeat}")
        what = f"{variant.text}, run {repeat} of {self.repeats}"
        tell(what, 0)
        job = self._job(variant, folder)
        started = time.perf_counter()
        try:
            timeout = float(variant.config.timeout)
            ranks = on_ranks(
                take_run, variant.num_ranks, job, repeat == 1, listen=lambda step: tell(what, step), timeout=timeout
            )
        except CrewFailed as error:
            self._fail(one, folder, error)
            return
        one.runs.append(ranks)
        one.started.append(started)
        one.folders.append(folder)

    def _look(self, one: Measured, tell: Tell) -> None:
        variant = one.variant
        tell(f"{variant.text}, looked at closely", 0)
        folder = self._new_folder(f"{file_name(variant.text)}-look")
        config = replace(variant.config, steps=_LOOK_STEPS, epochs=None)
        job = replace(self._job(variant, folder), config=config)
        try:
            looks = on_ranks(look_closely, variant.num_ranks, job, listen=lambda _: None, timeout=float(config.timeout))
        except CrewFailed as error:
            (folder / "failure.txt").write_text(f"{error}\n")
            one.not_looked = reason_of(error, variant.num_ranks)
            return
        one.looks = [look for look in looks if look is not None]

    def _fail(self, one: Measured, folder: Path, error: CrewFailed) -> None:
        (folder / "failure.txt").write_text(f"{error}\n")
        one.failed = reason_of(error, one.variant.num_ranks)

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        (folder / "logs").mkdir(parents=True)
        return folder

    def _job(self, variant: Variant, folder: Path) -> Job:
        return Job(self.task_path, variant.strategy, variant.config, self.arguments, str(folder))

    def rows(self, found: list[Measured]) -> list[dict[str, Any]]:
        """The figures of all, each held against one process."""
        rows = [self._row(one) for one in found]
        reference = next(
            (n for n, row in enumerate(rows) if row["strategy"] == REFERENCE and row["status"] == "ok"), None
        )
        if reference is not None:
            base, base_folder = rows[reference], found[reference].folders[0]
            for one, row in zip(found, rows, strict=True):
                if row["status"] == "ok":
                    row["speedup"] = base["step_seconds"]["median"] / row["step_seconds"]["median"]
                    row["largest_difference"] = {
                        "loss": loss_difference(row["losses"], base["losses"]),
                        "parameters": weight_difference(one.folders[0] / _WEIGHTS, base_folder / _WEIGHTS),
                    }
        for one in found:
            for folder in one.folders:
                (folder / _WEIGHTS).unlink(missing_ok=True)  # they were for comparing, and may be large
        return [without_infinities(row) for row in rows]

    def _row(self, one: Measured) -> dict[str, Any]:
        if one.failed is not None:
            return failed_row(one.variant, one.failed)
        return make_row(one.variant, one.runs, one.started, one.looks, warmup=self.warmup, on_gpu=self.on_gpu)


def keep_rows(found: list[Measured], document: dict[str, Any], folder: Path) -> None:
    """The comparison in the directory of all runs; in that of each, as far as it is about this run."""
    (folder / WHOLE_FILE).write_text(json.dumps(document, indent=1) + "\n")
    for one, row in zip(found, document["rows"], strict=True):
        for own in one.folders:
            told = {**document, "rows": [row]}
            (own / ROW_FILE).write_text(json.dumps(told, indent=1) + "\n")


def file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower())


def reason_of(error: CrewFailed, num_ranks: int) -> str:
    """A failure in a line: the exception's own words, which rank, and what to think of a process that was killed."""
    who = f"rank {error.rank}" if num_ranks > 1 else "it"
    if not error.error:
        hint = "; the machine may be out of memory" if "SIGKILL" in error.what else ""
        return f"{who} {error.what}{hint}"
    lines = error.error.strip().splitlines()
    found = [(number, match) for number, line in enumerate(lines) if (match := _EXCEPTION.match(line)) is not None]
    if not found:
        return lines[-1][:_LONGEST_REASON] if num_ranks == 1 else f"{who}: {lines[-1][:_LONGEST_REASON]}"
    number, match = found[-1]
    kind, words = match.group(1), " ".join([match.group(2) or "", *lines[number + 1 :]]).strip()
    told = words if kind.startswith("rung.errors.") else f"{kind.rpartition('.')[2]}: {words}"
    return told[:_LONGEST_REASON] if num_ranks == 1 else f"{who}: {told[:_LONGEST_REASON]}"


def weight_difference(own: Path, other: Path) -> float | None:
    """The largest absolute difference of two files of weights; None where they do not hold the same tensors."""
    from safetensors import safe_open

    if not own.exists() or not other.exists():
        return None
    largest = 0.0
    with safe_open(own, "pt") as left, safe_open(other, "pt") as right:
        if set(left.keys()) != set(right.keys()):
            return None
        for name in left.keys():  # noqa: SIM118 (it is no dictionary)
            a, b = left.get_tensor(name), right.get_tensor(name)
            if a.shape != b.shape:
                return None
            if a.numel():
                largest = max(largest, float((a.double() - b.double()).abs().max()))
    return largest


def _nothing() -> None:
    """What the first process does: it is there."""
