"""The abilities and properties of a layout, from the table in `presets.py` and the layout's sizes.

Code outside of this package, `open_world`, `parallelize` and `build_runtime` uses these functions and never compares
names or kinds of strategies. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from rung.spec.presets import ABILITIES, PRESETS, SCHEDULES, Refusal, givers
from rung.spec.strategy import Layout, parse, required_num_ranks, split
from rung.system.units import plural


def can(layout: Layout, ability: str) -> bool:
    """Whether the layout has an ability of the table."""
    return _refusal(layout, ability) is None


def why_not(layout: Layout, ability: str, asked: str = "") -> str | None:
    """Why the layout lacks an ability, and the nearest choice; None if it has it. `asked` is the setting as given."""
    refusal = _refusal(layout, ability)
    if refusal is None:
        return None
    others = givers(ability)
    words = " or ".join([", ".join(others[:-1]), others[-1]] if len(others) > 1 else others)
    return refusal.text(asked=asked, name=layout.name, stages=layout.pp, givers=words, stand_in=_stand_in(layout))


def presets_of(layout: Layout) -> list[str]:
    """The presets that a layout is composed of, without pp and tp of size 1."""
    return [part.name for part in split(layout.name) if part.slot == "data" or part.sizes != (1,)]


def _refusal(layout: Layout, ability: str) -> Refusal | None:
    refusals = [PRESETS[part.name].refuses for part in split(layout.name)]
    for refuses in [*refusals, SCHEDULES[layout.schedule].refuses] if layout.pp > 1 else refusals:
        if ability in refuses:
            return refuses[ability]
    is_given = any(ability in PRESETS[name].gives for name in presets_of(layout))
    return None if is_given else ABILITIES[ability].lacking


def _stand_in(layout: Layout) -> str:
    return "" if layout.kind == "mesh" else PRESETS[layout.kind].stand_in.format(stages=layout.pp)


def stand_in(layout: Layout) -> Layout:
    """The layout itself if it can be planned, else one that can and makes the same demands on the model."""
    name = _stand_in(layout) or layout.name
    return layout if can(layout, "plan") else parse(name, required_num_ranks(name) or layout.num_ranks)


def rung_of(layout: Layout) -> float:
    """The complexity of a layout, by the concepts that a user needs to run it."""
    if layout.kind != "mesh":
        return PRESETS[layout.kind].rung
    if layout.num_ranks == 1:
        return 0
    if layout.is_composed:
        cuts = (layout.pp, layout.tp, layout.cp, layout.ep)
        return 4 + sum(size > 1 for size in cuts) + (layout.num_data_ranks > layout.ep)
    if layout.cp > 1:
        return 5 + (layout.num_data_ranks > 1) + (layout.zero > 0)
    return PRESETS[presets_of(layout)[0]].rung + (layout.dp_replicate > 1 and layout.dp_shard > 1)


def describe_layout(layout: Layout) -> str:
    """A layout in words, for the first line of a run."""
    if layout.servers:
        return f"{layout.name}: {plural(layout.servers, 'server')} + {plural(layout.dp_replicate, 'trainer')}"
    if layout.kind == "dp":
        return f"{layout.name}: one process, {layout.devices or 'all'} devices"
    if layout.kind == "rpc-pp":
        return f"{layout.name}: {layout.pp} stages over RPC"
    parts = []
    if layout.pp > 1:
        each = f", {layout.stages_per_rank} a rank" if layout.stages_per_rank > 1 else ""
        parts.append(f"{layout.num_stages} stages ({layout.schedule}{each})")
    if layout.dp_replicate > 1 and layout.dp_shard > 1:
        parts.append(f"{layout.dp_replicate} replicas x {layout.dp_shard} shards")
    elif layout.num_gradient_ranks > 1:
        parts.append(f"{layout.num_gradient_ranks} {'shards' if layout.dp_shard > 1 else 'replicas'}")
    if layout.cp > 1:
        parts[-1] += f" (sequences cut in {layout.cp})"
    if layout.ep > 1:
        parts[-1] += f" (experts shared out among {layout.ep})"
    if layout.tp > 1:
        parts.append(f"tensors cut in {layout.tp}")
    return f"{layout.name}: {' x '.join(parts) if parts else 'one process'}"


def optional_ranks(layout: Layout) -> range:
    """Ranks whose loss the job survives: they hold no state, and their work is given to other ranks."""
    return range(layout.servers, layout.num_ranks) if layout.kind == "ps-async" else range(0)


def title_of(layout: Layout) -> str:
    """The field's name for a data-parallel layout, or its own for a composition."""
    return layout.name if layout.is_composed or layout.cp > 1 else PRESETS[presets_of(layout)[0]].title


