"""The parity matrix: what is proven to give the same numbers as one process. The README's table is made from it."""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")
MODELS = {"babycnn": "BabyCNN, batch norm sync", "gpt": "GPT, tied weights"}
SIZES = (1, 2, 4)
ACCUMULATION = (1, 3)
BATCH_SIZE = 25  # of 103 samples: ragged on every number of ranks, and a last window of 3


@dataclass(frozen=True)
class Row:
    strategy: str
    model: str
    num_ranks: int
    accumulation: int

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.model}-{self.num_ranks}ranks-x{self.accumulation}"

    @property
    def global_micro_batch(self) -> int | None:
        """Three micro-batches of 12, 12 and 1: the last is empty on all ranks but one."""
        return None if self.accumulation == 1 else 12

    @property
    def micro_batch(self) -> int | None:
        return None if self.global_micro_batch is None else self.global_micro_batch // self.num_ranks


ROWS = [
    Row(strategy, model, size, accumulation)
    for strategy in STRATEGIES
    for model in MODELS
    for size in SIZES
    for accumulation in ACCUMULATION
    if strategy != "single" or size == 1
]


def support_table() -> str:
    """The matrix as Markdown: for each strategy and model the numbers of processes it is proven for."""
    lines = [
        "| strategy | " + " | ".join(MODELS.values()) + " | accumulation |",
        "|---|" + "---|" * (len(MODELS) + 1),
    ]
    for strategy in STRATEGIES:
        cells = []
        for model in MODELS:
            sizes = sorted({row.num_ranks for row in ROWS if (row.strategy, row.model) == (strategy, model)})
            cells.append(", ".join(map(str, sizes)) + (" process" if sizes == [1] else " processes"))
        counts = sorted({row.accumulation for row in ROWS if row.strategy == strategy})
        lines.append(f"| `{strategy}` | " + " | ".join(cells) + f" | {', '.join(map(str, counts))} |")
    return "\n".join(lines)
