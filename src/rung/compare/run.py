"""Runs the variants of a comparison in turns, each in fresh processes. A failure becomes a row like the others."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from rung.compare.measure import RankMeasurement, RankProfile, profile_steps, timed_run
from rung.compare.report.runs import ROW_FILE, WHOLE_FILE
from rung.compare.rows import failed_row, loss_difference, make_row, without_infinities
from rung.compare.variants import REFERENCE, Variant
from rung.launch.spawn import RankFailedError, on_ranks
from rung.spec.abilities import has_common_steps
from rung.system.load import other_cores, processor_time
from rung.train.job import RankJob

_WEIGHTS = "model.safetensors"
_PROFILE_STEPS = 12
_MAX_REASON = 400
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Problem|Failed|Exit|Interrupt|Warning))(?:: (.*))?$")

OnProgress = Callable[[str, int], None]  # (description of the run, its finished steps)


@dataclass
class MeasuredRun:
    """The measurements of one variant so far."""

    variant: Variant
    runs: list[list[RankMeasurement]] = field(default_factory=list)
    started: list[float] = field(default_factory=list)  # perf_counter before the processes of each run
    folders: list[Path] = field(default_factory=list)
    other_cores: list[float | None] = field(default_factory=list)  # that other programs kept busy during each run
    profiles: list[RankProfile] = field(default_factory=list)
    failed: str | None = None
    not_profiled: str | None = None  # why there is no memory by kind and no count of messages


@dataclass(frozen=True)
class Bench:
    """The settings of a comparison. Each run writes into its own directory in `folder`."""

    task_path: str
    arguments: dict[str, Any]
    folder: Path
    repeats: int
    warmup: int
    on_gpu: bool

    def compare(self, variants: list[Variant], on_progress: OnProgress) -> list[MeasuredRun]:
        """Run every variant once, then every variant again, so that other load on the machine affects all alike."""
        on_ranks(_nothing, 1)  # wait for the fork server's imports, which would count as the first run's start
        measured = [MeasuredRun(variant, failed=variant.refused) for variant in variants]
        for repeat in range(1, self.repeats + 1):
            for one in measured:
                if one.failed is None:
                    self._measure(one, repeat, on_progress)
        for one in measured:
            if one.failed is None and one.variant.layout is not None and has_common_steps(one.variant.layout):
                self._profile(one, on_progress)
        return measured

    def _measure(self, one: MeasuredRun, repeat: int, on_progress: OnProgress) -> None:
        variant = one.variant
        folder = self._new_folder(f"{file_name(variant.text)}-{repeat}")
        what = f"{variant.text}, run {repeat} of {self.repeats}"
        on_progress(what, 0)
        job = self._job(variant, folder)
        started, before = time.perf_counter(), processor_time()
        timeout = float(variant.config.timeout)
        keep_weights = repeat == 1  # `rows` compares those of the first repeat with one process
        try:
            ranks = on_ranks(
                timed_run, variant.num_ranks, job, keep_weights, listen=partial(on_progress, what), timeout=timeout
            )
        except RankFailedError as error:
            (folder / "failure.txt").write_text(f"{error}\n")
            one.failed = reason_of(error, variant.num_ranks)
            return
        one.runs.append(ranks)
        one.started.append(started)
        one.folders.append(folder)
        one.other_cores.append(other_cores(before, processor_time()))

    def _profile(self, one: MeasuredRun, on_progress: OnProgress) -> None:
        variant = one.variant
        on_progress(f"{variant.text}, profiled", 0)
        folder = self._new_folder(f"{file_name(variant.text)}-look")
        config = replace(variant.config, steps=_PROFILE_STEPS, epochs=None)
        job = replace(self._job(variant, folder), config=config)
        try:
            # `listen` ignores the values: their arrival alone restarts the timeout.
            profiles = on_ranks(
                profile_steps, variant.num_ranks, job, listen=lambda _: None, timeout=float(config.timeout)
            )
        except RankFailedError as error:
            (folder / "failure.txt").write_text(f"{error}\n")
            one.not_profiled = reason_of(error, variant.num_ranks)
            return
        one.profiles = [profile for profile in profiles if profile is not None]

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        (folder / "logs").mkdir(parents=True)
        return folder

    def _job(self, variant: Variant, folder: Path) -> RankJob:
        return RankJob(self.task_path, variant.strategy, variant.config, self.arguments, str(folder))

    def rows(self, measured: list[MeasuredRun]) -> list[dict[str, Any]]:
        """One row of figures for each variant, with its speed-up and differences from one process."""
        rows = [self._row(one) for one in measured]
        reference = next(
            (n for n, row in enumerate(rows) if row["strategy"] == REFERENCE and row["status"] == "ok"), None
        )
        if reference is not None:
            base, base_folder = rows[reference], measured[reference].folders[0]
            for one, row in zip(measured, rows, strict=True):
                if row["status"] == "ok":
                    row["speedup"] = base["step_seconds"]["median"] / row["step_seconds"]["median"]
                    row["largest_difference"] = {
                        "loss": loss_difference(row["losses"], base["losses"]),
                        "parameters": weight_difference(one.folders[0] / _WEIGHTS, base_folder / _WEIGHTS),
                    }
        for one in measured:
            for folder in one.folders:
                (folder / _WEIGHTS).unlink(missing_ok=True)  # only needed for the comparison above, and may be large
        return [without_infinities(row) for row in rows]

    def _row(self, one: MeasuredRun) -> dict[str, Any]:
        if one.failed is not None:
            return failed_row(one.variant, one.failed)
        row = make_row(one.variant, one.runs, one.started, one.profiles, warmup=self.warmup, on_gpu=self.on_gpu)
        known = [cores for cores in one.other_cores if cores is not None]
        return {**row, "other_cores": max(known, default=None)}


def keep_rows(measured: list[MeasuredRun], document: dict[str, Any], folder: Path) -> None:
    """Write the comparison into the directory of all runs, and each row into the directories of its runs."""
    (folder / WHOLE_FILE).write_text(json.dumps(document, indent=1) + "\n")
    for one, row in zip(measured, document["rows"], strict=True):
        for own in one.folders:
            (own / ROW_FILE).write_text(json.dumps({**document, "rows": [row]}, indent=1) + "\n")


def file_name(text: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower())


def reason_of(error: RankFailedError, num_ranks: int) -> str:
    """A failure in one line: the rank and the exception's message, or how the process ended."""
    who = f"rank {error.rank}" if num_ranks > 1 else "it"
    if not error.error:
        hint = "; the machine may be out of memory" if "SIGKILL" in error.what else ""
        return f"{who} {error.what}{hint}"
    lines = error.error.strip().splitlines()
    matches = [(number, match) for number, line in enumerate(lines) if (match := _EXCEPTION.match(line)) is not None]
    reason = lines[-1]
    if matches:
        number, match = matches[-1]
        kind, message = match.group(1), " ".join([match.group(2) or "", *lines[number + 1 :]]).strip()
        reason = message if kind.startswith("rung.errors.") else f"{kind.rpartition('.')[2]}: {message}"
    return reason[:_MAX_REASON] if num_ranks == 1 else f"{who}: {reason[:_MAX_REASON]}"


def weight_difference(own: Path, other: Path) -> float | None:
    """The largest absolute difference of two weight files; None if one is missing or their tensors do not match."""
    if not own.exists() or not other.exists():
        return None
    largest = 0.0
    with safe_open(own, "pt") as left, safe_open(other, "pt") as right:
        if set(left.keys()) != set(right.keys()):
            return None
        for name in left.keys():  # noqa: SIM118 (safe_open is not iterable)
            a, b = left.get_tensor(name), right.get_tensor(name)
            if a.shape != b.shape:
                return None
            if a.numel():
                largest = max(largest, float((a.double() - b.double()).abs().max()))
    return largest


def _nothing() -> None:
    """What the first process does: it is there."""
