"""Checkpoints that do not depend on topology: saved under any strategy and number of ranks, loaded under any other."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rung.checkpoint.load import choose, is_same_topology, restore
    from rung.checkpoint.manifest import Checkpoint, newest
    from rung.checkpoint.parts import EmergencySaver, Replicator
    from rung.checkpoint.places import (
        checkpoints_folder,
        emergency_folder,
        make_memory_folder,
        memory_folder,
        state_folders,
    )
    from rung.checkpoint.save import Saver, SaveRecord
    from rung.checkpoint.share import Position
    from rung.checkpoint.sites import StorageTopology
    from rung.checkpoint.weights import save_weights

__all__ = [
    "Checkpoint",
    "EmergencySaver",
    "Position",
    "Replicator",
    "SaveRecord",
    "Saver",
    "StorageTopology",
    "checkpoints_folder",
    "choose",
    "emergency_folder",
    "is_same_topology",
    "make_memory_folder",
    "memory_folder",
    "newest",
    "restore",
    "save_weights",
    "state_folders",
]  # fmt: skip

_HOMES = {
    "load": ("choose", "is_same_topology", "restore"),
    "manifest": ("Checkpoint", "newest"),
    "parts": ("Replicator", "EmergencySaver"),
    "places": ("checkpoints_folder", "make_memory_folder", "memory_folder", "emergency_folder", "state_folders"),
    "save": ("SaveRecord", "Saver"),
    "share": ("Position",),
    "sites": ("StorageTopology",),
    "weights": ("save_weights",),
}


def __getattr__(name: str) -> object:
    # Imported on use: most of this needs torch, and `rung checkpoints` does not.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rung.checkpoint.{home}"), name)
    raise AttributeError(f"module 'rung.checkpoint' has no attribute {name!r}")
