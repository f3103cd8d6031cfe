"""Plan a task on a cluster: estimate the candidate layouts and recommend one.

`search.py` estimates layouts, `parallel_search.py` does so in several processes. The recommendation is the fastest
layout, or one on a lower rung of the ladder that is nearly as fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rung.errors import ConfigError
from rung.hardware.cluster import Cluster
from rung.planner.advice import Change, to_fit, to_quicken
from rung.planner.candidates import layouts_for, named_layout
from rung.planner.compression_advice import Advice, best_of, plain_ddp, try_compression, waiting_share
from rung.planner.dryrun import whole_state
from rung.planner.estimate import Estimate, Estimator
from rung.planner.measurements import Measurements, refine
from rung.planner.parallel_search import FEW, TaskSource, search_in_processes
from rung.planner.search import WORTH_IT, Rejected, gib, search
from rung.planner.truncated_model import count_blocks, count_experts
from rung.spec.abilities import keeps_whole_state, rung_of, title_of
from rung.spec.config import RunConfig
from rung.spec.task import Task
from rung.system.units import human_bytes, human_seconds


@dataclass(frozen=True)
class Plan:
    """The estimated layouts and the recommendation."""

    task: str
    cluster: Cluster
    batch_size: int
    precision: str
    rows: list[Estimate]  # fastest first
    rejected: list[Rejected]
    state: dict[str, int]  # of the whole model
    chosen: Estimate | None = None
    words: list[str] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)  # on compressed gradients, if communication limits ddp
    changes: list[Change] = field(default_factory=list)  # that make it fit, or quicker
    only_one: bool = False  # the user named one layout
    recomputes: bool = False  # the user set activation checkpointing
    compress: str = "none"  # the user's --compress
    compiles: bool = False  # the user's --compile
    offload: str = "none"  # the user's --offload
    batch_tokens: int | None = None  # the user's --batch-tokens; `batch_size` is then that of the fullest batch

    def as_json(self) -> dict[str, Any]:
        """Plain values, for a file."""
        cluster = self.cluster
        return {
            "task": self.task,
            "cluster": {
                "device": cluster.device.name,
                "source": cluster.device.source,
                "memory": cluster.device.memory,
                "nodes": cluster.nodes,
                "per_node": cluster.per_node,
                "inside": cluster.inside.name,
                "between": cluster.between.name if cluster.between is not None else None,
            },
            "batch_size": self.batch_size,
            "batch_tokens": self.batch_tokens,
            "precision": self.precision,
            "state": self.state,
            "recommendation": {
                "strategy": self.chosen.layout.name if self.chosen is not None else None,
                "words": self.words,
            },
            "advice": [asdict(one) for one in self.advice],
            "changes": [asdict(one) for one in self.changes],
            "layouts": [_row_as_json(row, self.batch_size) for row in self.rows],
            "rejected": [
                {"strategy": one.layout.name, "reason": one.reason, "needs": one.needs} for one in self.rejected
            ],
        }


def in_tokens(plan: Plan, batch_tokens: int | None) -> Plan:
    """The plan of a job with --batch-tokens, whose --micro-batch is in tokens: `plan` is of its fullest batch."""
    if batch_tokens is None:
        return plan

    def converted(text: str) -> str:
        return re.sub(
            r"--micro-batch (\d+)",
            lambda found: f"--micro-batch {-(-int(found[1]) * batch_tokens // plan.batch_size)}",
            text,
        )

    changes = [replace(change, what=converted(change.what)) for change in plan.changes]
    return replace(plan, batch_tokens=batch_tokens, words=[converted(text) for text in plan.words], changes=changes)


def micro_batch_of(row: Estimate, batch_tokens: int | None) -> int:
    """As --micro-batch takes it, in samples or, with --batch-tokens, in tokens."""
    if batch_tokens is None:
        return row.micro_batch
    return -(-batch_tokens // (row.num_micro_batches * row.layout.num_data_ranks))


def _row_as_json(row: Estimate, batch_size: int) -> dict[str, Any]:
    return {
        "strategy": row.layout.name,
        "ranks": row.layout.num_ranks,
        "micro_batch": row.micro_batch,
        "micro_batches": row.num_micro_batches,
        "activation_checkpointing": row.checkpointing,
        "cp_form": row.cp_form,
        "memory": asdict(row.memory),
        "time": {**asdict(row.time), "limit": row.time.limit},
        "grounds": "measured" if row.is_measured else "modelled",
        "process_at_most": row.most_bytes,
        "samples_per_second": batch_size / row.time.seconds,
    }


def make_plan(
    task: Task,
    config: RunConfig,
    cluster: Cluster,
    *,
    only: str | None = None,
    advises: bool = True,
    source: TaskSource | None = None,
    measurements: Measurements | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Estimate the candidate layouts of the cluster, or `only` one; with `advises`, also compressed gradients.

    With the `source` of the task, many layouts are searched in several processes. With `measurements`, the layouts that
    may be the best are measured on this machine's device.
    """
    progress = progress or (lambda text: None)
    if config.precision == "fp8" and not cluster.device.matrix.get("fp8"):
        raise ConfigError(
            f"--precision fp8 needs a device with float8 arithmetic, and the record of {cluster.device.name} has no "
            "rate for it. Use --precision bf16, or another --cluster."
        )
    named = [named_layout(only, cluster, config.schedule)] if only is not None else None
    num_blocks = count_blocks(task)
    estimator = Estimator(task, config, cluster, num_blocks)
    progress("the whole model on one device")
    state = whole_state(task, config, cluster.device.kind)
    layouts = (
        named if named is not None else list(layouts_for(cluster, num_blocks, config.batch_size, count_experts(task)))
    )
    if source is not None and len(layouts) > FEW:
        found = search_in_processes(source, config, cluster, layouts, state, progress)
    else:
        found = []
        for one in search(estimator, layouts, state, prunes=named is None):
            found.append(one)
            progress(f"{one.layout.name} ({len(found)} of {len(layouts)})")
    rows = [row for one in found for row in one.rows]
    rejected = [one.rejected for one in found if one.rejected is not None]
    rows.sort(key=lambda row: row.time.seconds)
    notes: list[str] = []
    if measurements is not None:
        rows, too_large, notes = refine(rows, estimator, measurements, progress)
        rejected += too_large
    if config.compile and not all(row.is_measured for row in rows):
        notes.append("--compile is not modelled: what was not measured is said as without it.")
    if config.offload == "cpu" and cluster.device.kind == "cuda":
        notes.append(_on_offloading(cluster))
    chosen = choose(rows)
    plan = Plan(
        task.name,
        cluster,
        config.batch_size,
        config.precision,
        rows,
        rejected,
        state,
        advice=try_compression(rows, chosen, estimator, progress) if advises else [],
        changes=_changes(chosen, rejected, estimator, state, progress) if advises else [],
        only_one=only is not None,
        recomputes=config.activation_checkpointing != "none",
        compress=config.compress,
        compiles=config.compile,
        offload=config.offload,
    )
    return replace(plan, chosen=chosen, words=[*explain_choice(plan, chosen), *_grounds(plan), *notes])


