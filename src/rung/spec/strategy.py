"""Strategies as values: a strategy is one point in a mesh of processes.

`Layout` has the number of replicas, the number of ranks that shard one replica, the number of stages and tensor parts,
and the ZeRO stage: which training state is sharded. The familiar names (ddp, zero1, fsdp, hsdp, tp, pp, ...) are
presets for such points, and "pp2,fsdp,tp2" composes them. Others cannot be composed and have runtimes of their own:
threads over the devices of one process (dp), and processes that call each other (ps, ps-async, ddp+ps, rpc-pp). This
module parses and sizes strategies; it imports no torch and uses no process group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rung.errors import StrategyError, nearest
from rung.spec.presets import PRESETS, SCHEDULES
from rung.system.units import plural

DEFAULT_SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Layout:
    """A sized strategy.

    zero: the state that is sharded along dp_shard. 0 nothing, 1 the optimizer state, 2 also gradients, 3 also
    parameters. With zero 0 and 1 the parameters are whole on every rank.

    cp: how many neighbours along the data axes share samples, each with a part of the positions of a sequence. They
    are counted in dp_replicate or dp_shard, because gradients and shards do not tell them from other data ranks.

    ep: how many neighbours along the data axis share out the experts of a layer, each with some whole ones; also
    counted in dp_replicate or dp_shard, because everything but the experts is data parallel.

    kind: "mesh", or the name of a strategy that cannot be composed. Servers are the first ranks; the trainers, which
    replicate the model, follow. devices: the replicas of dp; 0 means one for each device.
    """

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 0
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = DEFAULT_SCHEDULE
    kind: str = "mesh"
    servers: int = 0
    devices: int = 0

    @property
    def num_ranks(self) -> int:
        return self.servers + self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different samples of a batch. Under ps-async a trainer reads whole batches."""
        return 1 if self.kind == "ps-async" else self.num_gradient_ranks // self.cp

    @property
    def num_gradient_ranks(self) -> int:
        """Ranks that compute gradients of the same part of the model, which are averaged."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        return SCHEDULES[self.schedule].stages_per_rank if self.pp > 1 else 1

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: axis names from the outermost to the innermost, with their sizes."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's coordinate on each axis. Servers are outside of the mesh; theirs are 0."""
        return coordinates(self.axes, max(0, rank - self.servers))

    def data_rank(self, rank: int) -> int:
        """The share of the batch that a rank reads, of `num_data_ranks`."""
        return max(0, rank - self.servers) // (self.tp * self.cp) % self.num_data_ranks

    def is_first_of_samples(self, rank: int) -> bool:
        """Whether a rank is the first of those that share samples and a stage."""
        return max(0, rank - self.servers) % (self.tp * self.cp) == 0

    def counts_loss(self, rank: int) -> bool:
        """Whether a rank's loss is counted: it is the first of those that have the same one, on the last stage."""
        is_last = self.coordinates(rank)["pp"] == self.pp - 1
        return is_last and self.is_first_of_samples(rank) and not self.is_server(rank)

    def is_server(self, rank: int) -> bool:
        """Whether a rank holds parameters for trainers and computes no loss."""
        return rank < self.servers

    @property
    def is_composed(self) -> bool:
        """Whether the model itself is cut, by pipeline, tensor or expert parallelism."""
        return self.pp > 1 or self.tp > 1 or self.ep > 1

    @property
    def uses_fully_shard(self) -> bool:
        """Whether FSDP2 does the data parallelism: if parameters are sharded, and in every composition."""
        return self.zero >= 2 or (self.is_composed and self.num_gradient_ranks > 1)

    @property
    def uses_ddp(self) -> bool:
        """Whether torch's DDP does the data parallelism, over all ranks that compute."""
        alone = self.kind == "mesh" and self.is_distributed and not self.uses_fully_shard and not self.is_composed
        return alone or self.kind == "ddp+ps"

    @property
    def is_distributed(self) -> bool:
        return self.name != "single" and self.kind != "dp"


