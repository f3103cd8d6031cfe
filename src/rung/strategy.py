"""What a strategy is: a value, one point in a mesh of processes.

`Layout` says how many ranks replicate the model, how many share one copy of it, into how many stages and tensor parts
it is cut, and which parts of the training state are cut among the ranks that share a copy. The familiar names (ddp,
zero1, fsdp, hsdp, tp, pp, ...) are presets for such points, and "pp2,fsdp,tp2" composes them. Four more stand alone and
have runtimes of their own: threads over the devices of one process (dp), and processes that call each other (ps,
ps-async, ddp+ps, rpc-pp). This module parses and sizes them; it imports no torch and knows no process group.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from rung.errors import StrategyError, nearest

SCHEDULES = {
    "gpipe": "all forwards, then all backwards",
    "1f1b": "one forward, one backward: fewer activations held (default)",
    "interleaved": "1f1b with two stages on each rank: a smaller bubble, more messages",
    "zb": "zero bubble: the weights' gradients fill the gaps",
}
DEFAULT_SCHEDULE = "1f1b"
_STAGES_PER_RANK = {"interleaved": 2}
WITH_SERVERS = ("ps", "ps-async", "ddp+ps")
OVER_RPC = (*WITH_SERVERS, "rpc-pp")


@dataclass(frozen=True)
class Layout:
    """A sized strategy.

    zero: which state is cut among the ranks of the shard axis. 0 nothing, 1 the optimizer state,
    2 also gradients, 3 also parameters. With zero 0 and 1 the parameters are whole on every rank, so the
    shard axis of zero 1 carries only the optimizer state.

    kind: "mesh", or the name of a strategy that stands alone. Where there are servers, they are the first ranks and
    the trainers, which replicate the model, come after them. devices: the replicas of dp; 0 is one for each device.
    """

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 0
    pp: int = 1
    tp: int = 1
    schedule: str = DEFAULT_SCHEDULE
    kind: str = "mesh"
    servers: int = 0
    devices: int = 0

    @property
    def num_ranks(self) -> int:
        return self.servers + self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different samples of a batch. Under ps-async a trainer takes whole batches."""
        return 1 if self.kind == "ps-async" else self.dp_replicate * self.dp_shard

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def stages_per_rank(self) -> int:
        return _STAGES_PER_RANK.get(self.schedule, 1) if self.pp > 1 else 1

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: axis names from the outermost to the innermost, with their sizes."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis. A server stands on none, which reads as the first place of each."""
        found: dict[str, int] = {}
        rank = max(0, rank - self.servers)
        for axis, size in reversed(self.axes.items()):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def data_rank(self, rank: int) -> int:
        """Which share of the batch a rank reads, of `num_data_ranks`."""
        return max(0, rank - self.servers) // self.tp % self.num_data_ranks

    def counts_loss(self, rank: int) -> bool:
        """Whether a rank tells the loss of its share: the first of its tensor group, on the last stage."""
        at = self.coordinates(rank)
        return at["tp"] == 0 and at["pp"] == self.pp - 1 and not self.is_server(rank)

    def is_server(self, rank: int) -> bool:
        """Whether a rank keeps parameters for others and computes no loss."""
        return rank < self.servers

    @property
    def expendable(self) -> range:
        """Ranks that the others go on without: they keep nothing, and what they were at is given to others."""
        return range(self.servers, self.num_ranks) if self.kind == "ps-async" else range(0)

    def team(self, rank: int) -> int:
        """Ranks of one team do the same work: those of a stage, the servers, the trainers."""
        return self.coordinates(rank)["pp"] if not self.servers else int(not self.is_server(rank))

    @property
    def uses_rpc(self) -> bool:
        return self.kind in OVER_RPC

    @property
    def is_composed(self) -> bool:
        """Whether the model itself is cut, into stages or tensors."""
        return self.pp > 1 or self.tp > 1

    @property
    def uses_fully_shard(self) -> bool:
        """Whether FSDP2 carries the data parallelism: wherever parameters are sharded, and in every composition."""
        return self.zero >= 2 or (self.is_composed and self.num_data_ranks > 1)

    @property
    def uses_ddp(self) -> bool:
        """Whether torch's DDP carries it, over all ranks that compute."""
        alone = self.kind == "mesh" and self.is_distributed and not self.uses_fully_shard and not self.is_composed
        return alone or self.kind == "ddp+ps"

    @property
    def shards_parameters(self) -> bool:
        return self.zero >= 2

    @property
    def is_distributed(self) -> bool:
        return self.name != "single" and self.kind != "dp"

    def describe(self) -> str:
        if self.name == "single":
            return "single: one process"
        if self.kind == "dp":
            return f"{self.name}: one process, {self.devices or 'all'} devices"
        if self.servers:
            return f"{self.name}: {_many(self.servers, 'server')} + {_many(self.dp_replicate, 'trainer')}"
        if self.kind == "rpc-pp":
            return f"{self.name}: {self.pp} stages over RPC"
        parts = []
        if self.pp > 1:
            each = f", {self.stages_per_rank} a rank" if self.stages_per_rank > 1 else ""
            parts.append(f"{self.num_stages} stages ({self.schedule}{each})")
        if self.dp_replicate > 1 and self.dp_shard > 1:
            parts.append(f"{self.dp_replicate} replicas x {self.dp_shard} shards")
        elif self.num_data_ranks > 1:
            parts.append(f"{self.num_data_ranks} {'shards' if self.dp_shard > 1 else 'replicas'}")
        if self.tp > 1:
            parts.append(f"tensors cut in {self.tp}")
        return f"{self.name}: {' x '.join(parts) if parts else 'one process'}"


