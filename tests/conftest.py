"""What the tests share beyond fixtures: which modules the server has loaded from which ranks are forked."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.harness import _PRELOADED


def pytest_collection_finish(session: pytest.Session) -> None:
    """transformers and torchvision take seconds to import: once, not on every rank of every test. Without those tests,
    ranks are forked without these packages, as they are for most users."""
    if any(item.path.name == "test_models.py" for item in session.items):
        multiprocessing.set_forkserver_preload([*_PRELOADED, "tests.multi.test_models"])
