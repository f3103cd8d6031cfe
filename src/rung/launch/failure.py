"""What went wrong, told so that the last screenful is the cause.

Each failing rank leaves a record; a killed one leaves none, but its last step and phase are on the status board. The
report names the rank that failed first, not one of those that then lost their connection to it.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from rung.errors import RungError
from rung.status import RankStatus

# What a rank says when another one went away under it.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|recvbytes|sendbytes|socket timeout|timed out waiting"
    r"|nccl|gloo|store.*(timeout|failed)|connection was likely closed",
    re.IGNORECASE,
)
_MAX_MESSAGE_LINES = 30


@dataclass(frozen=True)
class FailureRecord:
    """One rank's own account of its failure."""

    rank: int
    step: int
    phase: str
    summary: str
    traceback: str
    seconds: float
    lost_peer: bool


def record_failure(folder: Path, rank: int, status: RankStatus, error: BaseException) -> None:
    """Written by the failing rank, in one go."""
    record = FailureRecord(
        rank=rank,
        step=status.step,
        phase=status.phase,
        summary=_summarise(error),
        traceback=format_error(error),
        seconds=time.time(),
        lost_peer=not isinstance(error, RungError) and bool(_LOST_PEER.search(str(error))) and _is_from_torch(error),
    )
    partial = folder / f".rank-{rank}.json"
    partial.write_text(json.dumps(asdict(record)))
    partial.rename(folder / f"rank-{rank}.json")


def read_failures(folder: Path) -> dict[int, FailureRecord]:
    records = [FailureRecord(**json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.json"))]
    return {record.rank: record for record in records}


def report(
    failures: dict[int, FailureRecord],
    statuses: list[RankStatus],
    exit_codes: dict[int, int | None],
    deaths: dict[int, float],
    logs: Path,
) -> str:
    """The closing screenful of a failed job."""
    first = first_to_fail(failures, statuses, exit_codes, deaths)
    if first is None:
        return f"the job failed, but no rank says why. The logs are in {logs}."
    lines = [_headline(first, failures.get(first), statuses[first], exit_codes.get(first))]
    own = failures.get(first)
    if own is not None:
        lines += ["", *(f"  {line}" for line in own.traceback.rstrip().splitlines()), ""]
    for rank, status in enumerate(statuses):
        if rank != first:
            lines.append(f"rank {rank}: {_fate(failures.get(rank), status, exit_codes.get(rank))}")
    lines.append(f"logs: {logs}")
    return "\n".join(lines)


def first_to_fail(
    failures: dict[int, FailureRecord],
    statuses: list[RankStatus],
    exit_codes: dict[int, int | None],
    deaths: dict[int, float],
) -> int | None:
    """An own error before a silent death before a lost connection; within a kind the earliest."""
    own = [record for record in failures.values() if not record.lost_peer]
    silent = [
        rank
        for rank, status in enumerate(statuses)
        if rank not in failures and not status.finished and rank in deaths and exit_codes.get(rank) != -signal.SIGTERM
    ]
    silent_first = min((deaths[rank] for rank in silent), default=float("inf"))
    # A rank that died without a word may be why another one raised; the earlier of the two is the cause.
    own_first = min((record.seconds for record in own), default=float("inf"))
    if own and own_first <= silent_first:
        return min(own, key=lambda record: record.seconds).rank
    if silent:
        return min(silent, key=lambda rank: deaths[rank])
    if failures:
        return min(failures.values(), key=lambda record: record.seconds).rank
    unfinished = [rank for rank, status in enumerate(statuses) if not status.finished]
    return unfinished[0] if unfinished else None


def format_error(error: BaseException) -> str:
    """A traceback without the frames of torch and Rung between the user's own, and not longer than a screen."""
    if isinstance(error, RungError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        error = error.with_traceback(error.__traceback__)
    captured = traceback.TracebackException.from_exception(error, compact=True)
    frames = list(captured.stack)
    shown = [frame for frame in frames if not _is_library(frame.filename)] or frames[-4:]
    last = frames[-1] if frames else None
    if last is not None and last not in shown:
        shown.append(last)
    lines = ["Traceback (most recent call last):\n"] if shown else []
    for index, frame in enumerate(shown):
        gap = frames.index(frame) - (frames.index(shown[index - 1]) if index else -1) - 1
        if gap > 0:
            lines.append(f"  ... {gap} frame{'s' if gap > 1 else ''} inside torch and rung ...\n")
        lines += traceback.StackSummary.from_list([frame]).format()
    message = "".join(captured.format_exception_only()).splitlines()
    if len(message) > _MAX_MESSAGE_LINES:
        half = _MAX_MESSAGE_LINES // 2
        message = [*message[:half], f"... {len(message) - 2 * half} lines left out ...", *message[-half:]]
    return "".join(lines) + "\n".join(message)


def _headline(rank: int, record: FailureRecord | None, status: RankStatus, exit_code: int | None) -> str:
    where = (
        f"in step {status.step}, phase {status.phase}"
        if status.step
        else f"before the first step, phase {status.phase}"
    )
    if record is not None:
        where = (
            f"in step {record.step}, phase {record.phase}"
            if record.step
            else f"before the first step, phase {record.phase}"
        )
        return f"rank {rank} failed {where}: {record.summary}"
    if exit_code is not None and exit_code < 0:
        name = _signal_name(-exit_code)
        hint = " The kernel does this when memory runs out (see dmesg)." if name == "SIGKILL" else ""
        return f"rank {rank} was killed by {name} {where}.{hint}"
    if exit_code == 0:
        return f"rank {rank} left {where}: it ended with exit code 0 before training was finished."
    return f"rank {rank} ended {where} without a traceback (exit code {exit_code})."


def _fate(record: FailureRecord | None, status: RankStatus, exit_code: int | None) -> str:
    where = f"in step {status.step}, {status.phase}" if status.step else status.phase
    if status.finished:
        return "finished"
    if record is not None and record.lost_peer:
        return f"lost its connection {where}"
    if record is not None:
        return f"failed {where}: {record.summary}"
    if exit_code is not None and exit_code < 0 and exit_code != -signal.SIGTERM:
        return f"killed by {_signal_name(-exit_code)} {where}"
    return f"stopped {where}"


def _summarise(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def _is_library(filename: str) -> bool:
    path = filename.replace("\\", "/")
    return "/torch/" in path or "/rung/" in path or path.startswith("<frozen")


def _is_from_torch(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or _is_library(frames[-1].filename)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
