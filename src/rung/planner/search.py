"""Looking at layouts one after the other: what each costs with the largest micro-batch that fits, or why it cannot be.

Layouts whose parameters, gradients and optimizer state alone do not fit are left out before anything is traced, and
pipelines that cannot win after fewer stages were looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rung.config import RunConfig
from rung.errors import RungError
from rung.planner.candidates import micro_batches_for
from rung.planner.estimate import Estimate, Estimator
from rung.planner.hardware import Cluster
from rung.sizes import human_seconds
from rung.strategy import Layout

WORTH_IT = 0.05  # a gain below this is not worth a higher rung
_FAR = 0.25  # what is so much slower than the best is not made the best by twice as many stages


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot be, and why."""

    layout: Layout
    reason: str
    needs: int | None = None  # bytes of a device with which it could be


@dataclass(frozen=True)
class Found:
    """What was found of a layout: its cost with activations kept, recomputed, or both; or that it cannot be."""

    layout: Layout
    rows: tuple[Estimate, ...] = ()
    rejected: Rejected | None = None


def search(
    estimator: Estimator,
    layouts: Iterable[Layout],
    state: dict[str, int],
    note: Callable[[Found | None], float] | None = None,
    *,
    prunes: bool = True,
) -> Iterator[Found]:
    """Look at layouts in their order. `note` is told of each, and tells the seconds of the best that anybody found."""
    rows: list[Estimate] = []

    def best() -> float:
        own = min((row.time.seconds for row in rows), default=float("inf"))
        return min(own, note(None)) if note is not None else own

    for layout in layouts:
        why_not = cannot_win(layout, rows, best(), estimator.least_seconds(layout)) if prunes else None
        if why_not is not None:
            found = Found(layout, rejected=Rejected(layout, why_not))
        else:
            result = _look_at(layout, estimator, state, best if prunes else lambda: float("inf"))
            found = Found(layout, tuple(result)) if isinstance(result, list) else Found(layout, rejected=result)
        rows += found.rows
        if note is not None:
            note(found)
        yield found


def _look_at(
    layout: Layout, estimator: Estimator, state: dict[str, int], best: Callable[[], float]
) -> list[Estimate] | Rejected:
    config, cluster = estimator.config, estimator.cluster
    if layout.num_data_ranks > config.batch_size:
        return Rejected(
            layout,
            f"a batch of {config.batch_size} is less than a sample for each of {layout.num_data_ranks} data ranks",
        )
    least = least_state(layout, state)
    if least > cluster.device.memory:
        return Rejected(
            layout, f"parameters, gradients and optimizer state alone are {gib(least)} on a device", needs=least
        )
    found: list[Estimate] = []
    closest: Estimate | None = None
    modes = ("none", "full") if config.activation_checkpointing == "none" else (config.activation_checkpointing,)
    for mode in modes:
        sizes = _sizes(layout, config)
        largest = sizes[0]
        sizes = [size for size in sizes if estimator.may_fit(layout, mode, size, least)] or sizes[-1:]
        while sizes:
            try:
                estimate = estimator.estimate(layout, mode, sizes[0])
            except RungError as error:
                if mode != modes[0]:
                    break  # not every model can be computed again; what was found without that stands
                return Rejected(layout, str(error))
            if estimate.fits(cluster):
                found.append(estimate)
                break
            closest = estimate if closest is None or estimate.memory.process < closest.memory.process else closest
            sizes = _smaller(sizes, estimate, cluster)
            if _too_slow(estimator.least_seconds(layout), best()):
                break
        if found and found[-1].micro_batch == largest:
            break  # recomputing would only cost time
        if _too_slow(estimator.least_seconds(layout), best()):
            break
    if found:
        return found
    assert closest is not None
    samples = f"{closest.micro_batch} sample{'' if closest.micro_batch == 1 else 's'}"
    recomputed = " and activations recomputed" if closest.checkpointing == "full" else ""
    needs = f"needs {gib(closest.memory.process)} on a device, with {samples} at a time{recomputed}"
    seconds = estimator.least_seconds(layout)
    if _too_slow(seconds, best()):
        return Rejected(layout, f"{needs}; and {_why_slow(layout, seconds, best())}")
    return Rejected(layout, needs, needs=closest.memory.process)


def _sizes(layout: Layout, config: RunConfig) -> list[int]:
    if config.micro_batch is not None:
        return [config.micro_batch]
    return micro_batches_for(layout, max(1, config.batch_size // layout.num_data_ranks))


def _smaller(sizes: list[int], tried: Estimate, cluster: Cluster) -> list[int]:
    """The sizes that may fit: what grows with the samples is about proportional to them."""
    grows = tried.memory.of_samples
    fixed = tried.memory.process - grows
    left = [size for size in sizes[1:] if fixed + grows * size / tried.micro_batch * 0.9 <= cluster.device.memory]
    return left or sizes[-1:] if sizes[0] != sizes[-1] else []


def least_state(layout: Layout, state: dict[str, int]) -> int:
    """No rank can hold less: what `zero` says is cut among the shards, the rest among stages and tensor parts."""
    cut = layout.pp * layout.tp
    parts = {"parameters": 3, "gradients": 2, "optimizer": 1}
    return sum(
        state.get(name, 0) // (cut * (layout.dp_shard if layout.zero >= stage else 1)) for name, stage in parts.items()
    )


def cannot_win(layout: Layout, rows: list[Estimate], best: float, least: float) -> str | None:
    """Why a layout that cuts tensors or layers need not be looked at, from layouts that were.

    It is too slow if `least`, which it cannot do without, is more than the best takes. And if half as many stages were
    slower than none already, or are far from the best, more will not win.
    """
    if layout.pp == layout.tp == 1:
        return None
    if _too_slow(least, best):
        return _why_slow(layout, least, best)
    if layout.pp == 1:
        return None
    kin = {row.layout.pp: row for row in reversed(rows) if _family(row.layout) == _family(layout)}
    fewer = kin.get(layout.pp // 2)
    fewest = kin.get(layout.pp // 4) or kin.get(1)
    if fewer is not None and fewest is not None and fewer.time.seconds > fewest.time.seconds * (1 + WORTH_IT):
        return f"{fewer.layout.name} is slower than {fewest.layout.name} already"
    if fewer is not None and fewer.layout.pp > 1 and fewer.time.seconds > best * (1 + _FAR):
        return f"{fewer.layout.name} takes {human_seconds(fewer.time.seconds)}; the best takes {human_seconds(best)}"
    return None


def _too_slow(least: float, best: float) -> bool:
    return least > best * (1 + WORTH_IT)


def _why_slow(layout: Layout, least: float, best: float) -> str:
    waits = " and the filling of its stages" if layout.pp > 1 else ""
    return f"computing{waits} alone takes {human_seconds(least)}; the best takes {human_seconds(best)}"


def _family(layout: Layout) -> tuple[int, int, bool]:
    """Layouts that differ in their stages alone."""
    return layout.tp, layout.zero, layout.dp_replicate > 1 and layout.dp_shard > 1


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