def _changes(
    chosen: Estimate | None,
    rejected: list[Rejected],
    estimator: Estimator,
    state: dict[str, int],
    progress: Callable[[str], None],
) -> list[Change]:
    if chosen is not None:
        return to_quicken(chosen, estimator, state, progress)
    too_large = [one.layout for one in rejected if one.needs is not None]
    return to_fit(too_large, estimator, state, progress) if too_large else []


def _on_offloading(cluster: Cluster) -> str:
    device = cluster.device
    return (
        f"--offload: the host copies {device.host_link / 1e9:.3g} GB/s to and from each device, and updates parameters "
        f"at {device.host_bandwidth / 1e9:.3g} GB/s; `rung calibrate` measures both on a machine with such a device."
    )


def _grounds(plan: Plan) -> list[str]:
    """What the figures rest on."""
    if not plan.rows:
        return []
    measured = [row.layout.name for row in plan.rows if row.is_measured]
    if not measured:
        return [f"Modelled, from {plan.cluster.device.source}; what fits is judged by the upper end of its memory."]
    others = "; the rest is modelled" if len(measured) < len(plan.rows) else ""
    return [f"Measured on this device: {', '.join(measured)}, but for messages between devices{others}."]


def choose(rows: list[Estimate]) -> Estimate | None:
    """The fastest layout, or one on a lower rung that is less than 5 % slower."""
    if not rows:
        return None
    quickest = min(row.time.seconds for row in rows)
    near = [row for row in rows if row.time.seconds * (1 - WORTH_IT) <= quickest]
    return min(near, key=lambda row: (rung_of(row.layout), row.checkpointing != "none", row.time.seconds))


