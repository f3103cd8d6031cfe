"""Which layouts are worth looking at on a cluster. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rung.errors import StrategyError
from rung.planner.hardware import Cluster
from rung.strategy import Layout, natural_num_ranks, parse

_MOST_STAGES = 32


def rung_of(layout: Layout) -> int:
    """How far up the ladder a layout is: what one has to understand to run it."""
    if layout.num_ranks == 1:
        return 0
    if layout.is_composed:
        return 4 + (layout.pp > 1) + (layout.tp > 1) + (layout.num_data_ranks > 1)
    return {0: 1, 1: 2, 2: 3, 3: 4}[layout.zero] + (layout.dp_replicate > 1 and layout.dp_shard > 1)


def named_layout(text: str, cluster: Cluster, schedule: str | None = None) -> Layout:
    """The layout that a user asks for, on as many devices as its sizes say, or on all."""
    num_ranks = natural_num_ranks(text) or cluster.num_devices
    if num_ranks > cluster.num_devices:
        raise StrategyError(f"{text!r} is a layout of {num_ranks} devices, and the cluster has {cluster.num_devices}.")
    layout = parse(text, num_ranks, cluster.per_node, schedule)
    if layout.kind != "mesh":
        raise StrategyError(
            f"{text!r} cannot be planned: what it sends are calls of processes or threads, for which there is no "
            "pretend world. Run it with `rung train`."
        )
    return layout


def layouts_for(cluster: Cluster, num_blocks: int) -> Iterator[Layout]:
    """All sensible layouts of all devices, and one device by itself.

    Tensors are cut inside a machine, stages anywhere; sizes are divisors that are powers of two.
    """
    total, per_node = cluster.num_devices, cluster.per_node
    texts = ["single"]
    if total > 1:
        texts += ["ddp", "zero1", "zero2", "zero3"]
        if cluster.nodes > 1 and per_node > 1:
            texts.append(f"hsdp{cluster.nodes}x{per_node}")
        stages = [1, *(p for p in _powers(min(_MOST_STAGES, total)) if num_blocks == 0 or p <= num_blocks)]
        for pp in stages:
            for tp in (*reversed(_powers(per_node)), 1):  # what is proven of many parts holds for fewer
                left, rest = divmod(total, pp * tp)
                if rest or pp * tp == 1:
                    continue
                head = [f"pp{pp}"] if pp > 1 else []
                tail = [f"tp{tp}"] if tp > 1 else []
                data = [[]] if left == 1 else [[f"ddp{left}"], [f"zero1x{left}"], [f"zero2x{left}"], [f"fsdp{left}"]]
                if left > per_node // tp > 1 and cluster.nodes > 1 and left % (per_node // tp) == 0 and pp == 1:
                    data.append([f"hsdp{left // (per_node // tp)}x{per_node // tp}"])
                texts += [",".join([*head, *middle, *tail]) for middle in data]
    for text in texts:
        try:
            yield parse(text, 1 if text == "single" else total, per_node)
        except StrategyError:  # sizes that do not go together
            continue


def _powers(most: int) -> list[int]:
    found, size = [], 2
    while size <= most:
        found.append(size)
        size *= 2
    return found


def micro_batches_for(layout: Layout, share: int) -> list[int]:
    """Sizes of a micro-batch of one data rank that are worth trying, the quickest first.

    Without stages that is the whole share. With stages there must be enough of them to keep all stages busy.
    """
    largest = share if layout.pp == 1 else max(1, share // (4 * layout.pp))
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes
