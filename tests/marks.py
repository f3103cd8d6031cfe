"""How a test names the rows that `make test` leaves to `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """One more row of a behaviour of which `make test` runs another row."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


def slow_if(condition: bool, *values: Any) -> Any:
    return slow(*values) if condition else pytest.param(*values)
