"""Rung: one plain PyTorch task, every way of spreading it."""

from rung.errors import RungError
from rung.spec.task import Task, load_task
from rung.spec.version import VERSION

__version__ = VERSION
__all__ = ["RungError", "Session", "StepStats", "Task", "__version__", "load_task", "open_session"]


def __getattr__(name: str) -> object:
    if name in ("Session", "StepStats", "open_session"):
        # Loaded on use: `import rung` must stay quick for the command line, and these need torch.
        from rung.train import session

        return getattr(session, name)
    raise AttributeError(f"module 'rung' has no attribute {name!r}")
