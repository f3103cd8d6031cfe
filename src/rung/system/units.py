"""Human-readable bytes and seconds."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """In powers of two, as for memory."""
    return _scaled(count, 1024, ["B", "KiB", "MiB", "GiB", "TiB"])


def human_size(count: float) -> str:
    """Decimal, as for files and --max-shard-size."""
    return _scaled(count, 1000, ["B", "KB", "MB", "GB", "TB"])


def _scaled(count: float, base: int, units: list[str]) -> str:
    size = float(count)
    while size >= 999.5 and len(units) > 1:
        size /= base
        units = units[1:]
    return f"{size:.3g} {units[0]}"


def human_seconds(seconds: float) -> str:
    """With three digits, from microseconds upwards."""
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def plural(count: int, word: str) -> str:
    """A number of things: '1 batch', '2 batches', '3 ranks'."""
    ending = "" if count == 1 else "es" if word.endswith(("ch", "s")) else "s"
    return f"{count:,} {word}{ending}"
