"""What other programs take of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from rung.system.load import ProcessorTime, other_cores, processor_time

CORES = os.cpu_count() or 1


def _after(machine: float, own: float) -> tuple[ProcessorTime, ProcessorTime]:
    """Two readings ten seconds apart, with this many cores in use between them."""
    return ProcessorTime(5.0, 100.0, 20.0), ProcessorTime(15.0, 100.0 + 10 * machine, 20.0 + 10 * own)


@pytest.mark.parametrize(
    ("machine", "own", "others"),
    [
        (CORES, CORES / 2, CORES / 2),
        (CORES, 0.97 * CORES, 0.0),  # what any machine does beside
        (0.7 * CORES, 0.2 * CORES, 0.0),  # busy, but with cores left over
    ],
)
def test_others_count_where_no_core_is_left(machine: float, own: float, others: float) -> None:
    assert other_cores(*_after(machine, own)) == pytest.approx(others)


def test_without_readings_nothing_is_known() -> None:
    assert other_cores(None, ProcessorTime(0.0, 0.0, 0.0)) is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_children_count_as_own_also_when_they_have_ended() -> None:
    before = processor_time()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    after = processor_time()
    assert before is not None and after is not None
    assert after.own - before.own >= 0.25
    assert after.machine - before.machine >= 0.25
    assert after.at > before.at


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_program_beside_this_one_is_not_its_own() -> None:
    # The shell ends at once, so that its child belongs to the first process of the machine and not to this one.
    code = "import time\nwhile time.process_time() < 0.5: pass"
    before = processor_time()
    subprocess.run(["sh", "-c", f"{sys.executable} -c '{code}' > /dev/null 2>&1 &"], check=True)
    end = time.monotonic() + 60
    while (after := processor_time()) and before and after.machine - before.machine < 0.4 and time.monotonic() < end:
        time.sleep(0.05)
    assert before is not None and after is not None
    assert after.machine - before.machine >= 0.4
    assert after.own - before.own < 0.3
