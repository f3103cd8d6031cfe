"""Rung: one plain PyTorch task, every way of spreading it."""

import importlib
import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rung.errors import RungError
from rung.spec.task import Task, load_task
from rung.spec.version import VERSION

if TYPE_CHECKING:
    from rung.program import compare, train

__version__ = VERSION
__all__ = [
    "CompareResult", "RungError", "Session", "StepStats", "Task", "TrainResult", "__version__", "compare", "load_task",
    "open_session", "train",
]  # fmt: skip
_COMMANDS = ("train", "compare")  # packages of Rung, and functions for programs


def __getattr__(name: str) -> object:
    if name in ("Session", "StepStats", "open_session"):
        # Loaded on use: `import rung` must stay quick for the command line, and a session needs torch.
        from rung.train import session

        return getattr(session, name)
    if name in ("CompareResult", "TrainResult"):
        from rung import program  # which imports this package

        return getattr(program, name)
    if name in _COMMANDS:
        return importlib.import_module(f"rung.{name}")
    raise AttributeError(f"module 'rung' has no attribute {name!r}")


class _Command(ModuleType):
    """The package `rung.train` or `rung.compare`, which can be called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Any:
        from rung import program  # which imports this package

        return getattr(program, self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> Any:
        return inspect.signature(self._function)


class _Rung(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # The import of a package sets it here, in the place of a function of that name: so the package is made both.
        if name in _COMMANDS and isinstance(value, ModuleType):
            value.__class__ = _Command
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Rung
