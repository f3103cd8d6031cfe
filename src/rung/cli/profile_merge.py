"""`rung profile merge`: the traces of all ranks in one file, with one process for each rank, on one clock."""

from __future__ import annotations

import gzip
import json
import re
import statistics
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rung.checkpoint.places import refuse_escapes
from rung.errors import ConfigError
from rung.system.untrusted import open_regular, parse_json

_NAME = re.compile(r"rank-([0-9]{1,7})-steps-([0-9]{1,15})-([0-9]{1,15})\.json\.gz")
_MAX_TRACE = 2**30  # bytes of one rank's trace, uncompressed
_MAX_RANKS = 10**6
_FLOW_BITS = 40  # bits of a flow id within a rank; the rank is above them
# The profiler's own names and order of processes; the merged file has one process per rank.
_DROPPED = ("process_name", "process_labels", "process_sort_index")


def merge_command(run: str, *, steps: str | None, out: str | None) -> int:
    """Merge the traces of a run into one file and print its path."""
    folder = Path(run) / "profile"
    refuse_escapes(Path(run), ("profile",))
    chosen = _choose(folder, steps)
    ranks = _traces(folder)[chosen]
    path = Path(out) if out is not None else folder / f"steps-{chosen[0]}-{chosen[1]}.json.gz"
    if not path.name.endswith((".json", ".json.gz")):
        raise ConfigError(f"--out {path}: the name must end with .json or .json.gz.")
    try:
        missing = merge(ranks, path)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"the traces in {folder} are damaged: {type(error).__name__}: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file with --out.") from None
    plural = "s" if len(ranks) > 1 else ""
    sys.stdout.write(
        f"{len(ranks)} rank{plural} in {path}; open it at https://ui.perfetto.dev or in chrome://tracing\n"
    )
    if missing:
        numbers = ", ".join(map(str, missing))
        sys.stdout.write(
            f"not here: rank{'s' if len(missing) > 1 else ''} {numbers}, on machines with disks of their own\n"
        )
    return 0


def merge(ranks: dict[int, Path], path: Path) -> list[int]:
    """Merge the traces of several ranks into one file. Returns the ranks of the run that have no trace."""
    traces = {rank: _read(ranks[rank]) for rank in sorted(ranks)}
    shifts = _shifts({rank: trace["rung"] for rank, trace in traces.items()})
    bases = {rank: _integer(trace.get("baseTimeNanoseconds", 0)) for rank, trace in traces.items()}
    base = min(bases[rank] + shifts[rank] for rank in traces)
    events: list[dict[str, Any]] = []
    for rank, trace in traces.items():
        delay = (bases[rank] + shifts[rank] - base) / 1000  # microseconds, as in the trace
        events += _names(rank, trace["rung"])
        events += _events(rank, trace["traceEvents"], delay)
    content = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base, "traceEvents": events}
    text = json.dumps(content).encode()
    # Write beside it and rename: an existing file is replaced at once, and a link at `path` is not followed.
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with partial.open("xb") as file:
        file.write(gzip.compress(text, compresslevel=5) if path.suffix == ".gz" else text)
    partial.replace(path)
    size = max(trace["rung"]["ranks"] for trace in traces.values())
    return sorted(set(range(size)) - set(ranks))


def _events(rank: int, events: list[dict[str, Any]], delay: float) -> Iterator[dict[str, Any]]:
    """The events of one rank, with GPU streams as threads of the rank's process."""
    for event in events:
        if not isinstance(event.get("pid"), int) or (event["ph"] == "M" and event["name"] in _DROPPED):
            continue
        moved = {**event, "pid": rank}
        if "ts" in event:
            moved["ts"] = float(event["ts"]) + delay
        if "id" in event:  # a flow between two events of one rank; ids must be unique in the merged file
            moved["id"] = (rank << _FLOW_BITS) + _integer(event["id"])
        yield moved


def _names(rank: int, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    metadata = {
        "process_name": {"name": f"rank {rank}"},
        "process_labels": {"labels": f"{facts['strategy']}, {facts['machine']}"},
        "process_sort_index": {"sort_index": rank},
    }
    for name, args in metadata.items():
        yield {"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args}


def _shifts(facts: dict[int, dict[str, Any]]) -> dict[int, int]:
    """Nanoseconds to add to each rank's times. Ranks of a machine share its clock. Between machines it is the median
    difference of the clocks that ranks read after common barriers, right to about the latency of a message."""
    first = facts[min(facts)]
    found = {}
    for rank, own in facts.items():
        leader = min(other for other, its in facts.items() if its["machine"] == own["machine"])
        if own["machine"] == first["machine"]:
            found[rank] = 0
        else:
            pairs = zip(first["clocks_ns"], facts[leader]["clocks_ns"], strict=True)
            found[rank] = round(statistics.median(one - other for one, other in pairs))
    return found


def _traces(folder: Path) -> dict[tuple[int, int], dict[int, Path]]:
    """The traces by (first step, last step) and rank."""
    found: dict[tuple[int, int], dict[int, Path]] = {}
    for path in folder.glob("rank-*.json.gz"):
        if match := _NAME.fullmatch(path.name):
            rank, first, last = map(int, match.groups())
            found.setdefault((first, last), {})[rank] = path
    return found


def _choose(folder: Path, steps: str | None) -> tuple[int, int]:
    known = sorted(_traces(folder))
    if not known:
        raise ConfigError(f"there are no traces in {folder}; `rung train --profile STEPS` writes them.")
    names = [f"{first}:{last}" if first != last else f"{first}" for first, last in known]
    if steps is not None:
        if steps not in names:
            raise ConfigError(f"there are no traces of steps {steps} in {folder}; there are: {', '.join(names)}.")
        return known[names.index(steps)]
    if len(known) > 1:
        raise ConfigError(f"{folder} has traces of steps {', '.join(names)}. Choose with --steps {names[-1]}.")
    return known[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as packed, gzip.open(packed) as file:
            content = file.read(_MAX_TRACE + 1)
        if len(content) > _MAX_TRACE:
            raise ValueError(f"it has more than {_MAX_TRACE:,} bytes")
        trace = parse_json(content)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    if not (isinstance(trace, dict) and _is_ours(trace.get("rung")) and isinstance(trace.get("traceEvents"), list)):
        raise ConfigError(f"{path} is not a trace of `rung train --profile`.")
    return trace


def _is_ours(facts: Any) -> bool:
    """Whether these are the facts that `rung train --profile` adds to a trace."""
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), str) for key in ("strategy", "machine")):
        return False
    clocks, ranks = facts.get("clocks_ns"), facts.get("ranks")
    are_clocks = isinstance(clocks, list) and bool(clocks) and all(type(clock) is int for clock in clocks)
    return are_clocks and type(ranks) is int and 0 < ranks <= _MAX_RANKS


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, str | int) else int(float(value))
