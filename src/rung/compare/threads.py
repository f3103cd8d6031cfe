"""A tracer that also sees the threads in which dp's replicas compute on the CPU. A mode is on in one thread alone."""

from __future__ import annotations

import threading
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from rung.runtime import LocalStep
from rung.runtime.data_parallel import DataParallelRuntime
from rung.runtime.replicas import ThreadReplicas
from rung.trace import Tracer
from rung.windows import Window


class WatchedThreads:
    """A runtime of dp, in whose steps the tracer that is on in this thread is on in those of the replicas, too."""

    def __init__(self, runtime: DataParallelRuntime) -> None:
        self._runtime = runtime

    def step(self, window: Window, *, want_norm: bool = False) -> LocalStep:
        replicas, tracer = self._runtime.replicas, _get_current_dispatch_mode()
        assert isinstance(replicas, ThreadReplicas)
        assert isinstance(tracer, Tracer)
        for model in replicas.models[1:]:
            tracer.know((p.detach() for p in model.parameters()), "parameters")
            tracer.know(model.buffers(), "buffers")
        in_turn = threading.Lock()
        open_modes = threading.local()

        def enter() -> None:
            open_modes.mode = _InTurn(tracer, in_turn)
            open_modes.mode.__enter__()

        replicas.in_each_thread(enter)
        try:
            return self._runtime.step(window, want_norm=want_norm)
        finally:
            replicas.in_each_thread(lambda: open_modes.mode.__exit__(None, None, None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class _InTurn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a thread's operations to a tracer of another. One thread at a time: a tracer counts what it has seen."""

    def __init__(self, tracer: Tracer, lock: threading.Lock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer, self._lock = tracer, lock

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self._lock:
            return self._tracer.__torch_dispatch__(func, types, args, kwargs)
