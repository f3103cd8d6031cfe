"""Rung: one plain PyTorch task, every way of spreading it."""

from rung.errors import RungError
from rung.task import Task
from rung.version import VERSION

__version__ = VERSION
__all__ = ["RungError", "Session", "Task", "__version__", "open_session"]


def __getattr__(name: str) -> object:
    # Loaded on use: `import rung` must stay quick for the command line, and these need torch.
    if name in ("Session", "open_session"):
        from rung import session

        return getattr(session, name)
    raise AttributeError(f"module 'rung' has no attribute {name!r}")
