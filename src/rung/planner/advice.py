"""What would make a job fit that does not, or one quicker that does. Each change is tried by the dry run that plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rung.errors import RungError
from rung.hardware.cluster import Cluster, links
from rung.planner.estimate import Estimate, Estimator
from rung.planner.search import WORTH_IT, search
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse

_MOST_DEVICES = 1024
_PER_NODE = 8  # devices of a machine, once one machine of the cluster does not suffice
_STAGES_OF_ZERO = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Change:
    """A change of the job, and what a step would then cost. `seconds` is None if it does not fit, either."""

    what: str  # flags, or words
    needs: int  # bytes of the fullest device
    seconds: float | None
    times_quicker: float | None = None  # than the recommended layout, if there is one


@dataclass(frozen=True)
class _Attempt:
    what: str
    layout: Layout
    config: RunConfig
    cluster: Cluster


def to_fit(
    layouts: Sequence[Layout], estimator: Estimator, state: dict[str, int], progress: Callable[[str], None]
) -> list[Change]:
    """Changes for layouts that do not fit, the cheapest first, up to one that fits without the host's memory.

    Smaller micro-batches and recomputed activations come first; a search has tried them already unless the user has
    set a micro-batch. Then come shards of the state on the same devices, the state in the host's memory, and more
    devices.
    """
    found: list[Change] = []
    for attempt in _attempts_to_fit(layouts, estimator.config, estimator.cluster):
        change = _try(attempt, estimator, state, progress)
        if change is not None:
            found.append(change)
            if change.seconds is not None and attempt.config.offload == estimator.config.offload:
                break  # offloading is slow: what else fits is told beside it
    return found


def to_quicken(
    chosen: Estimate, estimator: Estimator, state: dict[str, int], progress: Callable[[str], None]
) -> list[Change]:
    """Changes that make the chosen layout quicker by more than 5 %, the quickest first."""
    config, cluster, layout = estimator.config, estimator.cluster, chosen.layout
    attempts = []
    if cluster.device.kind == "cuda" and config.precision == "fp32":
        attempts.append(_Attempt("--precision bf16", layout, replace(config, precision="bf16"), cluster))
        attempts.append(
            _Attempt('torch.set_float32_matmul_precision("high") in the task', layout, config, cluster.with_tf32())
        )
    if config.micro_batch is not None and chosen.num_micro_batches > 1:
        attempts.append(_Attempt("", layout, replace(config, micro_batch=None), cluster))
    found = []
    for attempt in attempts:
        change = _try(attempt, estimator, state, progress)
        if change is None or change.seconds is None:
            continue
        gain = chosen.time.seconds / change.seconds
        if gain >= 1 + WORTH_IT:
            found.append(replace(change, times_quicker=gain))
    return sorted(found, key=lambda change: change.seconds or 0.0)


def _attempts_to_fit(layouts: Sequence[Layout], config: RunConfig, cluster: Cluster) -> Iterator[_Attempt]:
    free = replace(config, micro_batch=None)
    if config.micro_batch is not None:
        for layout in layouts[:1]:
            yield _Attempt("", layout, free, cluster)
    total = cluster.num_devices
    if total > 1:
        names = {layout.name for layout in layouts}
        for name in _STAGES_OF_ZERO:
            if name not in names:
                yield _Attempt(f"--strategy {name}", parse(name, total, cluster.per_node), free, cluster)
    if cluster.device.kind == "cuda" and config.offload == "none":
        offloaded = replace(free, offload="cpu")
        yield _Attempt("--strategy zero3 --offload cpu", parse("zero3", total, cluster.per_node), offloaded, cluster)
    while 2 * total <= min(_MOST_DEVICES, config.batch_size) and cluster.device.kind == "cuda":
        total *= 2
        larger = _with_devices(cluster, total)
        what = f"--strategy zero3 on {total} x {cluster.device.name}"
        yield _Attempt(what, parse("zero3", total, larger.per_node), free, larger)


def _with_devices(cluster: Cluster, total: int) -> Cluster:
    per_node = cluster.per_node if cluster.nodes > 1 else min(total, max(_PER_NODE, cluster.per_node))
    nodes = total // per_node
    between = (cluster.between or links()["infiniband"]) if nodes > 1 else None
    return replace(cluster, nodes=nodes, per_node=per_node, between=between)


def _try(
    attempt: _Attempt, estimator: Estimator, state: dict[str, int], progress: Callable[[str], None]
) -> Change | None:
    progress(attempt.what or "another micro-batch")
    other = Estimator(estimator.task, attempt.config, attempt.cluster, estimator.num_blocks)
    try:
        (found,) = search(other, [attempt.layout], state, prunes=False)
    except RungError:
        return None
    if not found.rows:
        needs = found.rejected.needs if found.rejected is not None else None
        return Change(attempt.what, needs, None) if needs is not None else None
    row = min(found.rows, key=lambda row: row.time.seconds)
    flags = [attempt.what] if attempt.what else []
    if (row.num_micro_batches > 1 and row.micro_batch != estimator.config.micro_batch) or not attempt.what:
        flags.append(f"--micro-batch {row.micro_batch}")
    if row.checkpointing != estimator.config.activation_checkpointing:
        flags.append(f"--activation-checkpointing {row.checkpointing}")
    return Change(" ".join(flags), row.memory.process, row.time.seconds)
