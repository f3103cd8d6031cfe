"""Checkpoints without topology: saved under any strategy and number of processes, loaded under any other."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rung.checkpoint.load import choose, is_same_topology, restore
    from rung.checkpoint.manifest import Checkpoint, newest
    from rung.checkpoint.parts import Replicator, Rescuer
    from rung.checkpoint.places import checkpoints_folder, memory_folder, rescue_folder, state_folders
    from rung.checkpoint.save import Saver, SaveRecord
    from rung.checkpoint.share import Position
    from rung.checkpoint.sites import Sites
    from rung.checkpoint.weights import save_weights

__all__ = [
    "Checkpoint", "Position", "Replicator", "Rescuer", "SaveRecord", "Saver", "Sites", "checkpoints_folder", "choose",
    "is_same_topology", "memory_folder", "newest", "rescue_folder", "restore", "save_weights", "state_folders",
]  # fmt: skip

_HOMES = {
    "load": ("choose", "is_same_topology", "restore"),
    "manifest": ("Checkpoint", "newest"),
    "parts": ("Replicator", "Rescuer"),
    "places": ("checkpoints_folder", "memory_folder", "rescue_folder", "state_folders"),
    "save": ("SaveRecord", "Saver"),
    "share": ("Position",),
    "sites": ("Sites",),
    "weights": ("save_weights",),
}


def __getattr__(name: str) -> object:
    # Loaded on use: the command that lists checkpoints needs the manifest alone, and most of this needs torch.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rung.checkpoint.{home}"), name)
    raise AttributeError(f"module 'rung.checkpoint' has no attribute {name!r}")
