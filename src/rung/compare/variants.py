"""What is compared: strategies by name, each with settings of its own where it has some. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rung.agreement import refuse_contradictions, without_use
from rung.config import SETTINGS, RunConfig, check
from rung.errors import ConfigError, RungError, nearest
from rung.exchange import OF_DDP
from rung.strategy import Layout, natural_num_ranks, parse

REFERENCE = "single"
# What makes the job the same under each strategy, and what is asked for once for all.
_COMMON = (
    "strategy", "nproc", "nnodes", "rdzv", "batch_size", "steps", "epochs", "seed", "shuffle", "out", "device",
    "eval_every", "save_weights", "timeout",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One row: a strategy with its settings, or why it cannot be."""

    text: str
    strategy: str
    num_ranks: int
    config: RunConfig
    layout: Layout | None = None
    refused: str | None = None


def choose_variants(texts: Sequence[str], num_ranks: int, config: RunConfig) -> list[Variant]:
    """The rows in the order asked for; one process, which all are held against, is put first where it is not named."""
    words = [" ".join(text.split()) for text in texts if text.strip()]
    if not words:
        raise ConfigError("no strategy to compare. Name some, as in --strategies single ddp fsdp.")
    if REFERENCE not in words:
        words = [REFERENCE, *words]
    return [make_variant(text, num_ranks, config) for text in dict.fromkeys(words)]


def make_variant(text: str, num_ranks: int, config: RunConfig) -> Variant:
    """From 'zero3' or 'ddp precision=bf16'. A word that means nothing is an error; a layout that cannot be is a row."""
    strategy, *pairs = text.split()
    own = _own_settings(text, pairs)
    if strategy == "dp":
        strategy = f"dp{num_ranks}"
    size = natural_num_ranks(strategy) or num_ranks
    try:
        schedule = own.get("schedule") or (None if ":" in strategy else config.schedule)
        layout = parse(strategy, size, schedule=schedule, servers=own.get("servers", config.servers))
        given: dict[str, Any] = {"schedule": schedule if layout.pp > 1 else None, **own}
        fitted = replace(_fitted(config, layout), strategy=strategy, nproc=str(size), **given)
        refuse_contradictions(fitted, layout)
    except RungError as error:
        return Variant(text, strategy, size, config, refused=str(error))
    return Variant(text, strategy, size, fitted, layout)


def _own_settings(text: str, pairs: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(
                f"--strategies {text!r}: after the strategy come settings as KEY=VALUE, not {pair!r}. Put a strategy "
                "and its settings into one pair of quotes."
            )
        if key in _COMMON:
            raise ConfigError(f"--strategies {text!r}: {key} is the same for all that is compared. Give it as a flag.")
        if key not in SETTINGS:
            raise ConfigError(f"--strategies {text!r}: there is no setting {key!r}.{nearest(key, SETTINGS)}")
        found[key] = check(key, value)
    return found


def _fitted(config: RunConfig, layout: Layout) -> RunConfig:
    """Settings for all, without those that mean nothing to a layout. What a row names itself is taken as it is."""
    useless = without_use(layout) | (set(OF_DDP) if layout.name != "ddp" else set())
    defaults: dict[str, Any] = {key: SETTINGS[key].default for key in useless}
    return replace(config, **defaults)
