"""Estimate layouts one after the other with the largest micro-batch that fits, or find the reason to reject them.

Layouts whose parameters, gradients and optimizer state alone do not fit are rejected before anything is traced, and
pipelines that cannot win are rejected by the estimates of fewer stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rung.errors import RungError
from rung.hardware.cluster import Cluster
from rung.planner.candidates import micro_batches_for
from rung.planner.estimate import Estimate, Estimator
from rung.spec.abilities import family, num_parts
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout
from rung.system.units import human_seconds

WORTH_IT = 0.05  # a smaller gain is not worth a higher rung
_FAR = 0.25  # if a pipeline is this much slower than the best, twice as many stages are not tried
_VERY_FAR = 0.5  # if a pipeline is this much slower than the best, its stages are not tried with other data parallelism


@dataclass(frozen=True)
class Rejected:
    """A rejected layout and the reason."""

    layout: Layout
    reason: str
    needs: int | None = None  # the device memory in bytes that it would need


@dataclass(frozen=True)
class SearchResult:
    """Estimates of a layout with activations kept, recomputed, or both; or its rejection."""

    layout: Layout
    rows: tuple[Estimate, ...] = ()
    rejected: Rejected | None = None


def search(
    estimator: Estimator,
    layouts: Iterable[Layout],
    state: dict[str, int],
    note: Callable[[SearchResult | None], float] | None = None,
    *,
    prunes: bool = True,
) -> Iterator[SearchResult]:
    """Estimate layouts in order. `note` takes each result and returns the seconds of the best one of all processes."""
    rows: list[Estimate] = []

    def best() -> float:
        own = min((row.time.seconds for row in rows), default=float("inf"))
        return min(own, note(None)) if note is not None else own

    for layout in layouts:
        why_not = cannot_win(layout, rows, best(), estimator.least_seconds(layout)) if prunes else None
        if why_not is not None:
            found = SearchResult(layout, rejected=Rejected(layout, why_not))
        else:
            result = _estimate_layout(layout, estimator, state, best if prunes else lambda: float("inf"))
            found = (
                SearchResult(layout, tuple(result))
                if isinstance(result, list)
                else SearchResult(layout, rejected=result)
            )
        rows += found.rows
        if note is not None:
            note(found)
        yield found


def _estimate_layout(
    layout: Layout, estimator: Estimator, state: dict[str, int], best: Callable[[], float]
) -> list[Estimate] | Rejected:
    config, cluster = estimator.config, estimator.cluster
    if layout.num_data_ranks > config.batch_size:
        return Rejected(
            layout,
            f"a batch of {config.batch_size} has less than one sample for each of {layout.num_data_ranks} data ranks",
        )
    least = least_state(layout, state) if config.offload == "none" else 0
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
                    break  # not every model can be checkpointed: keep the estimates without it
                return Rejected(layout, str(error))
            if estimate.fits(cluster):
                found.append(estimate)
                break
            closest = estimate if closest is None or estimate.memory.process < closest.memory.process else closest
            sizes = _smaller(sizes, estimate, cluster)
            if _too_slow(estimator.least_seconds(layout), best()):
                break
        if found and found[-1].micro_batch == largest:
            break  # the largest micro-batch fits, so recomputing would only cost time
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
    """The smaller sizes that may fit, assuming activations proportional to the micro-batch."""
    grows = tried.memory.of_samples
    fixed = tried.memory.process - grows
    left = [size for size in sizes[1:] if fixed + grows * size / tried.micro_batch * 0.9 <= cluster.device.memory]
    return left or sizes[-1:] if sizes[0] != sizes[-1] else []


def least_state(layout: Layout, state: dict[str, int]) -> int:
    """A lower bound of the state bytes of a rank: each kind divided by the number of its parts in this layout."""
    return sum(state.get(name, 0) // num_parts(layout, name) for name in ("parameters", "gradients", "optimizer"))


def cannot_win(layout: Layout, rows: list[Estimate], best: float, least: float) -> str | None:
    """Why a composed layout need not be estimated, by the estimates `rows` of other layouts; None if it must be.

    It cannot win if its lower bound `least` exceeds the best time, if the same layout with half as many stages is
    slower than with even fewer, or far slower than the best, or if other data parallelism between the same stages is
    very far slower.
    """
    if not layout.is_composed:
        return None
    if _too_slow(least, best):
        return _why_slow(layout, least, best)
    if layout.num_stages == 1:
        return None
    relatives = {row.layout.pp: row for row in reversed(rows) if family(row.layout) == family(layout)}
    fewer = relatives.get(layout.pp // 2)
    fewest = relatives.get(layout.pp // 4) or relatives.get(1)
    if fewer is not None and fewest is not None and fewer.time.seconds > fewest.time.seconds * (1 + WORTH_IT):
        return f"{fewer.layout.name} is slower than {fewest.layout.name} already"
    if fewer is not None and fewer.layout.num_stages > 1 and fewer.time.seconds > best * (1 + _FAR):
        return f"{fewer.layout.name} takes {human_seconds(fewer.time.seconds)}; the best takes {human_seconds(best)}"
    alike = min((row for row in rows if _is_alike(row, layout)), key=lambda row: row.time.seconds, default=None)
    if alike is not None and alike.time.seconds > best * (1 + _VERY_FAR):
        return (
            f"{alike.layout.name}, with the same stages, takes {human_seconds(alike.time.seconds)}; the best takes "
            f"{human_seconds(best)}"
        )
    return None


def _is_alike(row: Estimate, layout: Layout) -> bool:
    """Whether an estimate has the stages of a layout, and lacks no memory that another sharding would give it."""
    share = row.micro_batch * row.num_micro_batches
    is_full = row.checkpointing == "none" and row.micro_batch == micro_batches_for(row.layout, share)[0]
    return is_full and (row.layout.pp, row.layout.tp) == (layout.pp, layout.tp)


def _too_slow(least: float, best: float) -> bool:
    return least > best * (1 + WORTH_IT)


def _why_slow(layout: Layout, least: float, best: float) -> str:
    waits = " and the filling of its stages" if layout.num_stages > 1 else ""
    return f"computing{waits} alone takes {human_seconds(least)}; the best takes {human_seconds(best)}"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
