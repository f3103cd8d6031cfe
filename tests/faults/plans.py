"""Which jobs suffer which faults, as data: a table of jobs, and plans drawn from it by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.harness import COMPARABLE, STEPS_PER_EPOCH

NUM_EPOCHS = 6
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
ALL_PHASES = ("building", "step", "evaluation", "save", "resume", "end")


@dataclass(frozen=True)
class Setting:
    """How jobs are started, and how close their weights have to come to those of the run without faults."""

    arguments: tuple[str, ...]
    tolerance: float | None  # 0 is bit by bit; None: compared by what was trained on, and by the loss
    num_faults: int  # in a job
    pause: float = 0.02  # in each forward


SETTINGS = {
    "local": Setting(("--precision", "fp64", "--timeout", "20"), 0.0, 12),
    "replicated": Setting(("--precision", "fp64", "--timeout", "20", "--replicate-state"), 0.0, 12),
    # Faults after which the job goes on in other micro-batches, or that only a short timeout finds.
    "comparable": Setting((*COMPARABLE, "--timeout", "6"), 1e-9, 6),
    "async": Setting((*COMPARABLE, "--timeout", "20", "--staleness", "3"), None, 8),
    # Slow enough that a machine which comes back, and imports torch for seconds, finds the job at work.
    "machines": Setting((*COMPARABLE, "--timeout", "5"), 1e-9, 4, pause=0.15),
}


@dataclass(frozen=True)
class Row:
    """A job that faults can hit."""

    strategy: str
    num_ranks: int
    setting: str = "local"
    num_servers: int = 0
    num_hosts: int = 1
    shares_disk: bool = False

    @property
    def name(self) -> str:
        return self.strategy if self.num_hosts == 1 else f"{self.strategy} on {self.num_hosts} machines"

    @property
    def arguments(self) -> list[str]:
        per_host = self.num_ranks // self.num_hosts
        nodes = ["--nnodes", f"1:{self.num_hosts}"] if self.num_hosts > 1 else []
        epochs = ["--epochs", str(NUM_EPOCHS)]
        return [*epochs, *nodes, *SETTINGS[self.setting].arguments, "--nproc", str(per_host)]

    @property
    def computing(self) -> range:
        """The ranks that run the task's forward."""
        return range(self.num_servers, self.num_ranks)

    @property
    def updating(self) -> range:
        """The ranks that run the task's optimizer."""
        return range(self.num_servers) if self.num_servers else range(self.num_ranks)


ROWS = (
    Row("ddp", 2),
    Row("zero1", 2),
    Row("pp2:gpipe", 2),
    Row("ps", 3, num_servers=1),
    Row("zero2", 2),
    Row("pp2:zb", 2),
    Row("hsdp2x2", 4),
    Row("ddp", 2, "machines", num_hosts=2),
    Row("zero3", 2, "replicated"),
    Row("tp2", 2),
    Row("pp2:1f1b", 2),
    Row("ps-async", 4, "async", num_servers=1),
    Row("pp2,ddp2", 4),
    Row("zero3", 2),
    Row("zero3", 2, "machines", num_hosts=2),
    Row("pp2:interleaved", 2),
    Row("ddp", 2, "comparable"),
    Row("rpc-pp2", 2),
    Row("fsdp2,tp2", 4),
    Row("single", 1),
    Row("ddp+ps", 3, num_servers=1),
    Row("zero3", 2, "machines", num_hosts=2, shares_disk=True),
    Row("pp2,fsdp2", 4),
    Row("pp2:1f1b", 2, "replicated"),
    Row("pp2,tp2", 4),
    Row("pp2:1f1b", 2, "comparable"),
    Row("ddp", 3),
    Row("ddp", 2, "machines", num_hosts=2, shares_disk=True),
    Row("pp2:zb,fsdp2", 4),
    Row("zero1", 2, "replicated"),
    Row("zero3", 2, "comparable"),
)


@dataclass(frozen=True)
class PlannedFault:
    kind: str
    phase: str
    step: int  # after which it strikes, at the first moment in its phase


@dataclass(frozen=True)
class JobPlan:
    """One job, all that chance decides about it drawn already. The same seed gives the same job, moment by moment as
    far as a machine repeats itself."""

    number: int
    row: Row
    faults: tuple[PlannedFault, ...]
    salt: str = "0"


def draw_plans(seed: int, pairs: dict[str, list[tuple[str, str]]]) -> Iterator[JobPlan]:
    """Jobs without end: each row in turn, each kind and phase of `pairs` (by setting) equally often in random order."""
    chance = random.Random(seed)
    bags: dict[str, list[tuple[str, str]]] = {}
    number = 0
    while True:
        row = ROWS[number % len(ROWS)]
        wanted, chosen = SETTINGS[row.setting].num_faults, []
        bag = bags.setdefault(row.setting, [])
        while len(chosen) < wanted:
            if not bag:
                bag += chance.sample(pairs[row.setting], len(pairs[row.setting]))
            chosen.append(bag.pop())
        yield JobPlan(number, row, order_faults(chosen, chance), salt=f"{seed}-{number}")
        number += 1


def order_faults(chosen: list[tuple[str, str]], chance: random.Random) -> tuple[PlannedFault, ...]:
    """Moments for faults: while the job is built first, at its end last, the others at random steps in between."""
    first = [PlannedFault(kind, phase, 0) for kind, phase in chosen if phase == "building"]
    last = [PlannedFault(kind, phase, NUM_STEPS) for kind, phase in chosen if phase == "end"]
    others = [pair for pair in chosen if pair[1] not in ("building", "end")]
    steps = sorted(chance.randrange(1, NUM_STEPS - STEPS_PER_EPOCH) for _ in others)
    between = [PlannedFault(kind, phase, step) for (kind, phase), step in zip(others, steps, strict=True)]
    return (*first, *between, *last)