def expert_axes(layout: Layout) -> dict[str, int]:
    """The same ranks in the same order, as the parameters of experts are divided: among neighbours of the data axis in
    which they are counted, and each part as other parameters are among the rest of it."""
    replicate, shard = layout.dp_replicate, layout.dp_shard
    replicate, shard = (replicate, shard // layout.ep) if layout.zero else (replicate // layout.ep, shard)
    return {"pp": layout.pp, "expert_replicate": replicate, "expert_shard": shard, "ep": layout.ep, "tp": layout.tp}


def coordinates(axes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The coordinate of the rank on each axis of a mesh."""
    found: dict[str, int] = {}
    for axis in reversed(list(axes)):
        rank, found[axis] = divmod(rank, axes[axis])
    return {axis: found[axis] for axis in axes}


_ORDER = ("pp", "data", "cp", "ep", "tp")


@dataclass(frozen=True)
class _Part:
    """One word of a strategy: 'hsdp2x2' is hsdp with the sizes 2 and 2, 'pp2:zb' is pp with a size and a schedule."""

    text: str
    name: str
    sizes: tuple[int, ...]
    schedule: str | None = None

    @property
    def slot(self) -> str:
        return self.name if self.name in _ORDER else "data"


def parse(
    text: str,
    num_ranks: int,
    ranks_per_host: int | None = None,
    schedule: str | None = None,
    servers: int | None = None,
) -> Layout:
    """Parse a strategy for `num_ranks` processes.

    An unsized name takes the ranks that are left; sized ones (`ddp4`, `zero1x4`, `hsdp2x2`, `pp2`, `cp2`, `tp2`) must
    match them. `ep2` takes no ranks of its own beside a data-parallel name, and stands for `ddp2,ep2` without one.
    Unsized hsdp shards inside a host and replicates across hosts; on one host it makes two replicas.
    `schedule` applies to a pipeline without one in `text`, `servers` to strategies with servers.
    """
    parts = split(text)
    if num_ranks < 1:
        raise StrategyError(f"a job needs at least one process, not {num_ranks}.")
    if PRESETS[parts[0].name].kind != "mesh":
        return _parse_uncomposed(parts[0], num_ranks, servers or 1)
    if parts[0].name == "single":
        if num_ranks != 1:
            raise StrategyError(
                f"'single' is one process, but the job has {num_ranks}. "
                f"Use --nproc 1, or a strategy for {num_ranks} processes such as 'ddp'."
            )
        return Layout("single")
    unsized = [part for part in _taking_ranks(parts) if not part.sizes]
    taken = math.prod(math.prod(part.sizes) for part in _taking_ranks(parts))
    if not unsized and taken != num_ranks:
        open_name = ",".join(part.name if part.slot == "data" else part.text for part in parts)
        other = f", or {open_name!r}, whose unsized part takes the rest" if open_name != text else ""
        raise StrategyError(
            f"{text!r} is a layout of {taken} processes, but the job has {num_ranks}. Use --nproc {taken}{other}."
        )
    if unsized and num_ranks % taken:
        raise StrategyError(
            f"{text!r}: the sized parts take {taken} processes, which does not divide {num_ranks}. "
            f"Use --nproc {taken * max(1, round(num_ranks / taken))}."
        )
    left = num_ranks // taken
    values: dict[str, int] = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "dp_replicate": 1, "dp_shard": 1}
    zero = 0
    words: dict[str, str] = {}
    chosen = DEFAULT_SCHEDULE
    for part in sorted(parts, key=lambda part: part.name == "hsdp"):  # last: its sizes depend on tp and cp
        preset = PRESETS[part.name]
        if part.name == "hsdp":
            per_host = None if ranks_per_host is None else max(1, ranks_per_host // (values["tp"] * values["cp"]))
            replicate, shard = _size_hsdp(part, left, per_host)
            values["dp_replicate"], values["dp_shard"] = replicate, shard
            words["data"] = f"hsdp{replicate}x{shard}"
        else:
            size = part.sizes[0] if part.sizes else left
            values[preset.axis] = size
            words[part.slot] = with_size(part.name, size)
            if part.name == "ep" and part in _taking_ranks(parts):
                values["dp_replicate"] = size
        if part.slot == "data":
            zero = preset.zero
        if part.name == "pp":
            chosen = _choose_schedule(text, part.schedule, schedule)
            words["pp"] += f":{chosen}" if chosen != DEFAULT_SCHEDULE else ""
    name = ",".join(words[slot] for slot in _ORDER if slot in words)
    if len(parts) == 1 and parts[0].slot == "data" and parts[0].name != "hsdp":
        name = parts[0].name  # the size is that of the world
    inner = "dp_shard" if zero else "dp_replicate"
    values[inner] *= values["cp"]
    if values[inner] % values["ep"]:
        raise StrategyError(
            f"{text!r}: the experts of a layer are shared out among neighbours of the data axis, whose {values[inner]} "
            f"ranks cannot be divided in groups of {values['ep']}."
        )
    return Layout(
        name,
        dp_replicate=values["dp_replicate"],
        dp_shard=values["dp_shard"],
        zero=zero,
        pp=values["pp"],
        tp=values["tp"],
        cp=values["cp"],
        ep=values["ep"],
        schedule=chosen,
    )


def _parse_uncomposed(part: _Part, num_ranks: int, servers: int) -> Layout:
    """The layout of a strategy that is not a point in the mesh."""
    name = part.name
    if name == "dp":
        if num_ranks != 1:
            raise StrategyError(
                f"dp is one process with a thread for each device, but the job has {num_ranks} processes. Use "
                f"--strategy dp{num_ranks} --nproc 1 for {num_ranks} devices, or ddp for {num_ranks} processes."
            )
        return Layout(part.text, kind="dp", devices=part.sizes[0] if part.sizes else 0)
    if part.sizes and part.sizes[0] != num_ranks:
        raise StrategyError(f"{part.text!r} is {part.sizes[0]} processes, but the job has {num_ranks}.")
    if name == "rpc-pp":
        if num_ranks < 2:
            raise StrategyError("rpc-pp needs at least two processes, one for each stage. Use --nproc 2, or single.")
        return Layout(f"rpc-pp{num_ranks}", kind="rpc-pp", pp=num_ranks, schedule="gpipe")
    if "servers" not in PRESETS[name].gives:
        return Layout(name, kind=PRESETS[name].kind, dp_replicate=num_ranks)
    if num_ranks <= servers:
        raise StrategyError(
            f"{name} needs a trainer beside its {plural(servers, 'server')}, and there "
            f"{'are' if num_ranks > 1 else 'is'} {num_ranks} process{'es' if num_ranks > 1 else ''}. "
            f"Use --nproc {servers + 1} or more."
        )
    return Layout(name, kind=name, servers=servers, dp_replicate=num_ranks - servers)


def fit(
    text: str,
    num_ranks: int,
    ranks_per_host: int | None = None,
    schedule: str | None = None,
    servers: int | None = None,
) -> tuple[Layout, int]:
    """Parse a strategy for as many of `num_ranks` processes as it can use. Returns the layout and the number left over.

    For elastic jobs: sized parts keep their sizes, the unsized part takes the rest, and a remainder stays idle.
    """
    least = 1
    for part in _taking_ranks(split(text)):
        least *= math.prod(part.sizes) if part.name != "dp" else 1  # dp's size counts devices
    for used in range(num_ranks, least - 1, -1):
        try:
            return parse(text, used, ranks_per_host, schedule, servers), num_ranks - used
        except StrategyError:
            if used == least:  # no number of processes fits: this is the real error
                raise
    raise StrategyError(f"{text!r} needs at least {least} processes; {num_ranks} cannot hold it.")


def split(text: str) -> list[_Part]:
    """Split a strategy into its parts, in the order pp, data, cp, ep, tp. Refuses parts that cannot be combined."""
    parts = [_split_word(word, text) for word in text.split(",")]
    by_slot: dict[str, _Part] = {}
    for part in parts:
        other = by_slot.get(part.slot)
        if other is not None:
            both = f"{other.text} and {part.text}"
            hint = " hsdpRxS is R replicas of S shards." if part.slot == "data" else ""
            raise StrategyError(f"{text!r}: {both} set the same axis ({part.slot}). Keep one of them.{hint}")
        by_slot[part.slot] = part
    uncomposed = next((part.name for part in parts if not PRESETS[part.name].composes), None)
    if len(parts) > 1 and uncomposed is not None:
        why = "is one process and" if uncomposed == "single" else "has a runtime of its own and"
        raise StrategyError(f"{text!r}: {uncomposed} {why} cannot be composed.")
    ep = by_slot.get("ep")
    if ep is not None and not ep.sizes and "data" in by_slot:
        raise StrategyError(f"{text!r}: ep needs a size beside {by_slot['data'].text}, as in 'ep2'.")
    unsized = [part.text for part in parts if not part.sizes and part.name != "single"]
    if len(unsized) > 1:
        raise StrategyError(
            f"{text!r}: {' and '.join(unsized)} have no size. One part may be left unsized and takes the rest."
        )
    return [by_slot[slot] for slot in _ORDER if slot in by_slot]


def required_num_ranks(text: str) -> int | None:
    """The number of processes of a fully sized strategy; None if it adapts to the world."""
    parts = split(text)
    if parts[0].name in ("single", "dp"):
        return 1
    taking = _taking_ranks(parts)
    return math.prod(math.prod(part.sizes) for part in taking) if all(part.sizes for part in taking) else None


def _taking_ranks(parts: Sequence[_Part]) -> list[_Part]:
    """The parts whose sizes multiply to the number of processes: `ep` is within the data axis where one is named."""
    has_data = any(part.slot == "data" for part in parts)
    return [part for part in parts if part.name != "ep" or not has_data]


def default_name(num_ranks: int) -> str:
    """The simplest strategy that uses all processes."""
    return "single" if num_ranks == 1 else "ddp"


def _split_word(word: str, text: str) -> _Part:
    token, _, schedule = word.strip().lower().partition(":")
    if schedule and schedule not in SCHEDULES:
        raise StrategyError(
            f"{text!r}: there is no schedule {schedule!r}.{nearest(schedule, SCHEDULES)} Known: {', '.join(SCHEDULES)}."
        )
    for name in sorted(PRESETS, key=len, reverse=True):
        rest = token.removeprefix(name)
        if rest == token:
            continue
        if rest and name[-1].isdigit():
            rest = rest.removeprefix("x") if rest.startswith("x") else "?"
        if rest and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", rest):
            continue
        sizes = tuple(int(part) for part in rest.split("x")) if rest else ()
        if schedule and name != "pp":
            raise StrategyError(f"{text!r}: only pp has a schedule, as in 'pp2:{schedule}'.")
        if name == "single" and sizes:
            raise StrategyError(f"{text!r}: single takes no size; it is always one process.")
        if "servers" in PRESETS[name].gives and sizes:
            raise StrategyError(f"{text!r}: {name} takes no size; --nproc counts all processes, --servers the servers.")
        if name == "hsdp" and len(sizes) == 1:
            raise StrategyError(
                f"{text!r}: hsdp has two sizes, replicas x shards, as in 'hsdp2x{max(1, sizes[0] // 2)}'."
            )
        if name != "hsdp" and len(sizes) > 1:
            raise StrategyError(f"{text!r}: {name} has one size, as in '{with_size(name, sizes[0])}'.")
        return _Part(word.strip().lower(), name, sizes, schedule or None)
    raise StrategyError(
        f"there is no strategy {word.strip()!r}.{nearest(token, PRESETS)} Known: {', '.join(PRESETS)}, "
        "and compositions such as 'pp2,fsdp,tp2'."
    )


def _choose_schedule(text: str, own: str | None, given: str | None) -> str:
    if own is not None and given is not None and own != given:
        raise StrategyError(f"{text!r} sets the schedule {own!r}, and --schedule {given!r}. Keep one of them.")
    return own or given or DEFAULT_SCHEDULE


def with_size(name: str, size: int) -> str:
    """A preset's name with its size, as `parse` reads it."""
    return f"{name}x{size}" if name[-1].isdigit() else f"{name}{size}"


def _size_hsdp(part: _Part, left: int, ranks_per_host: int | None) -> tuple[int, int]:
    if part.sizes:
        return part.sizes[0], part.sizes[1]
    if left == 1:
        return 1, 1
    if ranks_per_host and ranks_per_host < left and left % ranks_per_host == 0:
        return left // ranks_per_host, ranks_per_host
    if left % 2 == 0:
        return 2, left // 2
    valid = ", ".join(f"hsdp{r}x{left // r}" for r in range(1, left + 1) if left % r == 0)
    raise StrategyError(f"hsdp cannot make two replicas of {left} processes. Give the sizes: {valid}.")
