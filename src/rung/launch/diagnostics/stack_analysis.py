"""Interprets a stack: the operation in which a rank waits for others, or what it does instead, and the line."""

from __future__ import annotations

import importlib.util
import linecache
import os
import site
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rung.launch.diagnostics.stacks import Frame, ThreadStack

# torch's functions that wait for other ranks, where the operation's usual name differs.
_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "irecv": "recv",
    "isend": "send",
    "batch_isend_irecv": "send/recv",
    "_store_based_barrier": "init_process_group",
    "_new_process_group_helper": "new_group",
}
_DDP_REDUCES = "all_reduce (backward: gradients being reduced by DDP)"
_DDP_PREPARES = "broadcast (forward: DDP agrees on its buckets)"
_FSDP_GATHERS = "all_gather (FSDP: parameters of a unit)"
_FSDP_REDUCES = "reduce_scatter (FSDP: gradients of a unit)"
_STAGES = "send/recv (between stages)"
_DEVICE = "a result of its GPU"
_CALLS = "a call (RPC) to another rank"
_SERVERS = "calls (RPC) of the trainers"
_SERVED = (
    "rung/distributed/rpc.py",
    *(f"rung/runtime/parameter_server/{n}.py" for n in ("sync", "remote_modules", "async_server", "scheduler")),
)
_MAX_SOURCE = 80


@dataclass(frozen=True)
class CodeLocation:
    """The line at which a rank is, and the operation that it waits in."""

    operation: str | None  # waits for other ranks; None if it does not wait
    where: str  # the innermost line of the user's code on the stack, else of Rung's
    source: str = ""
    in_loader: bool = False  # waits for processes of its data loader

    def __str__(self) -> str:
        shown = f": {self.source}" if self.source else ""
        return f"{self.where}{shown}"


def location_of(frames: Sequence[Frame], *, is_busy: bool = False) -> CodeLocation:
    """Locate a stack, whose innermost frame comes first."""
    # A line that calls `wait` and has no Python frame below it waits in torch. `timed_wait` of runtime/phases.py, which
    # only measures the wait, may be between the two.
    waits = bool(frames) and (frames[0].function == "timed_wait" or ".wait(" in _source(frames[0]))
    frames = _without_polling([frame for frame in frames if frame.function != "timed_wait"])
    frame = _frame_to_name(frames)
    where = f"{shorten(frame.file)}:{frame.line} in {frame.function}" if frame is not None else "an unknown place"
    source = _source(frame) if frame is not None and not _is(frame, "rung/") else ""
    in_loader = any(f.function in ("_try_get_data", "_get_data") and _is(f, "torch/utils/data") for f in frames[:12])
    operation = None if in_loader else _operation(frames, is_busy) or ("a collective" if waits else None)
    return CodeLocation(operation, where, source, in_loader)


def _without_polling(frames: list[Frame]) -> list[Frame]:
    """Drop the frames of the MPI backend, which polls in Python."""
    inner = [index for index, frame in enumerate(frames[:8]) if _is(frame, "rung/distributed/mpi/")]
    return frames[inner[-1] + 1 :] if inner else frames


def location_of_error(error: BaseException) -> CodeLocation:
    found = traceback.extract_tb(error.__traceback__)
    return location_of([Frame(f.filename, f.lineno or 0, f.name) for f in reversed(found)])


@dataclass(frozen=True)
class RankActivity:
    """What a rank does, in words, with its line and the operation in which it waits for others, if any."""

    text: str
    operation: str | None = None
    where: str = ""


def describe(stack: ThreadStack) -> RankActivity:
    if stack.state in ("T", "t"):
        return RankActivity("stopped by a signal (SIGSTOP); SIGCONT would resume it")
    if not stack.frames:
        gone = {"X": "gone", "D": "does not respond, in a system call that cannot be interrupted"}
        return RankActivity(gone.get(stack.state, "does not respond"))
    location = location_of(stack.frames, is_busy=stack.is_busy)
    if location.in_loader:
        return RankActivity(_describe_loader(stack))
    if location.operation is not None:
        return RankActivity(f"waits in {location.operation} at {location}", location.operation, location.where)
    return RankActivity(f"{_process_state(stack)} at {location}", None, location.where)


