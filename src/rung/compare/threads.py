"""Traces the threads in which dp's replicas compute on the CPU: a dispatch mode is active in one thread only."""

from __future__ import annotations

import threading
from typing import Any

from rung.data.batch_shard import LocalBatch
from rung.distributed.torch_private import TorchDispatchMode, current_dispatch_mode
from rung.planner.tracer import Tracer
from rung.runtime import LocalStep, Runtime
from rung.runtime.base import ReplicaThreads


class TracedThreads:
    """Wraps a runtime of dp; in its steps, this thread's tracer is also active in the threads of the replicas."""

    def __init__(self, runtime: Runtime, threads: ReplicaThreads) -> None:
        self._runtime, self._threads = runtime, threads

    def step(self, window: LocalBatch, *, want_norm: bool = False) -> LocalStep:
        threads, tracer = self._threads, current_dispatch_mode()
        assert isinstance(tracer, Tracer)
        for model in threads.models[1:]:
            tracer.memory.classify((p.detach() for p in model.parameters()), "parameters")
            tracer.memory.classify(model.buffers(), "buffers")
        lock = threading.Lock()
        open_modes = threading.local()

        def enter() -> None:
            open_modes.mode = _SharedTracer(tracer, lock)
            open_modes.mode.__enter__()

        threads.in_each_thread(enter)
        try:
            return self._runtime.step(window, want_norm=want_norm)
        finally:
            threads.in_each_thread(lambda: open_modes.mode.__exit__(None, None, None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class _SharedTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes a thread's operations to another thread's tracer, under a lock: a tracer keeps counts."""

    def __init__(self, tracer: Tracer, lock: threading.Lock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer, self._lock = tracer, lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._lock:
            return self._tracer.__torch_dispatch__(func, types, args, kwargs)
