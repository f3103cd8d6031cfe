"""Command-line flags of settings, with the same names and help in every command. Imports no torch."""

from __future__ import annotations

import argparse

from rung.errors import ConfigError
from rung.spec.config import SETTINGS

# The groups of flags in the help of `rung train`.
TRAIN_FLAGS = {
    "where": (
        "strategy", "nproc", "nnodes", "rdzv", "rdzv_key", "backend", "schedule", "split", "sequence_parallel",
        "cp_form", "offload", "shard_by", "servers", "staleness", "compress", "local_steps", "outer",
    ),
    "how much": (
        "batch_size", "batch_tokens", "micro_batch", "steps", "epochs", "init", "init_partial", "lora", "seed",
        "shuffle", "skip_bad_samples",
    ),
    "how": ("precision", "clip", "ema", "swa_start", "compile", "activation_checkpointing"),
    "run": (
        "checkpoint_every", "keep", "patience", "replicate_state", "max_restarts", "check", "timeout", "out",
        "profile", "log",
    ),
}  # fmt: skip
# For flags whose type says too little, or whose choices are too long for one line.
_METAVARS = {
    "strategy": "NAME", "out": "DIR", "shard_by": "HOW", "split": "NAMES", "schedule": "NAME", "precision": "NAME",
    "activation_checkpointing": "HOW", "nproc": "N", "nnodes": "N", "rdzv": "HOST:PORT", "rdzv_key": "FILE",
    "compress": "HOW", "backend": "NAME", "outer": "HOW", "profile": "STEPS", "log": "NAMES",
    "init": "PATH", "lora": "HOW", "cp_form": "HOW",
}  # fmt: skip


def add_settings(parser: argparse.ArgumentParser, groups: dict[str, tuple[str, ...]], **helps: str) -> None:
    """Add flags for settings. `helps` overrides the settings' own help."""
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            meta = SETTINGS[name].metadata
            flag = "--" + name.replace("_", "-")
            text = helps.get(name, meta["help"])
            if meta["kind"] is bool:
                actions = argparse.BooleanOptionalAction if name in ("shuffle", "check") else "store_true"
                group.add_argument(flag, dest=name, action=actions, default=None, help=text)
            else:
                metavar = "|".join(meta["choices"]) or {int: "N", float: "X", str: "S"}[meta["kind"]]
                metavar = _METAVARS.get(name, metavar)
                group.add_argument(flag, dest=name, metavar=metavar, default=None, help=text)
    group = parser._action_groups[-1]
    group.add_argument("--config", metavar="FILE.toml", help="settings from a file; flags override it")
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