@dataclass(frozen=True)
class _Preset:
    """A name for a family of layouts. `axis` is the one an unsized name stretches over."""

    axis: str
    zero: int
    summary: str


PRESETS: dict[str, _Preset] = {
    "single": _Preset("none", 0, "one process, no communication"),
    "ddp": _Preset("dp_replicate", 0, "DistributedDataParallel: whole model on each rank, gradients averaged"),
    "zero1": _Preset("dp_shard", 1, "ddp with the optimizer state cut among the ranks"),
    "zero2": _Preset("dp_shard", 2, "gradients and optimizer state cut; parameters kept between forward and backward"),
    "zero3": _Preset("dp_shard", 3, "parameters, gradients and optimizer state cut (FSDP2)"),
    "fsdp": _Preset("dp_shard", 3, "another name of zero3"),
    "hsdp": _Preset("both", 3, "fsdp inside groups, replicated across them: hsdpRxS, R replicas of S shards"),
    "tp": _Preset("tp", 0, "tensor parallel: the matrices of each layer cut among the ranks"),
    "pp": _Preset("pp", 0, "pipeline parallel: the layers cut into stages; pp2:gpipe names the schedule, too"),
    "dp": _Preset("devices", 0, "DataParallel: one process, a thread for each device; dp4 is four of them"),
    "ps": _Preset("dp_replicate", 0, "parameter server: trainers push gradients and pull parameters, in step"),
    "ps-async": _Preset("dp_replicate", 0, "parameter server, each trainer at its own pace (--staleness)"),
    "ddp+ps": _Preset("dp_replicate", 0, "ddp among trainers, the task's `remote` modules on servers"),
    "rpc-pp": _Preset("pp", 0, "pipeline over RPC, with distributed autograd and optimizer"),
}
_ORDER = ("pp", "data", "tp")
_ALONE = ("single", "dp", *OVER_RPC)


def names() -> list[str]:
    return list(PRESETS)


@dataclass(frozen=True)
class _Part:
    """One word of a strategy: 'hsdp2x2' is hsdp with the sizes 2 and 2, 'pp2:zb' is pp with a size and a schedule."""

    text: str
    name: str
    sizes: tuple[int, ...]
    schedule: str | None = None

    @property
    def place(self) -> str:
        return self.name if self.name in _ORDER else "data"


