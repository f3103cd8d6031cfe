"""Failure records of ranks, and the final report of a failed job: one screenful with the cause.

Each failing rank writes a record. A killed rank writes none, but its last step and phase are on the status board. The
report names the rank that failed first, not one of the ranks that then lost their connection to it.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from rung.distributed.status_board import RankStatus, StatusBoard
from rung.errors import RungError
from rung.launch.diagnostics.crash_log import CrashSummary, read_crash_summary
from rung.launch.diagnostics.stack_analysis import location_of_error, package_folder
from rung.system.disk import trouble_with
from rung.system.processes import is_running

# Errors of a rank whose peer has ended.
_LOST_PEER = re.compile(
    r"closed by peer|reset by peer|connection refused|broken pipe|recvbytes|sendbytes|socket timeout|timed out"
    r"|nccl|gloo|store.*(timeout|failed)|connection was likely closed|pair closure|remote process exited|tensorpipe",
    re.IGNORECASE,
)
# A dying process closes its connections a moment before it is gone: how long to wait until it is.
_PEER_SECONDS = 0.5
# The data loader's message for an error in one of its processes.
_DATA_WORKER = re.compile(r"Caught \S+ in (?:DataLoader|data) worker process (\d+)\.\nOriginal Traceback ")
_FRAME = re.compile(r'  File "(.+)", line \d+, in ')
_CARETS = re.compile(r"^[\s~^]+$")
_UNPRINTABLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
# With these limits, headline, traceback and the other ranks fit on one screen.
_MAX_MESSAGE_LINES = 12
_MAX_LINE = 400
_MAX_FRAMES = 8
_MAX_CAUSES = 3
_RESERVED_BYTES = 16 * 1024


@dataclass(frozen=True)
class FailureRecord:
    """A rank's failure, as the rank itself writes it."""

    rank: int
    step: int
    phase: str
    summary: str
    traceback: str
    seconds: float
    lost_peer: bool  # a connection broke, and another rank had ended
    after: list[int]  # ranks that had ended earlier without finishing
    place: str = ""  # where it waited for others, if it did
    memory: list[str] = field(default_factory=list)  # what filled the memory, if the rank ran out of it
    smaller: int | None = None  # the micro-batch to try next in that case


def reserve_room(folder: Path, rank: int) -> None:
    """Reserve disk space for a rank's failure record, because the failure may be that the disk is full."""
    with contextlib.suppress(OSError):
        _reserve(folder, rank).write_bytes(b"\0" * _RESERVED_BYTES)


def release_room(folder: Path, rank: int) -> None:
    with contextlib.suppress(OSError):
        _reserve(folder, rank).unlink()


def _reserve(folder: Path, rank: int) -> Path:
    return folder / f".room-{rank}"


def record_failure(
    folder: Path,
    rank: int,
    board: StatusBoard,
    error: BaseException,
    *,
    memory: Sequence[str] = (),
    smaller: int | None = None,
) -> None:
    """Write the record of a failure. The failing rank calls this."""
    seconds = time.time()
    lost_connection = not isinstance(error, RungError) and bool(_LOST_PEER.search(_message(error)))
    # Slots without a pid belong to ranks on other machines, which may have ended unnoticed here.
    after, reported = _ended_before(board, rank), any(not board.read(r).pid for r in range(board.num_ranks))
    while lost_connection and not after and not reported and time.time() < seconds + _PEER_SECONDS:
        time.sleep(0.01)
        after = _ended_before(board, rank)
        reported = any(path.name != f"rank-{rank}.json" for path in folder.glob("rank-*.json"))
    status = board.read(rank)
    record = FailureRecord(
        rank=rank,
        step=status.step,
        phase=status.phase,
        summary=_summarise(error),
        traceback=format_error(error),
        seconds=seconds,
        lost_peer=lost_connection and (bool(after) or reported),
        after=after,
        place=_waited_at(error),
        memory=list(memory),
        smaller=smaller,
    )
    release_room(folder, rank)
    folder.mkdir(parents=True, exist_ok=True)  # the user may have removed the run's directory
    partial = folder / f".rank-{rank}.json"  # renamed, so that the launcher never reads half a record
    partial.write_text(json.dumps(asdict(record)))
    partial.rename(folder / f"rank-{rank}.json")


def _ended_before(board: StatusBoard, rank: int) -> list[int]:
    others = {other: board.read(other) for other in range(board.num_ranks) if other != rank}
    return [r for r, status in others.items() if status.pid and not _is_done(status) and not is_running(status.pid)]


def read_failures(folder: Path) -> dict[int, FailureRecord]:
    records = [FailureRecord(**json.loads(path.read_text())) for path in sorted(folder.glob("rank-*.json"))]
    return {record.rank: record for record in records}


