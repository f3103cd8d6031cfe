"""Mixtures of experts written by hand, cut into tensors and stages: the numbers of a plain loop in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_fake_world
from rung.errors import StrategyError, TaskError
from rung.parallel.experts.validate import ExpertCall, prove
from rung.parallel.forward_trace import Call
from rung.parallel.tensor.plan import TensorPlan
from rung.planner.dryrun import dry_run
from rung.planner.explain.explanation import explain
from rung.runtime import build_runtime
from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import text_data, text_task

WIDTH, VOCABULARY, EXPERTS = 12, 23, 5
# Windows of 10, 10 and 5 samples, in micro-batches of 4 over all ranks, and so of one sample in the end.
CONFIG = RunConfig(
    batch_size=10, micro_batch=4, steps=4, precision="fp64", clip=0.5, device="cpu", unused_parameters="allow"
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 3)).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Chooses two experts for each row, never the last of five."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.register_buffer("favours", torch.tensor([0.0, 0.0, 0.0, 0.0, -30.0]))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = (self.score(rows) + self.favours).softmax(-1).topk(2, dim=-1)
        return weights, chosen


class Listed(nn.Module):
    """A list of experts, a linear router, and a loop with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows)
        output = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                weight = (weights * (chosen == number)).sum(-1, keepdim=True)
                output[mask] += weight[mask] * expert(rows[mask])
        return output.view_as(x)