def explain_choice(plan: Plan, chosen: Estimate | None) -> list[str]:
    """The lines of the recommendation: the chosen rung, and why not a lower or higher one."""
    if chosen is None:
        return _nothing_fits(plan)
    layout, cluster = chosen.layout, plan.cluster
    has, uses = gib(cluster.device.memory), gib(chosen.memory.process)
    alone = next((row for row in plan.rows if row.layout.num_ranks == 1), None)
    without = next((one for one in plan.rejected if one.layout.num_ranks == 1), None)
    lines = []
    if layout.num_ranks == 1:
        best = plan.rows[0]
        lines.append(f"one device is enough: it needs {uses} of {has}.")
        if best is not chosen:
            gain = chosen.time.seconds / best.time.seconds
            lines.append(f"{best.layout.name} on {best.layout.num_ranks} would be {_times(gain)}.")
        elif cluster.num_devices > 1:
            lines.append("On more devices the messages would take longer than the computing that they save.")
    elif keeps_whole_state(layout):
        fits = f"the model fits on one device ({uses} of {has}), and {layout.num_ranks} share the batch."
        lines.append(f"{title_of(layout)}: {fits}")
    else:
        lines.append(f"{title_of(layout)}: {_why_sharded(plan, uses, has)}")
    if not layout.is_composed and layout.dp_replicate > 1 and layout.dp_shard > 1:
        lines.append(f"Shards stay inside a machine, where the link is quick ({cluster.inside.name}).")
    if layout.is_composed:
        simple = next((row for row in plan.rows if not row.layout.is_composed), None)
        if simple is not None:
            slower = _times(simple.time.seconds / chosen.time.seconds)
            lines.append(f"It is {slower} than {simple.layout.name}, the best that leaves the model in one piece.")
    if alone is not None and layout.num_ranks > 1:
        lines.append(f"A step takes {_seconds(chosen)}; on one device {_seconds(alone)}.")
    elif without is not None:
        lines.append(f"One device: {without.reason.rstrip('.')}.")
    limit = chosen.time.limit
    lines.append(
        f"{plan.batch_size / chosen.time.seconds:,.0f} samples a second; most of the time goes to {limit}."
        if limit != "communication"
        else f"{plan.batch_size / chosen.time.seconds:,.0f} samples a second; links are what limits it."
    )
    if chosen.checkpointing == "full" and not plan.recomputes:
        lines.append("Activations must be recomputed: --activation-checkpointing full.")
    lines += _in_detail(chosen) if plan.only_one else []
    if plan.changes:
        said = [f"{one.what} ({_times(one.times_quicker or 1.0)}, {gib(one.needs)})" for one in plan.changes]
        lines.append(f"Quicker, with other rounding or memory: {'; '.join(said)}.")
    return [*lines, *_on_compression(plan, chosen)]