def topology(layout: Layout) -> dict[str, Any]:
    """The properties that must be equal for a run to resume bit by bit."""
    found = {"axes": layout.axes, "zero": layout.zero, "schedule": layout.schedule if layout.pp > 1 else None}
    found |= {name: size for name, size in (("cp", layout.cp), ("ep", layout.ep)) if size > 1}
    alone = {"kind": layout.kind, "servers": layout.servers, "devices": layout.devices}
    return found if layout.kind == "mesh" else {**found, **alone}


def num_parts(layout: Layout, state: str) -> int:
    """The largest number of parts into which a replica's "parameters", "gradients" or "optimizer" state is divided:
    ranks that share out experts hold the rest as often as others do."""
    from_zero = {"parameters": 3, "gradients": 2, "optimizer": 1}[state]
    return layout.pp * layout.tp * (layout.dp_shard if layout.zero >= from_zero else layout.ep)


def family(layout: Layout) -> tuple[int, int, int, int, bool]:
    """A key that is equal for layouts that differ only in the number of stages."""
    return layout.tp, layout.cp, layout.ep, layout.zero, layout.dp_replicate > 1 and layout.dp_shard > 1


def mechanisms(layout: Layout) -> frozenset[str]:
    """What of torch and of Rung takes part in a rank's step beside the model. Each costs the host time of its own."""
    taking_part = {
        "ddp": layout.uses_ddp,
        "zero1": layout.zero == 1,
        "fully_shard": layout.uses_fully_shard,
        "cp": layout.cp > 1,
        "ep": layout.ep > 1,
        "tp": layout.tp > 1,
        "pp": layout.pp > 1,
    }
    return frozenset(name for name, is_there in taking_part.items() if is_there)


def keeps_whole_state(layout: Layout) -> bool:
    """Whether every rank holds all parameters, gradients and optimizer state."""
    return layout.zero == 0 and not layout.is_composed


def shards_parameters(layout: Layout) -> bool:
    """Whether FSDP2 keeps parameters and gradients in shards between micro-batches."""
    return layout.zero >= 2


def shards_alone(layout: Layout) -> bool:
    """Whether sharding is all that divides a parameter."""
    return layout.dp_shard > 1 and layout.tp == 1 and layout.ep == 1


def runs_units_together(layout: Layout) -> bool:
    """Whether FSDP2 gathers units from data ranks that therefore must run the same ones, without a pipeline's order."""
    return layout.uses_fully_shard and layout.num_gradient_ranks > 1 and layout.pp == 1


def cuts_layers(layout: Layout) -> bool:
    """Whether ranks compute parts of one layer."""
    return layout.tp > 1


def compiles_blocks(layout: Layout) -> bool:
    """Whether `--compile` compiles block by block, because communication between blocks cannot be compiled; else the
    whole model with its loss."""
    return layout.uses_fully_shard or layout.is_composed or layout.cp > 1


def reshards_after_forward(layout: Layout) -> bool:
    """Whether FSDP2 gathers parameters for each use, instead of once a step."""
    return layout.zero == 3


def cuts_only_batch(layout: Layout) -> bool:
    """Whether every rank computes the whole model and communicates only by collectives."""
    return not layout.is_composed and layout.cp == 1 and not can(layout, "rpc")


def runs_threads(layout: Layout) -> bool:
    """Whether one process runs a replica in a thread for each of its devices."""
    return layout.kind == "dp"


def has_common_steps(layout: Layout) -> bool:
    """Whether all ranks take each step together. If not, trainers request batches from servers at their own pace."""
    return all(PRESETS[name].has_common_steps for name in presets_of(layout))


def works_at_own_pace(layout: Layout, rank: int) -> bool:
    """Whether a rank is a trainer outside of the servers' process group, which uses only RPC."""
    return not has_common_steps(layout) and not layout.is_server(rank)


def call_axis(layout: Layout) -> str:
    """The parties that exchange messages in a layout that sends calls."""
    return "devices" if runs_threads(layout) else "servers" if layout.servers else "stages"


def peer_group(layout: Layout, rank: int) -> int:
    """The group of ranks with the same work: those of a stage, the servers, or the trainers."""
    return layout.coordinates(rank)["pp"] if not layout.servers else int(not layout.is_server(rank))


def with_devices(text: str, num_devices: int) -> str:
    """Add a size to an unsized strategy that counts the devices of one process."""
    return f"{text}{num_devices}" if text in PRESETS and PRESETS[text].axis == "devices" else text