class Stack(nn.Module):
    """The weights of all experts in three parameters; `halves` has two matrices in one, and there is a bias."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.halves = nn.Parameter(torch.randn(num_experts, 20, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(num_experts, WIDTH, 10) * 0.3)
        self.bias = nn.Parameter(torch.randn(num_experts, WIDTH) * 0.3)

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(rows)
        for number in range(self.num_experts):
            row, place = torch.where(chosen == number)
            if len(row) > 0:
                gate, up = F.linear(rows[row], self.halves[number]).chunk(2, dim=-1)
                found = F.linear(F.silu(gate) * up, self.down[number], self.bias[number])
                output = output.index_add(0, row, found * weights[row, place, None])
        return output


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Stack(EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows)
        return self.experts(rows, chosen, weights).view_as(x)


class Outlier(Stacked):
    """Experts whose results depend on all their rows: they cannot be shared out."""

    class Experts(Stack):
        def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(rows - rows.mean(0), chosen, weights)

    def __init__(self) -> None:
        super().__init__()
        self.experts = self.Experts(EXPERTS)


class Block(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mixture = Attention(), mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.mixture(self.second_norm(x))


class Balanced(Block):
    """Adds how unevenly rows choose experts to the balance of the layers before."""

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, balance = both
        shares = self.mixture.router.score(x).softmax(-1).mean((0, 1))
        return super().forward(x), balance + EXPERTS * (shares**2).sum()


class Language(nn.Module):
    def __init__(self, kind: type[nn.Module], is_balanced: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList((Balanced if is_balanced else Block)(kind()) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.is_balanced = is_balanced

    def forward(self, tokens: Tensor) -> Any:
        x: Any = self.token(tokens)
        x = (x, x.new_zeros(())) if self.is_balanced else x
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x[0]), "balance": x[1]} if self.is_balanced else self.head(x)


def language_task(kind: type[nn.Module], **changes: Any) -> Task:
    data: dict[str, Any] = {"train_data": lambda: text_data(25), "eval_data": lambda: text_data(7)}
    return text_task(model=lambda: Language(kind), **data, **changes)


def listed_task() -> Task:
    return language_task(Listed)


def stacked_task() -> Task:
    return language_task(Stacked)


def outlier_task() -> Task:
    return language_task(Outlier)


def balanced_task() -> Task:
    def loss(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + 0.1 * output["balance"]

    return replace(
        language_task(Stacked),
        model=lambda: Language(Stacked, is_balanced=True),
        loss=loss,
        metrics=lambda output, target: {"rows": torch.ones(len(target))},
    )


def difference(make_task: Callable[[], Task], strategy: str, config: RunConfig) -> tuple[float, list[str]]:
    num_ranks = required_num_ranks(strategy)
    assert num_ranks is not None
    layout = parse(strategy, num_ranks)
    config = replace(config, micro_batch=4 // layout.num_data_ranks)
    found = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    own = micro_batch_size(config, layout)
    expected = by_hand(make_task(), config, None if own is None else own * layout.num_data_ranks)
    assert {frozenset(result.state) for result in found} == {frozenset(expected.state)}
    if make_task in (balanced_task, outlier_task):  # they see a whole batch, and evaluation has other batches
        expected.evaluation = {}
    return largest_difference(expected, found[0]), found[0].notes


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        (listed_task, "tp2"),
        slow(listed_task, "tp4"),
        slow(listed_task, "pp2"),
        slow(listed_task, "fsdp2,tp2"),
        slow(listed_task, "pp2,tp2"),
        slow(listed_task, "pp2,fsdp2"),
        (stacked_task, "tp2"),
        slow(stacked_task, "tp4"),
        slow(stacked_task, "pp2"),
        (stacked_task, "fsdp2,tp2"),
        slow(stacked_task, "ddp2,tp2"),
        slow(stacked_task, "pp2,tp2"),
        slow(stacked_task, "pp2,fsdp2"),
        slow(stacked_task, "pp2:zb,tp2"),
        slow(stacked_task, "cp2,tp2"),
        slow(outlier_task, "tp2"),
        slow(balanced_task, "tp2"),
        (balanced_task, "pp2"),
        slow(balanced_task, "pp2,tp2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_numbers_of_one_process(task: Callable[[], Task], strategy: str) -> None:
    assert difference(task, strategy, CONFIG)[0] < 1e-9


@pytest.mark.parametrize("strategy", ["tp2", slow("fsdp2,tp2"), slow("pp2,tp2")])
def test_with_activation_checkpointing(strategy: str) -> None:
    assert difference(stacked_task, strategy, replace(CONFIG, activation_checkpointing="full"))[0] < 1e-9


def planned(task: Task, strategy: str = "tp2") -> tuple[TensorPlan, list[str]]:
    with open_fake_world(parse(strategy, required_num_ranks(strategy) or 1)) as world:
        runtime: Any = build_runtime(task, world, CONFIG, total_steps=1)
    assert runtime.parallel.plan is not None
    return runtime.parallel.plan, runtime.notes


def test_attention_beside_experts_is_cut_in_pairs() -> None:
    plan, notes = planned(stacked_task())
    assert "blocks.1.mixture.router.score" not in plan.styles
    assert plan.styles["blocks.1.mixture.experts"] == "experts"
    assert plan.styles["blocks.1.attention.query"] == "colwise"
    assert plan.styles["blocks.1.attention.out"] == "rowwise"
    assert any("5 whole experts of a layer shared out: blocks.*.mixture.experts" in note for note in notes)


def test_each_expert_of_a_list_is_cut() -> None:
    plan, _ = planned(listed_task())
    assert "blocks.0.mixture.router.score" not in plan.styles
    assert plan.styles["blocks.0.mixture.experts.4.0"] == "colwise"
    assert plan.styles["blocks.0.mixture.experts.4.2"] == "rowwise"


@pytest.mark.parametrize(
    ("task", "strategy", "reason"),
    [
        (outlier_task, "tp2", "is not the sum over parts"),
        (stacked_task, "tp8", "5 experts"),
    ],
    ids=["mixes rows", "few experts"],
)
def test_experts_that_ranks_cannot_share_are_left_whole(task: Callable[[], Task], strategy: str, reason: str) -> None:
    plan, notes = planned(task(), strategy)
    assert "blocks.0.mixture.experts" not in plan.styles
    assert any("blocks.*.mixture.experts: left whole: " in note and reason in note for note in notes)
    given = replace(task(), tensor_parallel={"blocks.*.mixture.experts": "experts"})
    with pytest.raises(TaskError, match=rf"ranks cannot share the experts of blocks\.0\.mixture\.experts: .*{reason}"):
        planned(given, strategy)


class Wide(nn.Module):
    """Too large for a proof in full size. It counts on its own numbers of experts and features."""

    def __init__(self, *, mixes: bool) -> None:
        super().__init__()
        self.num_experts, self.width, self.mixes = 8, 1024, mixes
        self.up = nn.Parameter(torch.empty(8, 384, 1024, device="meta"))
        self.down = nn.Parameter(torch.empty(8, 1024, 384, device="meta"))

    def forward(self, rows: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        hidden = rows.view(-1, 1, self.width, 1)
        if self.mixes:
            hidden = hidden - hidden.mean(0)
        assert len(self.up) == self.num_experts
        found = self.down[chosen] @ F.gelu(self.up[chosen] @ hidden)
        return (found.view(*chosen.shape, self.width) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize("mixes", [False, True])
def test_large_experts_are_proven_with_smaller_matrices(mixes: bool) -> None:
    module = Wide(mixes=mixes)
    rows, chosen = torch.empty(6, 1024, device="meta"), torch.empty(6, 2, dtype=torch.int64, device="meta")
    call = Call(0, "experts", module, (rows, chosen, torch.empty(6, 2, device="meta")), {}, output=rows)
    found = prove(call, 2)
    assert isinstance(found, str) if mixes else isinstance(found, ExpertCall)
    assert module.width == 1024  # the proof has changed nothing


def test_a_plan_has_the_messages_and_the_memory_of_shared_experts() -> None:
    """The rows of all samples, in float32: of each block the results of attention and of experts in forward, the
    gradients that enter both in backward, and those of two weights for each row; of embedding and head one each."""
    config = RunConfig(batch_size=10, device="cpu")
    whole, shared = (dry_run(stacked_task(), parse(name, size), config) for name, size in (("single", 1), ("tp2", 2)))
    sizes = Counter(message.num_bytes for message in shared.trace.messages(shared.second_step))
    num_rows = 10 * 6
    assert sizes[num_rows * WIDTH * 4] == 2 * 4 + 2
    assert sizes[num_rows * 2 * 4] == 2 + 1  # and two numbers for each row's loss
    assert shared.state_bytes["parameters"] < 0.7 * whole.state_bytes["parameters"]


@pytest.mark.parametrize("task", [stacked_task, slow(listed_task)], ids=lambda value: value.__name__)
def test_explain_shows_how_experts_are_cut(task: Callable[[], Task]) -> None:
    found = explain(task(), parse("pp2,tp2", 4), replace(CONFIG, precision="fp32"))
    name = "experts.down" if task is stacked_task else "experts.1.2.weight"
    places = [place for place in found.ranks[0].parameters if place.name == f"blocks.0.mixture.{name}"]
    assert [place.cut for place in places] == [{"tp": 0 if task is stacked_task else 1}]


def test_a_task_may_name_experts() -> None:
    plan, _ = planned(replace(stacked_task(), tensor_parallel={"blocks.*.mixture.experts": "experts"}))
    assert set(plan.styles) == {"blocks.0.mixture.experts", "blocks.1.mixture.experts"}
    with pytest.raises(TaskError, match=r"blocks\.0\.attention is a Attention and cannot be experts"):
        planned(replace(stacked_task(), tensor_parallel={"blocks.*.attention": "experts"}))
    with pytest.raises(StrategyError, match="finds nothing to shard"):
        planned(replace(stacked_task(), tensor_parallel={"blocks.*.mixture.experts": "whole"}))


CHAIN = [("tp2", 2, 2), ("fsdp2,tp2", 4, 4), ("single", 1, 5), ("zero3", 2, 6), ("pp2,tp2", 4, 8)]


@pytest.mark.parametrize("task", [stacked_task, slow(listed_task)], ids=lambda value: value.__name__)
def test_checkpoints_go_from_any_strategy_to_any(tmp_path: Path, task: Callable[[], Task]) -> None:
    config = replace(CONFIG, micro_batch=None, steps=8, eval_every="never")
    losses, state = legs(task, config, tmp_path / "legs", CHAIN)
    whole_losses, whole = legs(task, config, tmp_path / "whole", [("single", 1, 8)])
    assert losses == pytest.approx(whole_losses, abs=1e-9)
    assert max(float((state[name] - whole[name]).abs().max()) for name in whole) < 1e-9