def report(
    failures: dict[int, FailureRecord],
    statuses: list[RankStatus],
    exit_codes: dict[int, int | None],
    deaths: dict[int, float],
    logs: Path,
    elsewhere: Collection[int] = (),
    places: Mapping[int, str] | None = None,
) -> str:
    """Final report of a failed job. `deaths` and `exit_codes` are of ranks that ended by themselves, `elsewhere` are
    the ranks of other machines, of which nothing is known here, and `places` is what surviving ranks did."""
    first = first_to_fail(failures, statuses, deaths)
    if first is None:
        return f"every rank finished, but rank 0 ended before it wrote its results.\nlogs: {logs}"
    own = failures.get(first)
    crashes = {  # of ranks that died without a record
        rank: read_crash_summary(logs / f"rank-{rank}.log", rank, exit_codes.get(rank))
        for rank in {first, *deaths} - set(failures)
        if rank not in elsewhere
    }
    crash = crashes.get(first, CrashSummary())
    lines = [_headline(first, own, statuses[first], exit_codes.get(first), crash, trouble_with(logs.parent))]
    if own is not None:
        details = [*own.traceback.rstrip().splitlines(), *own.memory]
    else:
        last = _shorten(crash.lines)
        details = ["the end of its log:", *(f"  {line}" for line in last)] if last else []
    if details and details != [own.summary if own else ""]:
        lines += ["", *(f"  {line}".rstrip() for line in details), ""]
    alike: list[int] = []
    for rank, status in enumerate(statuses):
        if rank in elsewhere:
            continue
        other = failures.get(rank)
        same = own is not None and other is not None and not other.lost_peer and other.summary == own.summary
        if rank != first and same:
            alike.append(rank)  # one line for all: every rank may have found the same mistake
        elif rank != first:
            where = crashes[rank].place if rank in crashes else (places or {}).get(rank, "")
            end = _describe_end(other, status, exit_codes.get(rank), rank in deaths)
            lines.append(f"rank {rank}: {end}{', ' if where else ''}{where}")
    if alike:
        lines.append(f"rank{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))}: failed with the same error")
    lines.append(f"logs: {logs}")
    return "\n".join(lines)


def first_to_fail(
    failures: dict[int, FailureRecord], statuses: list[RankStatus], deaths: dict[int, float]
) -> int | None:
    """The rank whose failure no other rank caused; of several, the earliest."""
    killed = {r: t for r, t in deaths.items() if r not in failures and not _is_done(statuses[r])}
    own = [record for record in failures.values() if not record.lost_peer and not record.after]
    if own:
        earliest = min(own, key=lambda record: record.seconds)
        # Its record lists the ranks that had died, except those that died before they wrote a pid: compare times.
        before = [rank for rank, seconds in killed.items() if seconds < earliest.seconds]
        return min(before, key=lambda rank: killed[rank]) if before else earliest.rank
    if killed:
        return min(killed, key=lambda rank: killed[rank])
    if failures:
        return min(failures.values(), key=lambda record: (record.lost_peer, record.seconds)).rank
    unfinished = [rank for rank, status in enumerate(statuses) if status.pid and not _is_done(status)]
    return unfinished[0] if unfinished else None


def _is_done(status: RankStatus) -> bool:
    return status.left or status.phase == "spare"


def format_error(error: BaseException) -> str:
    """A traceback of at most a screenful, without the frames of torch and Rung between the user's own."""
    if isinstance(error, RungError):
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    text = _message(error)
    if _DATA_WORKER.match(text):
        frames, message = _parse_traceback(text)
        return "\n".join([*_format_frames(frames), *_shorten(message)])
    captured = traceback.TracebackException.from_exception(error, compact=True)
    frames = _frames_of(captured)
    installed = sysconfig.get_path("purelib")
    while isinstance(error, SystemExit) and len(frames) > 1 and frames[-1][0].startswith(installed):
        frames.pop()  # a tracker may have put its own function in the place of sys.exit
    lines = [*_format_frames(frames), *_shorten(_only_message(captured, error))]
    cause, count = _cause_of(captured), 0
    while cause is not None and count < _MAX_CAUSES:
        place = next((frame for frame in reversed(cause.stack) if not _is_library(frame.filename)), None)
        where = f" ({place.filename}:{place.lineno})" if place is not None else ""
        lines.append(f"caused by {_shorten(''.join(cause.format_exception_only()).splitlines())[0]}{where}")
        cause, count = _cause_of(cause), count + 1
    return "\n".join(lines)


Frame = tuple[str, list[str]]  # the file, and the lines to show


def _frames_of(captured: traceback.TracebackException) -> list[Frame]:
    return [
        (frame.filename, "".join(traceback.StackSummary.from_list([frame]).format()).splitlines())
        for frame in captured.stack
    ]


def _parse_traceback(text: str) -> tuple[list[Frame], list[str]]:
    """Frames and message of a data worker's traceback, which arrives as text."""
    worker = _DATA_WORKER.match(text)
    frames: list[Frame] = []
    message: list[str] = []
    for line in text.rpartition("Traceback (most recent call last):\n")[2].rstrip().splitlines():
        start = _FRAME.match(line)
        if start and not message:
            frames.append((start.group(1), [line]))
        elif line.startswith("    ") and frames and not message:
            frames[-1][1].append(line)
        else:
            message.append(line)
    if worker is not None:
        message.append(f"(in data worker {worker.group(1)} of this rank)")
    return frames, message


