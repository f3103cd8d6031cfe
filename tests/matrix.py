"""The parity matrix: what is proven to give the same numbers as one process. The README's table is made from it."""

from __future__ import annotations

from dataclasses import dataclass

from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse

MODELS = {
    "babycnn": "BabyCNN, batch norm sync",
    "gpt": "GPT, tied weights",
    "experts": "mixture of experts, tied weights",
}
BATCH_SIZE = 49  # of 103 samples: ragged on every number of ranks, and a last window of 5
GLOBAL_MICRO_BATCH = 24  # three micro-batches of 24, 24 and 1: the last is empty on all ranks but one

# Strategies that take any number of processes, and with how many they are run.
FREE = {
    "single": (1,),
    "ddp": (1, 2, 4),
    "zero1": (1, 2, 4),
    "zero2": (1, 2, 4),
    "zero3": (1, 2, 4),
    "hsdp": (1, 2, 4),
}
# Strategies that cut the model itself. Their sizes are part of the name.
COMPOSED = (
    "tp2",
    "tp4",
    "ddp2,tp2",
    "zero1x2,tp2",
    "zero2x2,tp2",
    "fsdp2,tp2",
    "pp2",
    "pp2:gpipe",
    "pp2:interleaved",
    "pp2:zb",
    "pp4",
    "pp4:zb",
    "pp2,ddp2",
    "pp2,zero1x2",
    "pp2,zero2x2",
    "pp2,fsdp2",
    "pp2:interleaved,fsdp2",
    "pp2:zb,fsdp2",
    "pp2,tp2",
    "cp2",
    "cp4",
    "ddp2,cp2",
    "zero1x2,cp2",
    "fsdp2,cp2",
    "cp2,tp2",
    "pp2,cp2",
    "ep2",
    "ep4",
    "ddp4,ep2",
    "zero1x4,ep2",
    "zero2x4,ep2",
    "fsdp2,ep2",
    "fsdp4,ep2",
    "rpc-pp2",
    "rpc-pp4",
)
# One process with several replicas. Their batch norms are their own, so the convolutional model is not among these.
DEVICES = ("dp2", "dp4")
# With servers, one of the processes.
SERVED = {"ps": (2, 4), "ddp+ps": (3,)}
_WITH_CONVOLUTIONS = (
    "tp2", "pp2", "pp2:interleaved", "pp2:zb", "pp4", "pp2,ddp2", "pp2,fsdp2", "pp2,tp2", "rpc-pp2", "rpc-pp4",
)  # fmt: skip
# Eight processes: one model is enough.
LARGE = ("hsdp2x2,tp2", "pp2,hsdp2x2", "pp2,fsdp2,tp2", "hsdp2x2,cp2", "pp2,fsdp2,cp2", "pp2,fsdp4,ep2")


def is_run(strategy: str, model: str) -> bool:
    """Whether the matrix has the model under the strategy."""
    if model == "experts":
        return strategy in ("single", "ddp", "zero1", "zero3") or "ep" in strategy
    if model == "babycnn" and strategy in (*COMPOSED, *LARGE):
        return strategy in _WITH_CONVOLUTIONS
    return "ep" not in strategy


@dataclass(frozen=True)
class Row:
    strategy: str
    model: str
    num_ranks: int
    accumulates: bool

    @property
    def is_slow(self) -> bool:
        """Whether `make test` leaves it to `make test-all`."""
        if self.num_ranks == 1:
            return self.strategy not in ("single", *DEVICES) or self.model == "experts"
        if self.model == "experts":
            return not self.accumulates or self.strategy not in ("ep2", "ep4", "fsdp4,ep2")
        if self.model == "babycnn" and self.strategy in SERVED and self.accumulates:
            return True
        if self.num_ranks == 2:
            return self.strategy == "ps" or self.accumulates != (self.model == "gpt")
        if self.num_ranks == 4:
            if self.strategy in ("cp4", "ddp2,cp2", "zero1x2,cp2"):  # cp2 and fsdp2,cp2 are run
                return True
            return self.model == "babycnn" or not self.accumulates  # two ranks have rows of both
        return self.num_ranks == 8

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.model}-{self.num_ranks}ranks{'-accumulated' if self.accumulates else ''}"

    @property
    def layout(self) -> Layout:
        return parse(self.strategy, self.num_ranks)

    @property
    def micro_batch(self) -> int | None:
        return max(1, GLOBAL_MICRO_BATCH // self.layout.num_data_ranks) if self.accumulates else None

    @property
    def global_micro_batch(self) -> int | None:
        """What one process has to take at a time to see the same micro-batches."""
        own = micro_batch_size(RunConfig(batch_size=BATCH_SIZE, micro_batch=self.micro_batch), self.layout)
        return None if own is None else own * self.layout.num_data_ranks


def _num_ranks(strategy: str) -> int:
    from rung.spec.strategy import required_num_ranks

    return required_num_ranks(strategy) or 1


ROWS = [
    *(
        Row(strategy, model, size, accumulates)
        for strategy, sizes in FREE.items()
        for model in MODELS
        for size in sizes
        for accumulates in (False, True)
        if is_run(strategy, model)
    ),
    # A pipeline always has several micro-batches, and the convolutional model has one matrix to cut.
    *(
        Row(strategy, model, _num_ranks(strategy), accumulates)
        for strategy in COMPOSED
        for model in MODELS
        for accumulates in (False, True)
        if accumulates or (model == "gpt" and strategy in ("tp2", "fsdp2,tp2", "pp2", "pp4"))
        if is_run(strategy, model)
    ),
    *(
        Row(strategy, model, size, accumulates)
        for strategy, sizes in SERVED.items()
        for model in MODELS
        for size in sizes
        for accumulates in (False, True)
        if is_run(strategy, model)
    ),
    *(Row(strategy, model, 8, True) for strategy in LARGE for model in MODELS if is_run(strategy, model)),
    *(Row(strategy, "gpt", 1, accumulates) for strategy in DEVICES for accumulates in (False, True)),
]


def support_table() -> str:
    """The matrix as Markdown: for each strategy and model the numbers of processes it is proven for."""
    lines = [
        "| strategy | " + " | ".join(MODELS.values()) + " | accumulation |",
        "|---|" + "---|" * (len(MODELS) + 1),
    ]
    for strategy in (*FREE, *DEVICES, *SERVED, *COMPOSED, *LARGE):
        cells = []
        for model in MODELS:
            sizes = sorted({row.num_ranks for row in ROWS if (row.strategy, row.model) == (strategy, model)})
            words = " process" if sizes == [1] else " processes"
            cells.append(", ".join(map(str, sizes)) + words if sizes else "-")
        counts = {row.accumulates for row in ROWS if row.strategy == strategy}
        shown = "with and without" if len(counts) == 2 else "with" if True in counts else "without"
        if strategy not in SERVED and parse(strategy, _num_ranks(strategy)).pp > 1:
            shown = "always"
        lines.append(f"| `{strategy}` | " + " | ".join(cells) + f" | {shown} |")
    return "\n".join(lines)
