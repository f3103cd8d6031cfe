"""Models whose blocks decide by the values of tensors: which rows an expert gets, how often a layer runs.

Under stages and cut tensors they give the numbers of a plain loop in float64, or a refusal with the line that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_fake_world
from rung.errors import TaskError
from rung.parallel.tensor.plan import TensorPlan
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.runtime.test_habits_ranks import make_task

WIDTH, EXPERTS = 8, 5
# An expert that no row has chosen gets no gradient.
CONFIG = RunConfig(batch_size=10, steps=4, precision="fp64", device="cpu", unused_parameters="allow")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output


class Routed(nn.Module):
    """Every row goes to two of five experts; some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        best, choice = self.router(x).softmax(-1).topk(2, dim=-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (choice == number).nonzero(as_tuple=True)
            if rows.numel() == 0:
                continue
            output.index_add_(0, rows, expert(x[rows]) * best[rows, place, None])
        return x + output


class Masked(Routed):
    """The same by masks, with one expert for a row."""

    def forward(self, x: Tensor) -> Tensor:
        best, choice = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = choice == number
            if mask.any():
                output[mask] += best[mask].unsqueeze(-1) * expert(x[mask])
        return x + output


class Listed(Routed):
    """The same by a list of the experts that rows have chosen."""

    def forward(self, x: Tensor) -> Tensor:
        best, choice = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number in choice.unique().tolist():
            rows = torch.where(choice == number)[0]
            output = output.index_copy(0, rows, best[rows, None] * self.experts[number](x[rows]))
        return x + output


class Empty(Routed):
    """An expert without rows runs all the same, on none."""

    def forward(self, x: Tensor) -> Tensor:
        best, choice = self.router(x).softmax(-1).max(-1)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            output[choice == number] = expert(x[choice == number])
        return x + best[:, None] * output


class Inline(nn.Module):
    """Layers of the block itself, on the rows that count: no pair of them may be cut where values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        counts = x[:, 0] > -0.3
        hidden = F.gelu(self.up(x[counts]))
        if hidden.abs().max() > 0.7:
            hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        output = torch.zeros_like(x)
        output[counts] = self.down(hidden)
        return x + output


class Repeated(nn.Module):
    """Runs a layer as often as the largest value says, and refuses what is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Expert()

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        for _ in range(int(x.abs().max().clamp(1, 4).item())):
            x = x + 0.5 * self.inner(x)
        return x


class Shortening(Inline):
    """Returns the rows that count alone: the next stage cannot know how many."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return output[x[:, 0] > -0.3]


class Counting(Inline):
    """Returns a number that the next stage would need."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.down(F.gelu(self.up(x))), int((x[:, 0] > 0).sum())


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList([kind() for _ in range(2)])
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = 2 * self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
            if isinstance(hidden, tuple):
                hidden = hidden[0] / (1 + hidden[1])
        output: Tensor = self.last(hidden)
        return output if len(output) == len(x) else output.mean(0, keepdim=True).expand(len(x), -1)


def routed_task() -> Task:
    return make_task(lambda: Model(Routed))


def masked_task() -> Task:
    return make_task(lambda: Model(Masked))


def listed_task() -> Task:
    return make_task(lambda: Model(Listed))


def empty_task() -> Task:
    return make_task(lambda: Model(Empty))


def inline_task() -> Task:
    return make_task(lambda: Model(Inline))


def repeated_task() -> Task:
    return make_task(lambda: Model(Repeated))


def shortening_task() -> Task:
    return make_task(lambda: Model(Shortening))


def counting_task() -> Task:
    return make_task(lambda: Model(Counting))


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        (routed_task, "pp2"),
        slow(routed_task, "tp2"),
        slow(routed_task, "pp2:zb"),
        slow(routed_task, "pp2,tp2"),
        slow(routed_task, "zero2x2,tp2"),
        slow(masked_task, "pp2"),
        (masked_task, "tp2"),
        (listed_task, "pp2"),
        slow(listed_task, "tp2"),
        (empty_task, "tp2"),
        slow(inline_task, "pp2"),
        (inline_task, "tp2"),
        (repeated_task, "pp2:zb"),
        slow(repeated_task, "tp2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_blocks_that_decide_by_values(task: Callable[[], Task], strategy: str) -> None:
    num_ranks = 4 if "," in strategy else 2
    data_ranks = 2 if "zero2" in strategy else 1
    config = replace(CONFIG, micro_batch=5 // data_ranks) if "pp" in strategy else CONFIG
    expected = by_hand(task(), config, config.micro_batch)
    expected.evaluation = {}  # by hand it is one batch, and how often a layer runs depends on the batch
    found = on_ranks(with_rung, num_ranks, task, strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9


def test_layers_are_cut_in_pairs_only_where_no_value_decides() -> None:
    styles = [planned_styles(task) for task in (routed_task, inline_task)]
    for number in range(EXPERTS):
        assert styles[0][f"blocks.1.experts.{number}.up"] == "colwise"
        assert styles[0][f"blocks.1.experts.{number}.down"] == "rowwise"
    assert styles[1]["blocks.1.up"] == styles[1]["blocks.1.down"] == "colwise_gather"


def test_a_given_plan_may_not_leave_a_result_in_parts_where_values_decide() -> None:
    def task() -> Task:
        return replace(inline_task(), tensor_parallel={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})

    with pytest.raises(TaskError, match=r"test_values_ranks\.py:\d+: [\s\S]*branches on tensor values here"):
        planned_styles(task)


class Positions(nn.Module):
    """The samples as sequences, through a gated layer whose gate opens where any position is large."""

    class Gated(nn.Module):
        def __init__(self, decides: bool) -> None:
            super().__init__()
            self.norm, self.inner, self.decides = nn.LayerNorm(WIDTH), Expert(), decides

        def forward(self, x: Tensor) -> Tensor:
            added: Tensor = self.inner(self.norm(x))
            return x + 2 * added if self.decides and x.max() > 1 else x + added

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList([self.Gated(decides) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:, :, None])
        for block in self.blocks:
            hidden = block(hidden)
        output: Tensor = self.last(hidden.mean(1))
        return output


def test_sequences_are_not_cut_where_values_decide() -> None:
    config = replace(CONFIG, sequence_parallel=True)
    free, deciding = (make_plan(lambda kind=kind: make_task(lambda: Positions(kind)), config) for kind in (False, True))
    assert free.sequence_blocks == ("blocks.0", "blocks.1")
    assert deciding.sequence_blocks == ()
    assert any("sequence parallelism is off. blocks.1: it branches on values" in note for note in deciding.notes)


def planned_styles(task: Callable[[], Task]) -> Mapping[str, str]:
    return make_plan(task, CONFIG).styles


def make_plan(task: Callable[[], Task], config: RunConfig) -> TensorPlan:
    with open_fake_world(parse("tp2", 2)) as world:
        plan = build_runtime(task(), world, config, total_steps=1).parallel.plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (
            shortening_task,
            r"test_values_ranks\.py:\d+: return output\[.*\]\s+blocks\.0 branches on tensor values.*padded",
        ),
        (
            counting_task,
            r"test_values_ranks\.py:\d+: return .*int\(.*\s+blocks\.0 branches on tensor values.*no numbers",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_result_whose_form_depends_on_values_is_refused_between_stages(task: Callable[[], Task], words: str) -> None:
    config = replace(CONFIG, micro_batch=5, split="blocks.1")
    with pytest.raises(RankFailed, match=words):
        on_ranks(with_rung, 2, task, "pp2", config)


def test_such_a_result_may_come_from_the_last_stage() -> None:
    config = replace(CONFIG, micro_batch=5, split="blocks.0")
    expected = by_hand(counting_task(), config, 5)
    expected.evaluation = {}
    found = on_ranks(with_rung, 2, counting_task, "pp2", config)
    assert largest_difference(expected, found[0]) < 1e-9
