"""What a stack means: in which operation a rank waits for others, or what it does instead, and at which line."""

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

from rung.launch.stacks import Frame, Stand

# The functions of torch that wait for other ranks, by the file they are in: the first that fits is the operation.
_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "irecv": "recv",
    "isend": "send",
    "batch_isend_irecv": "send/recv",
    "_store_based_barrier": "init_process_group",
    "init_process_group": "init_process_group",
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
_SERVED = ("rung/rpc.py", *(f"rung/runtime/{n}.py" for n in ("parameter_server", "hybrid", "async_server", "office")))
_MAX_SOURCE = 80


@dataclass(frozen=True)
class Place:
    """Where a rank is."""

    operation: str | None  # in which it waits for other ranks, if it does
    where: str  # a line of the user's code if there is one on the way, else of Rung's
    source: str = ""
    in_loader: bool = False  # it waits for processes of its data loader

    def __str__(self) -> str:
        shown = f": {self.source}" if self.source else ""
        return f"{self.where}{shown}"


def place_of(frames: Sequence[Frame], *, is_busy: bool = False) -> Place:
    """From a stack, the innermost frame first."""
    # Of runtime/phases.py, which stands between those who wait and torch.
    waits = bool(frames) and frames[0].function == "timed_wait"
    frames = _without_polling([frame for frame in frames if frame.function != "timed_wait"])
    frame = _spoken_of(frames)
    where = f"{shorten(frame.file)}:{frame.line} in {frame.function}" if frame is not None else "an unknown place"
    source = _source(frame) if frame is not None and not _is(frame, "rung/") else ""
    in_loader = any(f.function in ("_try_get_data", "_get_data") and _is(f, "torch/utils/data") for f in frames[:12])
    operation = None if in_loader else _operation(frames, is_busy) or ("a collective" if waits else None)
    return Place(operation, where, source, in_loader)


def _without_polling(frames: list[Frame]) -> list[Frame]:
    """Over MPI the wait itself is Python, too, and what it stands in says nothing."""
    inner = [index for index, frame in enumerate(frames[:8]) if _is(frame, "rung/mpi/")]
    return frames[inner[-1] + 1 :] if inner else frames


def place_of_error(error: BaseException) -> Place:
    """Where an exception was raised."""
    found = traceback.extract_tb(error.__traceback__)
    return place_of([Frame(f.filename, f.lineno or 0, f.name) for f in reversed(found)])


@dataclass(frozen=True)
class Doing:
    """What a rank does, in words; with the operation in which it waits for others, if it does, and its line."""

    text: str
    operation: str | None = None
    where: str = ""


def describe(stand: Stand) -> Doing:
    if stand.state in ("T", "t"):
        return Doing("stopped by a signal (SIGSTOP); SIGCONT would let it go on")
    if not stand.frames:
        gone = {"X": "gone", "D": "gives no answer, in a system call that cannot be interrupted"}
        return Doing(gone.get(stand.state, "gives no answer"))
    place = place_of(stand.frames, is_busy=stand.is_busy)
    if place.in_loader:
        return Doing(_describe_loader(stand))
    if place.operation is not None:
        return Doing(f"waits in {place.operation} at {place}", place.operation, place.where)
    return Doing(f"{_manner(stand)} at {place}", None, place.where)


def _describe_loader(stand: Stand) -> str:
    told = []
    for name, worker in stand.workers:
        if any(frame.function == "_worker_loop" for frame in worker.frames):
            place = place_of(worker.frames)
            # One that waits for its next order stands in the loader's own code.
            if _spoken_of(worker.frames) is not None and not _is_idle(worker.frames):
                told.append(f"{name} is {_manner(worker)} at {place}")
        elif worker.state in ("T", "t"):
            told.append(f"{name} is stopped by a signal")
    return "waits for its data loader" + (f": {'; '.join(told)}" if told else "")


def _manner(stand: Stand) -> str:
    if stand.is_busy:
        return "busy"
    return "asleep" if stand.state == "S" else "running"


def _is_idle(frames: Sequence[Frame]) -> bool:
    """Whether a data worker has nothing to do."""
    loop = next((i for i, frame in enumerate(frames) if frame.function == "_worker_loop"), 0)
    return not any(frame.function in ("fetch", "__getitem__", "__next__") for frame in frames[:loop])


def _operation(frames: Sequence[Frame], is_busy: bool) -> str | None:
    """What the innermost frames wait in: from the inside on, as far as they are torch's."""
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
        return _DDP_REDUCES  # what others do in backward has frames of its own
    if inner and _is(inner[0], "torch/cuda"):
        return _DEVICE
    outside = next((f for f in frames if not f.file.endswith("threading.py")), None)
    return _own_wait(outside) if outside is not None else None


def _own_wait(frame: Frame) -> str | None:
    """A wait that Rung calls directly."""
    if _is(frame, "rung/world.py") and frame.function == "values":
        return _DEVICE
    if not _is(frame, "rung/") or not any(word in _source(frame) for word in (".wait(", ".wait_for(")):
        return None
    if _is(frame, *_SERVED):
        return _SERVERS if ".wait_for(" in _source(frame) else _CALLS
    if _is(frame, "rung/pulse.py"):
        return "all_gather (Rung: do all go on?)"
    return _STAGES if _is(frame, "rung/parallel/schedule.py") else "a collective"


def _spoken_of(frames: Sequence[Frame]) -> Frame | None:
    """The line to name: the innermost of the user's own; without one, of Rung's."""
    own = next((f for f in frames if not is_foreign(f)), None)
    return own or next((f for f in frames if _is(f, "rung/")), frames[0] if frames else None)


@cache
def package_folder(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return os.path.join(os.path.dirname(spec.origin), "") if spec is not None and spec.origin else None


def shorten(file: str) -> str:
    """A path as one would say it."""
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
    """What decorators put between the user's call and torch's function."""
    return frame.file.endswith(("typing_extensions.py", "contextlib.py", "warnings.py"))


def is_foreign(frame: Frame) -> bool:
    """Whether it is not the user's own code."""
    return frame.file.startswith(_others())


@cache
def _others() -> tuple[str, ...]:
    """Where code lives that is not the user's."""
    folders = [package_folder("torch"), package_folder("rung"), *site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "scripts")]
    return (*(os.path.join(folder, "") for folder in folders if folder), "<frozen", "<string>")
