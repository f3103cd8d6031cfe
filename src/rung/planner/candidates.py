"""List the layouts that a plan for a cluster considers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rung.errors import StrategyError
from rung.hardware.cluster import Cluster
from rung.spec.abilities import why_not
from rung.spec.presets import tried
from rung.spec.strategy import Layout, parse, required_num_ranks, with_size

_MOST_STAGES = 32


def named_layout(text: str, cluster: Cluster, schedule: str | None = None) -> Layout:
    """The layout that the user names, on the number of devices that its sizes give, or on all devices."""
    num_ranks = required_num_ranks(text) or cluster.num_devices
    if num_ranks > cluster.num_devices:
        raise StrategyError(f"{text!r} needs {num_ranks} devices, but the cluster has {cluster.num_devices}.")
    layout = parse(text, num_ranks, cluster.per_node, schedule)
    reason = why_not(layout, "plan")
    if reason is not None:
        raise StrategyError(reason)
    return layout


def layouts_for(cluster: Cluster, num_blocks: int, batch_size: int, num_experts: int = 0) -> Iterator[Layout]:
    """The candidate layouts of all devices, and a single device.

    Tensor, context and expert parallelism stay inside a machine, stages may cross machines; sizes are powers of two
    that divide. Sequences are cut where there is no more than one for each device.
    """
    total, per_node = cluster.num_devices, cluster.per_node
    texts = ["single"]
    if total > 1:
        texts += tried("alone")
        if cluster.nodes > 1 and per_node > 1:
            texts.append(f"hsdp{cluster.nodes}x{per_node}")
        stages = [1, *(p for p in _powers_of_two(min(_MOST_STAGES, total)) if num_blocks == 0 or p <= num_blocks)]
        for pp in stages:
            for tp in (
                *reversed(_powers_of_two(per_node)),
                1,
            ):  # largest first: its checked pairs also hold for fewer ranks
                left, rest = divmod(total, pp * tp)
                if rest or pp * tp == 1:
                    continue
                head = [f"pp{pp}"] if pp > 1 else []
                tail = [f"tp{tp}"] if tp > 1 else []
                data = [[]] if left == 1 else [[with_size(name, left)] for name in tried("composed")]
                if left > per_node // tp > 1 and cluster.nodes > 1 and left % (per_node // tp) == 0 and pp == 1:
                    data.append([f"hsdp{left // (per_node // tp)}x{per_node // tp}"])
                texts += [",".join([*head, *middle, *tail]) for middle in data]
        for cp in _powers_of_two(per_node) if num_blocks and batch_size <= total else []:
            left, rest = divmod(total, cp)
            if not rest:
                data = [[]] if left == 1 else [[with_size("ddp", left)]]
                texts += [",".join([*middle, f"cp{cp}"]) for middle in (*data, [with_size("fsdp", left)])]
        for ep in _powers_of_two(min(per_node, num_experts)):
            texts += [f"ep{ep}" if ep == total else f"ddp{total},ep{ep}", f"fsdp{total},ep{ep}"]
    for text in texts:
        try:
            yield parse(text, required_num_ranks(text) or total, per_node)
        except StrategyError:  # incompatible sizes
            continue


def _powers_of_two(most: int) -> list[int]:
    return [2**power for power in range(1, most.bit_length())]


def micro_batches_for(layout: Layout, share: int) -> list[int]:
    """Candidate micro-batch sizes of one data rank, the fastest first.

    Without stages that starts at the whole share; with stages, at 4 micro-batches per stage, to keep all stages busy.
    """
    largest = share if layout.num_stages == 1 else max(1, share // (4 * layout.pp))
    sizes = [largest]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    return sizes
