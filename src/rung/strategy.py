"""What a strategy is: a value, one point in a mesh of processes.

`Layout` says how many ranks replicate the model, how many share one copy of it, and which parts of the
training state are cut among them. The familiar names (ddp, zero1, fsdp, hsdp, ...) are presets for such
points. This module parses and sizes them; it imports no torch and knows no process group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rung.errors import StrategyError, nearest


@dataclass(frozen=True)
class Layout:
    """A sized strategy.

    zero: which state is cut among the ranks of the shard axis. 0 nothing, 1 the optimizer state,
    2 also gradients, 3 also parameters. With zero 0 and 1 the parameters are whole on every rank, so the
    shard axis of zero 1 carries only the optimizer state.
    """

    name: str
    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 0

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def axes(self) -> dict[str, int]:
        """The mesh: axis names from the outermost to the innermost, with their sizes."""
        return {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard}

    @property
    def shards_parameters(self) -> bool:
        return self.zero >= 2

    @property
    def is_distributed(self) -> bool:
        return self.name != "single"

    def describe(self) -> str:
        if self.name == "single":
            return "single: one process"
        if self.dp_replicate > 1 and self.dp_shard > 1:
            return f"{self.name}: {self.dp_replicate} replicas x {self.dp_shard} shards"
        if self.num_ranks == 1:
            return f"{self.name}: one process"
        return f"{self.name}: {self.num_ranks} {'shards' if self.dp_shard > 1 else 'replicas'}"


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
}


def names() -> list[str]:
    return list(PRESETS)


def parse(text: str, num_ranks: int, ranks_per_host: int | None = None) -> Layout:
    """The layout that `text` names for `num_ranks` processes.

    An unsized name takes all ranks; a sized one (`ddp4`, `fsdp2`, `zero1x4`, `hsdp2x2`) must match them.
    Unsized hsdp shards inside a host and replicates across hosts; on one host it makes two replicas.
    """
    name, sizes = split_name(text)
    preset = PRESETS[name]
    if num_ranks < 1:
        raise StrategyError(f"a job needs at least one process; {num_ranks} were asked for.")
    if name == "single":
        if sizes:
            raise StrategyError(f"{text!r}: single takes no size; it is always one process.")
        if num_ranks != 1:
            raise StrategyError(
                f"'single' is one process, but {num_ranks} were asked for. "
                f"Use --nproc 1, or a strategy for {num_ranks} processes such as 'ddp'."
            )
        return Layout("single")
    if name == "hsdp":
        replicate, shard = _size_hsdp(text, sizes, num_ranks, ranks_per_host)
        layout = Layout(f"hsdp{replicate}x{shard}", replicate, shard, preset.zero)
    else:
        if len(sizes) > 1:
            raise StrategyError(f"{text!r}: {name} has one size, as in '{name}{_sized(name, num_ranks)}'.")
        size = sizes[0] if sizes else num_ranks
        layout = (
            Layout(name, zero=preset.zero, dp_replicate=size)
            if preset.axis == "dp_replicate"
            else Layout(name, zero=preset.zero, dp_shard=size)
        )
    if layout.num_ranks != num_ranks:
        raise StrategyError(
            f"{text!r} is a layout of {layout.num_ranks} processes, but the job has {num_ranks}. "
            f"Use --nproc {layout.num_ranks}, or {name!r} without a size, which takes all of them."
        )
    return layout


def split_name(text: str) -> tuple[str, tuple[int, ...]]:
    """'hsdp2x2' -> ('hsdp', (2, 2)); 'zero1' -> ('zero1', ()); 'zero1x4' -> ('zero1', (4,))."""
    token = text.strip().lower()
    if "," in token:
        raise StrategyError(
            f"{text!r}: compositions of data-parallel strategies are written as one name, hsdpRxS "
            f"(R replicas of S shards). Known: {', '.join(PRESETS)}."
        )
    for name in sorted(PRESETS, key=len, reverse=True):
        if token == name:
            return name, ()
        rest = token.removeprefix(name)
        if rest != token:
            if name[-1].isdigit():
                rest = rest.removeprefix("x") if rest.startswith("x") else "?"
            if re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", rest):
                return name, tuple(int(part) for part in rest.split("x"))
    raise StrategyError(f"there is no strategy {text!r}.{nearest(token, PRESETS)} Known: {', '.join(PRESETS)}.")


def natural_num_ranks(text: str) -> int | None:
    """How many processes a sized strategy asks for by itself; None when it takes what is given."""
    name, sizes = split_name(text)
    if name == "single":
        return 1
    if not sizes:
        return None
    product = 1
    for size in sizes:
        product *= size
    return product


def default_name(num_ranks: int) -> str:
    """The lowest rung that uses all processes."""
    return "single" if num_ranks == 1 else "ddp"


def _sized(name: str, size: int) -> str:
    return f"x{size}" if name[-1].isdigit() else str(size)


def _size_hsdp(text: str, sizes: tuple[int, ...], num_ranks: int, ranks_per_host: int | None) -> tuple[int, int]:
    if len(sizes) == 2:
        return sizes[0], sizes[1]
    valid = ", ".join(f"hsdp{r}x{num_ranks // r}" for r in range(1, num_ranks + 1) if num_ranks % r == 0)
    if len(sizes) == 1:
        raise StrategyError(f"{text!r}: hsdp has two sizes, replicas x shards. For {num_ranks} processes: {valid}.")
    if num_ranks == 1:
        return 1, 1
    if ranks_per_host and ranks_per_host < num_ranks and num_ranks % ranks_per_host == 0:
        return num_ranks // ranks_per_host, ranks_per_host
    if num_ranks % 2 == 0:
        return 2, num_ranks // 2
    raise StrategyError(f"hsdp cannot make two replicas of {num_ranks} processes. Give the sizes: {valid}.")
