"""The threads of a process."""

from __future__ import annotations

import hashlib
import sys
import threading

import pytest

from rung.system.processes import name_process, wait_for_idle_threads


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a thread does")
def test_threads_at_work_are_waited_for_by_their_name() -> None:
    is_named, is_done, may_end = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        name_process("rung-worker")  # on Linux a name of the calling thread
        is_named.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 300_000)  # takes a while, without Python's lock
        is_done.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    is_named.wait()
    try:
        wait_for_idle_threads("rung-another", timeout=60)
        assert not is_done.is_set()
        wait_for_idle_threads("rung-worker", timeout=60)
        assert is_done.is_set()  # and it sleeps, though the thread has not ended
        assert thread.is_alive()
    finally:
        may_end.set()
        thread.join()