def _in_detail(row: Estimate) -> list[str]:
    """The breakdown of memory and time, for a layout that the user named."""
    memory, time = row.memory, row.time
    kinds = sorted(memory.by_kind.items(), key=lambda item: -item[1])
    large = [f"{human_bytes(size)} {kind}" for kind, size in kinds if size >= 0.01 * memory.allocated]
    waits = {
        "arithmetic": time.arithmetic,
        "memory bandwidth": time.memory,
        "waiting for messages": time.messages,
        "waiting for other stages": time.pipeline,
        "waiting for the host": time.host,
    }
    shares = [
        f"{100 * part / time.seconds:.0f} % {name}" for name, part in waits.items() if part >= 0.01 * time.seconds
    ]
    where = f"rank {memory.rank}, the fullest" if row.layout.num_stages > 1 else "a rank"
    besides = f"; the host's memory holds {human_bytes(memory.on_host)} of each rank" if memory.on_host else ""
    return [
        f"At the peak {where} has {', '.join(large)}; the allocator holds {human_bytes(memory.reserved)}{besides}.",
        f"A step of {human_seconds(time.seconds)} is {', '.join(shares)}.",
    ]


def _on_compression(plan: Plan, chosen: Estimate) -> list[str]:
    """A line on the gain of compressed gradients, if ddp spends time waiting for them."""
    plain, best = plain_ddp(plan.rows), best_of(plan.advice)
    if not plan.advice or plain is None:
        return []
    link = plan.cluster.link_of(tuple(range(plain.layout.num_ranks))).name
    share = f"Gradients over {link} take {100 * waiting_share(plain):.0f} % of a step of ddp"
    if best is None:
        return [f"{share}; no method that fits would make it more than 5 % quicker."] if chosen is plain else []
    gain, changes = _times(best.times_quicker), "it changes the numbers; docs/compression.md"
    if chosen is plain:
        return [f"{share}: --compress {best.compress} would make it {gain} ({changes})."]
    return [f"{share}: with --compress {best.compress} ddp would be {gain} than {chosen.layout.name} ({changes})."]


def _why_sharded(plan: Plan, uses: str, has: str) -> str:
    whole = [one for one in plan.rejected if keeps_whole_state(one.layout) and one.needs is not None]
    if whole:
        needed = gib(min(one.needs or 0 for one in whole))
        return f"needs {needed} on a device without sharding, which has {has}; here {uses}."
    if any(keeps_whole_state(row.layout) for row in plan.rows):
        return f"quicker than whole copies of the model, and {uses} of {has}."
    return f"{uses} of {has}."  # no layout with whole state was estimated


def _nothing_fits(plan: Plan) -> list[str]:
    known = [one for one in plan.rejected if one.needs is not None]
    if not known:
        reasons = "; ".join(f"{one.layout.name}: {one.reason.rstrip('.')}" for one in plan.rejected[:3])
        return [f"no layout can be planned: {reasons}."]
    least = min(known, key=lambda one: one.needs or 0)
    need, has = least.needs or 0, plan.cluster.device.memory
    lines = [
        f"nothing fits {plan.cluster.describe()}.",
        f"The least is {least.layout.name}: {least.reason}; a device has {gib(has)}.",
    ]
    for one in plan.changes:
        if one.seconds is None:
            lines.append(f"{one.what or 'A smaller micro-batch'} is not enough: {gib(one.needs)}.")
        else:
            lines.append(f"It fits with {one.what}: {gib(one.needs)}, {human_seconds(one.seconds)} a step.")
    if not any(one.seconds is not None for one in plan.changes):
        lines.append(
            f"It takes devices of {gib(need)}, or more of them and a larger batch: parameters, gradients and optimizer "
            f"state are {gib(sum(plan.state.values()))} in all."
        )
    return lines


def _times(ratio: float) -> str:
    if ratio < 1.005:
        return "as quick"
    return f"{100 * (ratio - 1):.0f} % quicker" if ratio < 1.5 else f"{ratio:.1f} times quicker"


def _seconds(row: Estimate) -> str:
    seconds = row.time.seconds
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
