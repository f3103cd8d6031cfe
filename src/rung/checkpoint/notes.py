"""The notes of ranks beside their files, and the manifest that is made of them.

When ranks save together, one of them merges what each says of its part. A rank that saves on its own writes a note; the
next attempt to start composes the notes of a step into a manifest, if they are complete. The launcher does so while a
job stands still, so nothing here imports torch, which takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rung.checkpoint.manifest import are_sizes, find_untiled, write_whole
from rung.errors import CheckpointError
from rung.system.untrusted import read_json

UNREPORTED = "unreported"  # the key of a rank's figures of the last steps, see `train/lost_figures.py`
Unreported = Callable[[], list[dict[str, Any]]]  # reads these figures from the device
_MAX_NOTE = 2**28  # bytes
_MAX_RANKS = 2**20


def write_note(folder: Path, rank: int, content: Mapping[str, Any], *, needs_all: bool) -> str:
    """Describe a rank's file, after it was written: a file without a note does not count."""
    name = f"rank-{rank:05d}.json"
    write_whole(folder / name, json.dumps({**content, "needs_all": needs_all}).encode())
    return name


def read_notes(folder: Path) -> list[dict[str, Any]]:
    notes = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            notes.append(read_json(path, _MAX_NOTE))
        except (OSError, ValueError):
            continue  # the other notes may be complete without it
    return notes


def compose(notes: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Compose the manifest of a step from its ranks' notes; None if they are not complete."""
    try:
        return _compose(notes) if notes else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"the ranks' notes are invalid: {type(error).__name__}: {error}.") from error


def _compose(notes: list[dict[str, Any]]) -> dict[str, Any] | None:
    by_rank = {int(note["rank"]): note for note in notes}
    facts = next(iter(by_rank.values()))["facts"]
    same = [note for note in by_rank.values() if note["facts"]["topology"] == facts["topology"]]
    present = {int(note["rank"]) for note in same}
    if not are_sizes([facts["ranks"]]) or facts["ranks"] > _MAX_RANKS:
        raise ValueError(f"{facts['ranks']!r:.60} ranks")
    everyone = set(range(facts["ranks"]))
    # If ranks have state of their own, such as generators that were used, the notes of all ranks are needed.
    if any(note["needs_all"] for note in same):
        if present != everyone:
            return None
    elif facts["topology"].get("servers"):
        # Each server holds a part of the state, and every trainer all of the rest, such as buffers.
        servers = set(range(int(facts["topology"]["servers"])))
        if not servers <= present or present == servers:
            return None
    elif {_shard_of(facts["topology"]["axes"], rank) for rank in present} != {
        _shard_of(facts["topology"]["axes"], rank) for rank in everyone
    }:
        return None
    tensors = join([note["tensors"] for note in same])
    is_whole = all(find_untiled(tensor) is None for tensor in tensors.values())
    figures = {str(note["rank"]): note[UNREPORTED] for note in same if note.get(UNREPORTED)}
    return {**merge(same, tensors), **({UNREPORTED: figures} if figures else {})} if is_whole else None


def _shard_of(axes: Mapping[str, int], rank: int) -> tuple[int, ...]:
    """All mesh coordinates but that among replicas: ranks that share them hold the same state."""
    found = []
    for axis in reversed(list(axes)):
        rank, place = divmod(rank, axes[axis])
        if axis != "dp_replicate":
            found.append(place)
    return tuple(found)


def join(descriptions: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The chunks of all ranks by tensor, without duplicates."""
    tensors: dict[str, Any] = {}
    for described in descriptions:
        for name, tensor in described.items():
            known = tensors.setdefault(name, {**tensor, "chunks": []})
            places = {tuple(chunk["offsets"]) for chunk in known["chunks"]}
            known["chunks"] += [chunk for chunk in tensor["chunks"] if tuple(chunk["offsets"]) not in places]
    return tensors


def merge(parts: list[dict[str, Any]], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the manifest, from the entries of all ranks."""
    facts = [part["facts"] for part in sorted(parts, key=lambda part: int(part["rank"]))]
    values = {name: value for one in facts for name, value in one["optimizer"]["values"].items()}
    # Data ranks may differ in a module's extra state as in its buffers: the first one's is saved.
    extra = {name: value for one in reversed(facts) for name, value in one.get("extra", {}).items()}
    # Each rank knows how far it read its own shards.
    streams = [one["stream"] for one in facts if one.get("stream") is not None]
    lanes = {lane: place for stream in streams for lane, place in stream["lanes"].items()}
    return {
        **facts[0],
        "stream": {**streams[0], "lanes": lanes} if streams else None,
        "optimizer": {**facts[0]["optimizer"], "values": values},
        "extra": extra,
        "files": {name: file for part in parts for name, file in part["files"].items()},
        "tensors": tensors,
    }