def parse(
    text: str,
    num_ranks: int,
    ranks_per_host: int | None = None,
    schedule: str | None = None,
    servers: int | None = None,
) -> Layout:
    """The layout that `text` names for `num_ranks` processes.

    An unsized name takes the ranks that are left; sized ones (`ddp4`, `fsdp2`, `zero1x4`, `hsdp2x2`, `pp2`, `tp2`) must
    match them. Unsized hsdp shards inside a host and replicates across hosts; on one host it makes two replicas.
    `schedule` is for a pipeline that names none itself, `servers` for the strategies that have some.
    """
    parts = split(text)
    if num_ranks < 1:
        raise StrategyError(f"a job needs at least one process; {num_ranks} were asked for.")
    if parts[0].name in _ALONE and parts[0].name != "single":
        return _parse_alone(parts[0], num_ranks, servers or 1)
    if parts[0].name == "single":
        if num_ranks != 1:
            raise StrategyError(
                f"'single' is one process, but {num_ranks} were asked for. "
                f"Use --nproc 1, or a strategy for {num_ranks} processes such as 'ddp'."
            )
        return Layout("single")
    sized = {part.name: math.prod(part.sizes) for part in parts if part.sizes}
    unsized = [part for part in parts if not part.sizes]
    taken = math.prod(sized.values())
    if not unsized and taken != num_ranks:
        open_name = ",".join(part.name if part.place == "data" else part.text for part in parts)
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
    values: dict[str, int] = {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1}
    zero = 0
    words: dict[str, str] = {}
    chosen = DEFAULT_SCHEDULE
    for part in sorted(parts, key=lambda part: part.name == "hsdp"):  # last: it looks at the tensor groups of a host
        preset = PRESETS[part.name]
        if part.name == "hsdp":
            per_host = None if ranks_per_host is None else max(1, ranks_per_host // values["tp"])
            replicate, shard = _size_hsdp(part, left, per_host)
            values["dp_replicate"], values["dp_shard"] = replicate, shard
            words["data"] = f"hsdp{replicate}x{shard}"
        else:
            size = part.sizes[0] if part.sizes else left
            values[preset.axis] = size
            words[part.place] = f"{part.name}{_sized(part.name, size)}"
        if part.place == "data":
            zero = preset.zero
        if part.name == "pp":
            chosen = _choose_schedule(text, part.schedule, schedule)
            words["pp"] += f":{chosen}" if chosen != DEFAULT_SCHEDULE else ""
    name = ",".join(words[place] for place in _ORDER if place in words)
    if len(parts) == 1 and parts[0].place == "data" and parts[0].name != "hsdp":
        name = parts[0].name  # alone, the size says nothing
    return Layout(
        name,
        dp_replicate=values["dp_replicate"],
        dp_shard=values["dp_shard"],
        zero=zero,
        pp=values["pp"],
        tp=values["tp"],
        schedule=chosen,
    )


def _parse_alone(part: _Part, num_ranks: int, servers: int) -> Layout:
    """The layout of a strategy that is no point of the mesh."""
    name = part.name
    if name == "dp":
        if num_ranks != 1:
            raise StrategyError(
                f"dp is one process with a thread for each device, but {num_ranks} processes were asked for. Use "
                f"--strategy dp{num_ranks} --nproc 1 for {num_ranks} devices, or ddp for {num_ranks} processes."
            )
        return Layout(part.text, kind="dp", devices=part.sizes[0] if part.sizes else 0)
    if name == "rpc-pp":
        stages = part.sizes[0] if part.sizes else num_ranks
        if stages != num_ranks:
            raise StrategyError(f"{part.text!r} is {stages} processes, but the job has {num_ranks}.")
        if stages < 2:
            raise StrategyError("rpc-pp needs at least two processes, a stage each. Use --nproc 2, or single.")
        return Layout(f"rpc-pp{stages}", kind="rpc-pp", pp=stages, schedule="gpipe")
    if num_ranks <= servers:
        raise StrategyError(
            f"{name} needs a trainer beside its {_many(servers, 'server')}, and there "
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
    """The layout of `text` on as many of `num_ranks` processes as it can use, and how many are left over.

    For worlds whose size changes while the job runs: sizes that were asked for are kept, the unsized part takes what
    is left, and what does not divide waits.
    """
    least = 1
    for part in split(text):
        least *= math.prod(part.sizes) if part.name != "dp" else 1  # whose size counts devices
    for used in range(num_ranks, least - 1, -1):
        try:
            return parse(text, used, ranks_per_host, schedule, servers), num_ranks - used
        except StrategyError:
            if used == least:  # not a matter of numbers: say what it is
                raise
    raise StrategyError(f"{text!r} needs at least {least} processes; {num_ranks} cannot hold it.")


def split(text: str) -> list[_Part]:
    """The words of a strategy in the order pp, data, tp; what cannot stand together is refused."""
    parts = [_split_word(word, text) for word in text.split(",")]
    by_place: dict[str, _Part] = {}
    for part in parts:
        other = by_place.get(part.place)
        if other is not None:
            both = f"{other.text} and {part.text}"
            hint = " hsdpRxS is R replicas of S shards." if part.place == "data" else ""
            raise StrategyError(f"{text!r}: {both} are two answers to one question. Keep one of them.{hint}")
        by_place[part.place] = part
    lonely = next((part.name for part in parts if part.name in _ALONE), None)
    if len(parts) > 1 and lonely is not None:
        why = "is one process and" if lonely == "single" else "stands alone: it"
        raise StrategyError(f"{text!r}: {lonely} {why} cannot be composed.")
    unsized = [part.text for part in parts if not part.sizes and part.name != "single"]
    if len(unsized) > 1:
        raise StrategyError(
            f"{text!r}: {' and '.join(unsized)} have no size. One part may be left unsized and takes the rest."
        )
    return [by_place[place] for place in _ORDER if place in by_place]


def natural_num_ranks(text: str) -> int | None:
    """How many processes a sized strategy asks for by itself; None when it takes what is given."""
    parts = split(text)
    if parts[0].name in ("single", "dp"):
        return 1
    return math.prod(math.prod(part.sizes) for part in parts) if all(part.sizes for part in parts) else None


def default_name(num_ranks: int) -> str:
    """The lowest rung that uses all processes."""
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
        if name in WITH_SERVERS and sizes:
            raise StrategyError(f"{text!r}: {name} takes no size; --nproc is all processes, --servers those of them.")
        if name == "hsdp" and len(sizes) == 1:
            raise StrategyError(
                f"{text!r}: hsdp has two sizes, replicas x shards, as in 'hsdp2x{max(1, sizes[0] // 2)}'."
            )
        if name != "hsdp" and len(sizes) > 1:
            raise StrategyError(f"{text!r}: {name} has one size, as in '{name}{_sized(name, sizes[0])}'.")
        return _Part(word.strip().lower(), name, sizes, schedule or None)
    raise StrategyError(
        f"there is no strategy {word.strip()!r}.{nearest(token, PRESETS)} Known: {', '.join(PRESETS)}, "
        "and compositions such as 'pp2,fsdp,tp2'."
    )


def _choose_schedule(text: str, own: str | None, given: str | None) -> str:
    if own is not None and given is not None and own != given:
        raise StrategyError(f"{text!r} names the schedule {own!r}, and --schedule {given!r}. Keep one of them.")
    return own or given or DEFAULT_SCHEDULE


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count > 1 else ''}"


def _sized(name: str, size: int) -> str:
    return f"x{size}" if name[-1].isdigit() else str(size)


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
