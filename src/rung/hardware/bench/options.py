"""The options of `rung bench collectives`: sizes, types and operations in the user's notation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rung.errors import ConfigError, nearest
from rung.hardware.collective_records import OPS
from rung.hardware.machines import MachineOptions

SIZES = "1K:256M"
DTYPES = "float32,bfloat16"
KNOWN_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_STEP = 4
_LARGEST = 2**40


@dataclass(frozen=True)
class BenchOptions(MachineOptions):
    """The flags of `rung bench collectives`."""

    ops: Sequence[str] = ()
    sizes: str = SIZES
    dtypes: str = DTYPES
    reduction: str = "sum"
    seconds: float = 0.2
    out: str | None = None
    as_json: bool = False


def parse_sizes(text: str) -> list[int]:
    """Bytes: 4K,1M are two; 1K:256M is every power of four between; 1K:1M:2 every power of two."""
    found: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ConfigError(f"--sizes takes FROM:TO or FROM:TO:FACTOR, not {part!r}.")
        low, high = _parse_size(first), _parse_size(rest[0] if rest else first)
        step = int(rest[1]) if len(rest) == 2 and rest[1].isdigit() else _STEP
        if high < low or step < 2 or (len(rest) == 2 and not rest[1].isdigit()):
            raise ConfigError(f"--sizes {part}: from the smaller to the larger, by a factor of at least 2.")
        while low <= high:
            found.append(low)
            low *= step
    return sorted(set(found))


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match.group(1)) * _UNITS[match.group(2).upper()] if match else 0
    if not 0 < size <= _LARGEST:
        raise ConfigError(f"--sizes takes sizes such as 1K, 64M or 2G (powers of 1024), not {text!r}.")
    return size


def parse_dtypes(text: str) -> list[str]:
    return _known(text.replace(",", " ").split(), KNOWN_DTYPES, "dtypes")


def parse_ops(ops: Sequence[str]) -> list[str]:
    known = _known([op for text in ops for op in text.replace(",", " ").split()], OPS, "ops")
    return [op for op in OPS if op in known] or list(OPS)


def _known(words: list[str], choices: Sequence[str], flag: str) -> list[str]:
    for word in words:
        if word not in choices:
            raise ConfigError(f"--{flag} knows {', '.join(choices)}, not {word!r}.{nearest(word, choices)}")
    return list(dict.fromkeys(words))
