"""Runs a function on ranks of this machine, each a fresh process, for benchmarks that look at more than steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rung.launch import spawn


def on_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 3600) -> list[Any]:
    """function(*args) on `size` ranks of one thread each; the results in rank order."""
    return spawn.on_ranks(function, size, *args, threads=1, timeout=timeout)