def _describe_loader(stack: ThreadStack) -> str:
    workers = []
    for name, worker in stack.workers:
        if any(frame.function == "_worker_loop" for frame in worker.frames):
            if not _is_idle(worker.frames):
                workers.append(f"{name} is {_process_state(worker)} at {location_of(worker.frames)}")
        elif worker.state in ("T", "t"):
            workers.append(f"{name} is stopped by a signal")
    return "waits for its data loader" + (f": {'; '.join(workers)}" if workers else "")


def _process_state(stack: ThreadStack) -> str:
    if stack.is_busy:
        return "busy"
    return "asleep" if stack.state == "S" else "running"


def _is_idle(frames: Sequence[Frame]) -> bool:
    """Whether a data worker waits for its next batch: no frame inside its loop reads a sample."""
    loop = next((i for i, frame in enumerate(frames) if frame.function == "_worker_loop"), 0)
    return not any(frame.function in ("fetch", "__getitem__", "__next__") for frame in frames[:loop])


def _operation(frames: Sequence[Frame], is_busy: bool) -> str | None:
    """The operation that the innermost frames wait in, as far out as they are torch's."""
    inner = []
    for frame in frames:
        if not _is(frame, "torch/", "<frozen") and not _is_wrapper(frame):
            break
        inner.append(frame)
    collectives = [f.function for f in inner if _is(f, "torch/distributed/distributed_c10d.py")]
    if collectives:
        return _NAMES.get(collectives[-1], collectives[-1])
    if any(_is(f, "torch/distributed/rendezvous.py") for f in inner):
        return "init_process_group"
    for frame in inner:
        if _is(frame, "torch/distributed/pipelining"):
            return _STAGES
        if _is(frame, "torch/distributed/fsdp"):
            reduces = any(f.function in ("foreach_reduce", "post_backward", "finalize_backward") for f in inner)
            return _FSDP_REDUCES if reduces else _FSDP_GATHERS
        if _is(frame, "torch/distributed/_functional_collectives.py"):
            names = [f.function for f in inner if _is(f, "torch/distributed/_functional_collectives.py")]
            return names[-1]
    if inner and _is(inner[0], "torch/nn/parallel/distributed.py"):
        return _DDP_PREPARES
    if inner and inner[0].function == "_engine_run_backward" and not is_busy:
        return _DDP_REDUCES  # FSDP and pipelines have Python frames of their own in backward
    if inner and _is(inner[0], "torch/cuda"):
        return _DEVICE
    outside = next((f for f in frames if not f.file.endswith("threading.py")), None)
    return _own_wait(outside) if outside is not None else None


def _own_wait(frame: Frame) -> str | None:
    """The operation of a wait that Rung calls directly."""
    if _is(frame, "rung/distributed/world.py") and frame.function == "values":
        return _DEVICE
    if not _is(frame, "rung/") or not any(word in _source(frame) for word in (".wait(", ".wait_for(")):
        return None
    if _is(frame, *_SERVED):
        return _SERVERS if ".wait_for(" in _source(frame) else _CALLS
    if _is(frame, "rung/train/heartbeat.py"):
        return "all_gather (Rung: do all ranks continue?)"
    return _STAGES if _is(frame, "rung/parallel/pipeline/schedule.py") else "a collective"


def _frame_to_name(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's code; without one, of Rung's."""
    own = next((f for f in frames if not is_foreign(f)), None)
    return own or next((f for f in frames if _is(f, "rung/")), frames[0] if frames else None)


@cache
def package_folder(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return os.path.join(os.path.dirname(spec.origin), "") if spec is not None and spec.origin else None


def shorten(file: str) -> str:
    """A path relative to its package or to the working directory."""
    for name in ("rung", "torch"):
        folder = package_folder(name)
        if folder is not None and file.startswith(folder):
            return f"{name}/{file.removeprefix(folder)}"
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def _source(frame: Frame) -> str:
    line = linecache.getline(frame.file, frame.line).strip()
    return line if len(line) <= _MAX_SOURCE else f"{line[: _MAX_SOURCE - 3]}..."


def _is(frame: Frame, *parts: str) -> bool:
    return shorten(frame.file).startswith(parts)


def _is_wrapper(frame: Frame) -> bool:
    """Whether a decorator put this frame between the user's call and torch's function."""
    return frame.file.endswith(("typing_extensions.py", "contextlib.py", "warnings.py"))


def is_foreign(frame: Frame) -> bool:
    """Whether the frame is not of the user's own code."""
    return frame.file.startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    folders = [package_folder("torch"), package_folder("rung"), *site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")]
    return (*(os.path.join(folder, "") for folder in folders if folder), "<frozen", "<string>")
