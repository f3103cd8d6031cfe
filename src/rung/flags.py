"""Flags that are settings: the same names, helps and limits in every command that has them. Imports no torch."""

from __future__ import annotations

import argparse

from rung.config import SETTINGS
from rung.errors import ConfigError

# Where each flag of `rung train` stands in its help.
TRAINED = {
    "where": (
        "strategy", "nproc", "nnodes", "rdzv", "rdzv_key", "backend", "schedule", "split", "sequence_parallel",
        "offload", "shard_by", "servers", "staleness", "compress", "local_steps", "outer",
    ),
    "how much": ("batch_size", "micro_batch", "steps", "epochs", "seed", "shuffle"),
    "how": ("precision", "clip", "compile", "activation_checkpointing"),
    "run": ("checkpoint_every", "keep", "replicate_state", "max_restarts", "timeout", "out", "profile", "log"),
}  # fmt: skip
# Where a flag's kind or its choices do not say enough, or too much for one line.
_METAVARS = {
    "strategy": "NAME", "out": "DIR", "shard_by": "HOW", "split": "NAMES", "schedule": "NAME", "precision": "NAME",
    "activation_checkpointing": "HOW", "nproc": "N", "nnodes": "N", "rdzv": "HOST:PORT", "rdzv_key": "FILE",
    "compress": "HOW", "backend": "NAME", "outer": "HOW", "profile": "STEPS", "log": "NAMES",
}  # fmt: skip


def add_settings(parser: argparse.ArgumentParser, groups: dict[str, tuple[str, ...]], **helps: str) -> None:
    """Flags for settings, with their own help unless `helps` has another."""
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            meta = SETTINGS[name].metadata
            flag = "--" + name.replace("_", "-")
            told = helps.get(name, meta["help"])
            if meta["kind"] is bool:
                actions = argparse.BooleanOptionalAction if name == "shuffle" else "store_true"
                group.add_argument(flag, dest=name, action=actions, default=None, help=told)
            else:
                metavar = "|".join(meta["choices"]) or {int: "N", float: "X", str: "S"}[meta["kind"]]
                metavar = _METAVARS.get(name, metavar)
                group.add_argument(flag, dest=name, metavar=metavar, default=None, help=told)
    group = parser._action_groups[-1]
    group.add_argument("--config", metavar="FILE.toml", help="settings from a file; flags win over it")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the task (model.depth=8) or any other setting",
    )


def assignments_of(pairs: list[str]) -> dict[str, str]:
    """The pairs of --set by their keys."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, not {pair!r}.")
        if key in found:
            raise ConfigError(f"{key} is set twice.")
        found[key.strip()] = value.strip()
    return found