def _format_frames(frames: list[Frame]) -> list[str]:
    shown = [i for i, (filename, _) in enumerate(frames) if not _is_library(filename)]
    shown = shown or list(range(len(frames)))[-4:]
    if frames and shown[-1] != len(frames) - 1:
        shown.append(len(frames) - 1)
    left_out = len(shown) - _MAX_FRAMES
    if left_out > 0:  # a recursion, mostly
        shown = shown[: _MAX_FRAMES // 2] + shown[-_MAX_FRAMES // 2 :]
    lines = ["Traceback (most recent call last):"] if shown else []
    previous = -1
    for index in shown:
        gap = index - previous - 1
        if gap > 0:
            whose = "left out" if left_out > 0 and previous == shown[_MAX_FRAMES // 2 - 1] else "inside torch and rung"
            lines.append(f"  ... {gap} frame{'s' if gap > 1 else ''} {whose} ...")
        lines += [_cut(line) for line in frames[index][1] if not _CARETS.match(line)]
        previous = index
    return lines


def _shorten(lines: list[str]) -> list[str]:
    """Limit a message in lines and in their length, and drop control characters."""
    lines = [_cut(_UNPRINTABLE.sub("", line)) for line in lines]
    if len(lines) > _MAX_MESSAGE_LINES:
        half = _MAX_MESSAGE_LINES // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines left out ...", *lines[-half:]]
    return lines


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]} ... ({len(line) - _MAX_LINE:,} more characters)"


def _only_message(captured: traceback.TracebackException, error: BaseException) -> list[str]:
    if isinstance(error, SystemExit):
        return [_summarise(error)]
    return "".join(captured.format_exception_only()).splitlines()


def _cause_of(captured: traceback.TracebackException) -> traceback.TracebackException | None:
    if captured.__cause__ is not None:
        return captured.__cause__
    return None if captured.__suppress_context__ else captured.__context__


def _headline(
    rank: int,
    record: FailureRecord | None,
    status: RankStatus,
    exit_code: int | None,
    crash: CrashSummary,
    trouble: str,
) -> str:
    if record is not None:
        return f"rank {rank} failed {_where(record.step, record.phase)}: {record.summary}"
    where = _where(status.step, status.phase)
    if exit_code is not None and exit_code < 0:
        name = _signal_name(-exit_code)
        hint = " The kernel does this when memory runs out (see dmesg)." if name == "SIGKILL" else ""
        if crash.is_mismatch:
            hint = " Ranks called different operations, or with different sizes: they must call the same in one order."
        return f"rank {rank} was killed by {name} {where}{', ' if crash.place else ''}{crash.place}.{hint}"
    hint = f" Its report could not be written: {trouble}." if trouble else ""
    if exit_code is None:  # not a child of this process
        return f"rank {rank} is gone {where}: it was killed, or ended without a report.{hint}"
    if exit_code == 0:
        return f"rank {rank} left {where}: it ended with exit code 0 before training was finished."
    return f"rank {rank} ended {where} without a traceback (exit code {exit_code}).{hint}"


def _where(step: int, phase: str) -> str:
    if phase == "reading data":
        step += 1  # it reads for the next step
    return f"in step {step}, phase {phase}" if step else f"before the first step, phase {phase}"


def describe_end(rank: int, state: Path, status: RankStatus, exit_code: int | None) -> str:
    """How a rank ended, in a few words."""
    return _describe_end(read_failures(state).get(rank), status, exit_code, died=True)


def _describe_end(record: FailureRecord | None, status: RankStatus, exit_code: int | None, died: bool) -> str:
    if _is_done(status):
        return {"spare": "waited as a spare"}.get(status.phase, status.phase)
    where = _where(status.step, status.phase)
    if record is not None and record.lost_peer:
        return f"lost its connection {where}{', ' if record.place else ''}{record.place}"
    if record is not None:
        return f"failed {where}: {record.summary}"
    if died and exit_code is not None and exit_code < 0:
        return f"killed by {_signal_name(-exit_code)} {where}"
    if died:
        return f"gone {where}" if exit_code is None else f"ended {where} (exit code {exit_code})"
    return f"stopped {where}"


def _waited_at(error: BaseException) -> str:
    place = location_of_error(error)
    return f"in {place.operation} at {place.where}" if place.operation is not None else ""


def _summarise(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    text = _message(error)
    worker = _DATA_WORKER.match(text)
    if worker is not None:
        message = _parse_traceback(text)[1]
        return f"{_cut(message[0])} (in data worker {worker.group(1)})"
    if error.__cause__ is not None and "killed by signal" in _message(error.__cause__):
        text = _message(error.__cause__)  # of a data worker
    lines = _UNPRINTABLE.sub("", text).strip().splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first[:200]}" if first else type(error).__name__


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ that raises must not hide the error
        return "(its message cannot be shown)"


@cache
def _libraries() -> tuple[str, ...]:
    return (*(folder for name in ("torch", "rung") if (folder := package_folder(name)) is not None), "<frozen")


def _is_library(filename: str) -> bool:
    return filename.startswith(_libraries())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
