"""How the ranks of ddp come to the same weights, as the settings say it: `--compress`, `--local-steps`, `--outer`.

Imports no torch: what is impossible is refused before a process starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rung.errors import ConfigError, nearest
from rung.strategy import Layout

METHODS = ("none", "fp16", "bf16", "powersgd", "topk", "onebit", "ternary")
# The settings of this, which mean nothing to other strategies.
OF_DDP = ("compress", "compress_warmup", "topk_values", "local_steps", "outer", "outer_lr", "outer_momentum")
_TAKES = {"powersgd": "rank", "topk": "ratio"}
_EXAMPLES = {"powersgd": "powersgd:4", "topk": "topk:0.01"}


@dataclass(frozen=True)
class Compression:
    """A method, with the one number that some of them take."""

    method: str
    rank: int = 4  # powersgd: of the matrices that stand for a gradient
    ratio: float = 0.01  # topk: the part of all values that is sent

    @property
    def keeps_errors(self) -> bool:
        """Whether what a message leaves out is kept for later ones, so that ranks have a state of their own."""
        return self.method in ("powersgd", "topk", "onebit")


def parse_compression(text: str) -> Compression:
    """'none', 'fp16', 'bf16', 'powersgd[:rank]', 'topk[:ratio]', 'onebit' or 'ternary'."""
    method, colon, number = text.partition(":")
    if method not in METHODS:
        raise ConfigError(
            f"compress cannot be {text!r}.{nearest(method, METHODS)} It is one of: "
            f"{', '.join(f'{m}[:{_TAKES[m]}]' if m in _TAKES else m for m in METHODS)}."
        )
    if not colon:
        return Compression(method)
    if method not in _TAKES:
        raise ConfigError(
            f"compress cannot be {text!r}: {method} takes no number. Use {method}, or one of "
            f"{' and '.join(_EXAMPLES.values())}."
        )
    if method == "powersgd":
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"compress cannot be {text!r}: the rank of powersgd is a whole number from 1 on, such as "
                f"{_EXAMPLES[method]}."
            )
        return Compression(method, rank=int(number))
    try:
        ratio = float(number)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"compress cannot be {text!r}: the ratio of topk is the part of all values that is sent, above 0 and at "
            f"most 1, such as {_EXAMPLES[method]}."
        )
    return Compression(method, ratio=ratio)


class Settings(Protocol):
    """Those of a run that this is about."""

    @property
    def compress(self) -> str: ...
    @property
    def topk_values(self) -> str: ...
    @property
    def compress_warmup(self) -> int | None: ...
    @property
    def local_steps(self) -> int: ...
    @property
    def outer(self) -> str: ...
    @property
    def outer_lr(self) -> float: ...
    @property
    def outer_momentum(self) -> float: ...


def refuse_exchange(config: Settings, layout: Layout) -> None:
    """What contradicts the strategy, or each other."""
    for flag, asks in (
        (f"--compress {config.compress}", config.compress != "none"),
        (f"--local-steps {config.local_steps}", config.local_steps > 1),
    ):
        if asks and layout.name == "single":
            raise ConfigError(
                f"{flag}: one process exchanges nothing. Use --nproc 2 or more, with ddp, or leave it out."
            )
        if asks and layout.name != "ddp":
            raise ConfigError(
                f"{flag} is about how ddp exchanges gradients; {layout.name} does so in another way. "
                "Use --strategy ddp, or leave it out."
            )
    if config.outer != "average" and config.local_steps == 1:
        raise ConfigError(f"--outer {config.outer} needs --local-steps H: it is about what happens after H steps.")
    for name, usual in (("outer_lr", 0.7), ("outer_momentum", 0.9)):
        if getattr(config, name) != usual and config.outer != "diloco":
            raise ConfigError(f"{name}={getattr(config, name)} is for --outer diloco, which is not asked for.")
    if config.compress != "none" and config.local_steps > 1:
        raise ConfigError(
            f"--compress {config.compress} is for gradients that are exchanged in every step, and with --local-steps "
            f"{config.local_steps} none are. Leave one of them out."
        )
    method = parse_compression(config.compress).method
    if config.topk_values != "auto" and method != "topk":
        raise ConfigError(f"topk_values={config.topk_values} needs --compress topk.")
    if config.compress_warmup is not None and method not in ("topk", "powersgd"):
        raise ConfigError(f"compress_warmup={config.compress_warmup} is for --compress topk and powersgd.")
