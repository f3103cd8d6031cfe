"""Errors of a forward on fake tensors, in words that name the line of the model."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from rung.errors import ModelError


def explain_failure(error: Exception) -> ModelError:
    """A ModelError that names the line of the model at which a forward on fake tensors failed."""
    if isinstance(error, ModelError):
        return error
    line = user_line(traceback.extract_tb(error.__traceback__))
    place = f"{line}\n" if line else ""
    kind = type(error).__name__
    if kind in ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException"):
        reason = (
            "forward branches on tensor values here, which are unknown until it runs. Strategies that trace it (tp, "
            "pp, cp, ep) need the same operations for every batch outside of the model's blocks. Rewrite the line "
            "without a branch (torch.where), move it into a block (the task names them: blocks = ...), or use a "
            "data-parallel strategy."
        )
    else:
        reason = f"forward cannot be traced on fake tensors: {describe_error(error)}"
    return ModelError(f"{place}{reason}")


def explain_assumption(error: Exception, line: str) -> ModelError:
    """A ModelError for a part that reads values at `line` and fails with whichever values the trace assumes."""
    return ModelError(
        f"{line}\nforward branches on tensor values here, which are unknown until it runs. tp, pp, cp and ep "
        "trace it as if every element were selected and every condition held, and that fails: "
        f"{describe_error(error)} Use a data-parallel strategy, or rewrite the line without a branch (torch.where)."
    )


def describe_error(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else ''}"


def user_line(stack: traceback.StackSummary) -> str:
    """The innermost line of the stack outside torch and Rung."""
    libraries = (Path(__file__).parent.parent, Path(torch.__file__).parent)
    own = [f for f in stack if not any(Path(f.filename).is_relative_to(library) for library in libraries)]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
