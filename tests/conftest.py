"""What all tests share: seeds, the modules that ranks are forked with, and what the summary says."""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
from collections.abc import Generator, Iterator

import numpy as np
import pytest
import torch

from tests.harness import _PRELOADED, RETRIES, SEED
from tests.launcher import WarmLauncher, end_commands

# Ranks that others start sign with a key of the user's: not with one in the home directory of whoever runs the tests.
_HOME = tempfile.TemporaryDirectory(prefix="rung-tests-")
os.environ["XDG_CONFIG_HOME"] = _HOME.name

ROWS = pytest.StashKey[dict[str, list[bool]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Which rows of each test function are slow, before -m and -k leave any out."""
    rows = config.stash.setdefault(ROWS, {})
    for item in items:
        rows.setdefault(item.nodeid.partition("[")[0], []).append(item.get_closest_marker("slow") is not None)
    # Files of long tests first: xdist deals out whole files, and a long one at the end would let a core wait.
    items.sort(key=lambda item: item.path.stem.endswith("_ranks") or item.path.parent.name == "faults", reverse=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """transformers and torchvision take seconds to import: once, not on every rank of every test. Without those tests,
    ranks are forked without these packages, as they are for most users."""
    if any(
        item.module.__name__ == "tests.parallel.test_models_ranks"
        for item in session.items
        if isinstance(item, pytest.Function)
    ):
        multiprocessing.set_forkserver_preload([*_PRELOADED, "tests.parallel.test_models_ranks"])


def pytest_report_header() -> str:
    return f"seed: {SEED} (RUNG_TEST_SEED)"


@pytest.fixture(autouse=True)
def _seed_generators() -> None:
    """What a test draws does not depend on the tests before it. Ranks are other processes, which seed themselves."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def _launchers() -> Iterator[list[WarmLauncher]]:
    started: list[WarmLauncher] = []
    yield started
    for launcher in started:
        if launcher.alive():
            launcher.close()


@pytest.fixture
def launcher(_launchers: list[WarmLauncher], tmp_path_factory: pytest.TempPathFactory) -> WarmLauncher:
    """The same one for all tests of this process, unless one of them has ended it."""
    if not _launchers or not _launchers[-1].alive():
        _launchers.append(WarmLauncher.start(tmp_path_factory.mktemp("warm")))
    return _launchers[-1]


@pytest.fixture(autouse=True)
def _end_commands() -> Iterator[None]:
    yield
    end_commands()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report carries the harness' retries from the processes of xdist to the summary."""
    item.user_properties += [("retry", reason) for reason in RETRIES]
    RETRIES.clear()
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    retries = [
        (report.nodeid, reason)
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, reason in report.user_properties
        if name == "retry"
    ]
    terminalreporter.write_line(f"retries in the harness: {len(retries)}")
    for test, reason in retries:
        terminalreporter.write_line(f"  {test}: {reason}")
