"""Figures that a task logs itself, `log(name, value, reduce="mean")`: their names, and how ranks reduce them."""

from __future__ import annotations

from rung.errors import TaskError, nearest

REDUCTIONS = ("mean", "sum", "max")
# Figures that lines of metrics.jsonl have already.
TAKEN = (
    "step", "epoch", "samples", "loss", "grad_norm", "lr", "lrs", "step_seconds", "samples_per_second",
    "data_wait_seconds", "slowest_reader", "peak_memory_bytes", "event", "staleness", "logged", "compile_seconds",
    "graph_breaks", "experts",
)  # fmt: skip


def check_figure(name: object, reduce: object, where: str) -> None:
    """Refuse a name or a reduction that cannot be. `where` is the function that logs, for the error."""
    if not isinstance(name, str) or not name:
        raise TaskError(f"{where}: log(name, value) takes the name of a figure first, not {name!r:.60}.")
    if name in TAKEN:
        raise TaskError(f"{where}: log({name!r}, ...): every step has a figure of this name already. Rename it.")
    if reduce not in REDUCTIONS:
        suggestion = nearest(str(reduce), REDUCTIONS)
        raise TaskError(
            f"{where}: log({name!r}, ..., reduce={reduce!r:.60}): there is no such reduction.{suggestion} "
            f"It is one of: {', '.join(REDUCTIONS)}."
        )
