"""The variants to compare: strategies by name, each with optional settings of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rung.errors import ConfigError, RungError, nearest
from rung.spec.abilities import with_devices
from rung.spec.compatibility import fit_settings, validate_config
from rung.spec.config import SETTINGS, RunConfig, check
from rung.spec.strategy import Layout, parse, required_num_ranks

REFERENCE = "single"
# Settings that must be equal for all variants: they define the job, or belong to the whole comparison.
_COMMON = (
    "strategy", "nproc", "nnodes", "rdzv", "batch_size", "steps", "epochs", "seed", "shuffle", "out", "device",
    "eval_every", "save_weights", "timeout",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One row: a strategy with its settings, or the reason why it cannot run."""

    text: str
    strategy: str
    num_ranks: int
    config: RunConfig
    layout: Layout | None = None
    refused: str | None = None


def choose_variants(texts: Sequence[str], num_ranks: int, config: RunConfig) -> list[Variant]:
    """The variants in the order given. The reference, one process, comes first if it is not named."""
    names = [" ".join(text.split()) for text in texts if text.strip()]
    if not names:
        raise ConfigError("no strategy to compare. Name some, as in --strategies single ddp fsdp.")
    if REFERENCE not in names:
        names = [REFERENCE, *names]
    return [make_variant(text, num_ranks, config) for text in dict.fromkeys(names)]


def make_variant(text: str, num_ranks: int, config: RunConfig) -> Variant:
    """Parse 'zero3' or 'ddp precision=bf16'. An unknown word raises; an impossible layout becomes a refused variant."""
    strategy, *pairs = text.split()
    own = _own_settings(text, pairs)
    strategy = with_devices(strategy, num_ranks)
    size = required_num_ranks(strategy) or num_ranks
    try:
        # A schedule in the name, as in pp2:zb, takes precedence over the common one.
        schedule = own.get("schedule") or (None if ":" in strategy else config.schedule)
        layout = parse(strategy, size, schedule=schedule, servers=own.get("servers", config.servers))
        # Drop common settings that this layout cannot use. The variant's own settings stay, and may be refused.
        fitted = fit_settings(replace(config, schedule=schedule), layout)
        fitted = replace(fitted, strategy=strategy, nproc=str(size), **own)
        validate_config(fitted, layout)
    except RungError as error:
        return Variant(text, strategy, size, config, refused=str(error))
    return Variant(text, strategy, size, fitted, layout)


def _own_settings(text: str, pairs: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                f"--strategies {text!r}: settings after the strategy have the form KEY=VALUE, not {pair!r}. Put a "
                "strategy and its settings into one pair of quotes."
            )
        if key in _COMMON:
            raise ConfigError(f"--strategies {text!r}: {key} must be the same for all variants. Give it as a flag.")
        if key not in SETTINGS:
            raise ConfigError(f"--strategies {text!r}: there is no setting {key!r}.{nearest(key, SETTINGS)}")
        found[key] = check(key, value)
    return found
