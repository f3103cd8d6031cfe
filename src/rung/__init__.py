"""Rung: one plain PyTorch task, every way of spreading it."""

from rung.errors import RungError
from rung.task import Task, load_task
from rung.version import VERSION

__version__ = VERSION
__all__ = ["RungError", "Session", "StepStats", "Task", "__version__", "load_task", "open_session"]


def __getattr__(name: str) -> object:
    # Loaded on use: `import rung` must stay quick for the command line, and these need torch.
    if name in ("Session", "StepStats", "open_session"):
        from rung import session

        return getattr(session, name)
    raise AttributeError(f"module 'rung' has no attribute {name!r}")
