"""Settings of gradient synchronization under ddp: `--compress`, `--local-steps`, `--outer`.

Imports no torch: contradictions are refused before a process starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rung.errors import ConfigError, nearest

METHODS = ("none", "fp16", "bf16", "powersgd", "topk", "onebit", "ternary")
_ARGUMENTS = {"powersgd": "rank", "topk": "ratio"}
_EXAMPLES = {"powersgd": "powersgd:4", "topk": "topk:0.01"}


@dataclass(frozen=True)
class Compression:
    """A method of compression and its parameter."""

    method: str
    rank: int = 4  # powersgd: of the low-rank factors of a gradient
    ratio: float = 0.01  # topk: the fraction of values that is sent


def parse_compression(text: str) -> Compression:
    """Parse 'none', 'fp16', 'bf16', 'powersgd[:rank]', 'topk[:ratio]', 'onebit' or 'ternary'."""
    method, colon, number = text.partition(":")
    if method not in METHODS:
        raise ConfigError(
            f"compress cannot be {text!r}.{nearest(method, METHODS)} It is one of: "
            f"{', '.join(f'{m}[:{_ARGUMENTS[m]}]' if m in _ARGUMENTS else m for m in METHODS)}."
        )
    if not colon:
        return Compression(method)
    if method not in _ARGUMENTS:
        raise ConfigError(
            f"compress cannot be {text!r}: {method} takes no number. Use {method}, or one of "
            f"{' and '.join(_EXAMPLES.values())}."
        )
    if method == "powersgd":
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(
                f"compress cannot be {text!r}: the rank of powersgd is a whole number of at least 1, such as "
                f"{_EXAMPLES[method]}."
            )
        return Compression(method, rank=int(number))
    try:
        ratio = float(number)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"compress cannot be {text!r}: the ratio of topk is the fraction of values that is sent, above 0 and at "
            f"most 1, such as {_EXAMPLES[method]}."
        )
    return Compression(method, ratio=ratio)


class SyncSettings(Protocol):
    """The settings of a run that concern gradient synchronization."""

    @property
    def backend(self) -> str: ...
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


def validate_gradient_sync(config: SyncSettings) -> None:
    """Refuse settings of gradient synchronization that contradict each other."""
    if config.outer != "average" and config.local_steps == 1:
        raise ConfigError(f"--outer {config.outer} needs --local-steps H: it combines the weights after every H steps.")
    for name, usual in (("outer_lr", 0.7), ("outer_momentum", 0.9)):
        if getattr(config, name) != usual and config.outer != "diloco":
            raise ConfigError(f"{name}={getattr(config, name)} is for --outer diloco, and --outer is {config.outer}.")
    if config.compress != "none" and config.local_steps > 1:
        raise ConfigError(
            f"--compress {config.compress} is for gradients that are synchronized in every step, and --local-steps "
            f"{config.local_steps} synchronizes none. Leave one of them out."
        )
    method = parse_compression(config.compress).method
    if config.topk_values != "auto" and method != "topk":
        raise ConfigError(f"topk_values={config.topk_values} needs --compress topk.")
    if config.compress_warmup is not None and method not in ("topk", "powersgd"):
        raise ConfigError(f"compress_warmup={config.compress_warmup} is for --compress topk and powersgd.")
    if config.backend == "mpi" and method in ("fp16", "bf16"):
        raise ConfigError(
            f"--compress {config.compress} saves nothing over MPI, which cannot sum 16-bit floats: they would be sent "
            "as fp32. Use another compression, or --backend gloo."
        )
