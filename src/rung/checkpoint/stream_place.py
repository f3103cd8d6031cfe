"""Where a data set in shards is read on, as a checkpoint has it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rung.checkpoint.manifest import Checkpoint
from rung.checkpoint.packing import NeedsPickleError, pack, unpack
from rung.data.shard_windows import StreamPlace
from rung.data.shards import LanePlace


def pack_place(place: StreamPlace | None) -> dict[str, Any] | None:
    """This rank's places as JSON; all ranks' together are those of the stream."""
    if place is None:
        return None
    lanes = {str(lane): _pack_lane(one) for lane, one in place.lanes.items()}
    return {"epoch": place.epoch, "batch": place.batch, "lanes": lanes}


def _pack_lane(place: LanePlace) -> dict[str, Any]:
    try:
        state = pack(place.state, "the state of a shard")
    except NeedsPickleError:
        return asdict(LanePlace(place.shard, place.index))  # the shard is read again up to the place
    return {"shard": place.shard, "index": place.index, "state": state, "state_index": place.state_index}


def place_of(checkpoint: Checkpoint | None) -> StreamPlace | None:
    found = checkpoint.manifest.get("stream") if checkpoint is not None else None
    if found is None:
        return None
    lanes = {
        int(lane): LanePlace(one["shard"], one["index"], unpack(one["state"]), one["state_index"])
        for lane, one in found["lanes"].items()
    }
    return StreamPlace(found["epoch"], found["batch"], lanes)
