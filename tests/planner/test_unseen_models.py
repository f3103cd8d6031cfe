"""What a plan without the GPU knows of operations that few models have. Sizes are those seen on an H200."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.errors import ModelError
from rung.hardware.cluster import devices, parse_cluster
from rung.planner.cost import duration
from rung.planner.dryrun import DryRun, dry_run, whole_state
from rung.planner.estimate import Estimator
from rung.planner.plan import make_plan
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task

STEPS, BATCH, WIDTH = 16, 4, 32


def make_task(model: nn.Module, optimizer: Any = torch.optim.SGD) -> Task:
    def data() -> Any:
        return TensorDataset(torch.randn(BATCH, STEPS, WIDTH), torch.randn(BATCH, STEPS, WIDTH))

    def loss(output: Any, target: Tensor) -> Tensor:
        return F.mse_loss(output[0] if isinstance(output, tuple) else output, target)

    return Task(lambda: model, data, loss, lambda model: optimizer(model.parameters()))


def traced(task: Task) -> DryRun:
    return dry_run(task, parse("single", 1), RunConfig(batch_size=BATCH), device="cuda")


@pytest.mark.parametrize(
    ("layers", "each"),
    [
        (nn.LSTM(WIDTH, WIDTH, batch_first=True), 5),
        (nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True), 11),
        (nn.GRU(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True), 13),
    ],
    ids=["lstm", "lstm of two", "gru of two, both ways"],
)
def test_recurrent_layers_keep_what_cudnn_reserves(layers: nn.Module, each: int) -> None:
    """So many values for each of the result."""
    run = traced(make_task(layers))
    kept = [a for a in run.trace.allocations if a.num_bytes == each * 4 * STEPS * BATCH * WIDTH]
    assert kept and all(a.kind == "activations" for a in kept)
    products = sum(work.name == "mm" for work in run.trace.works()[-10000:])
    assert products >= STEPS, "each time step waits for the one before"


class GroupedQueries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).view(BATCH, STEPS, 4, -1).transpose(1, 2)
        key = self.key(x).view(BATCH, STEPS, 2, -1).transpose(1, 2)
        found = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        return found.transpose(1, 2).reshape(x.shape)


def test_in_full_precision_queries_that_share_keys_keep_their_weights() -> None:
    names = {work.name for work in traced(make_task(GroupedQueries())).trace.works()}
    assert "_scaled_dot_product_efficient_attention" not in names
    assert {"_softmax", "isneginf", "where"} <= names


class DropsLayers(nn.Module):
    """As OPT and mBART drop whole layers, by a number that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and torch.rand([]) < 0.1):
                x = layer(x)
        return x


def test_layers_that_are_dropped_by_chance_can_be_planned() -> None:
    assert sum(work.name == "addmm" for work in traced(make_task(DropsLayers())).trace.works()) >= 3


def test_optimizers_that_read_norms_can_be_planned() -> None:
    task = make_task(nn.Linear(WIDTH, WIDTH), torch.optim.Adafactor)
    found = Estimator(task, RunConfig(batch_size=BATCH), parse_cluster("1xH200"), 0)
    assert found.estimate(parse("single", 1), "none", BATCH).memory.state["optimizer"] > 0


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(STEPS, STEPS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def test_only_matrix_products_take_the_workspaces_of_cublas() -> None:
    kinds = []
    for model in (nn.Linear(WIDTH, WIDTH), Convolutions()):
        estimator = Estimator(make_task(model), RunConfig(batch_size=BATCH), parse_cluster("1xH200"), 0)
        kinds.append(estimator.estimate(parse("single", 1), "none", BATCH).memory.by_kind)
    assert ["workspaces" in one for one in kinds] == [True, False]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).masked_fill(torch.ones(WIDTH, dtype=torch.bool), 0.0)


def test_a_mask_for_all_rows_is_a_copy_and_a_kernel_that_reads_one_by_one() -> None:
    run = traced(make_task(Masked()))
    works = [work for work in run.trace.works() if work.phase == "forward"]
    place = next(index for index, work in enumerate(works) if work.name == "masked_fill_")
    assert works[place - 1].name == "clone" and works[place - 1].pieces == 0
    assert works[place].pieces == BATCH * STEPS * WIDTH
    assert not any(work.name == "masked_fill" for work in works)
    h200 = devices()["H200"]
    alike = replace(works[place], pieces=10**8, num_bytes=8 * 10**8)
    assert duration(alike, h200)[0] > 1.3 * duration(replace(alike, pieces=0), h200)[0]


def test_a_frozen_model_has_no_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    for layer in model[:3]:
        layer.requires_grad_(False)
    state = whole_state(make_task(model, torch.optim.Adam), RunConfig(batch_size=BATCH), "cuda")
    each = 4 * WIDTH * WIDTH
    assert state["parameters"] == 4 * each and state["gradients"] == each
    assert 2 * each <= state["optimizer"] <= 2 * each + 16  # and a count of steps


class OnlyItsOwn(torch.optim.SGD):
    """Refuses gradients that its model did not compute, as SparseAdam refuses dense ones."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if any(
                parameter.grad.grad_fn is None and not hasattr(parameter, "was_used") for parameter in group["params"]
            ):
                raise RuntimeError("these gradients come from nowhere")
        super().step()


class Marked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.was_used = self.bias.was_used = True  # type: ignore[attr-defined]
        return super().forward(x)


def test_an_optimizer_that_refuses_made_up_gradients_can_be_planned() -> None:
    state = whole_state(make_task(Marked(WIDTH, WIDTH), OnlyItsOwn), RunConfig(batch_size=BATCH), "cuda")
    assert state["parameters"] == 4 * (WIDTH + 1) * WIDTH


def test_a_model_that_cannot_be_built_is_told_and_not_by_a_traceback() -> None:
    def model() -> nn.Module:
        raise ValueError("no such size: huge")

    with pytest.raises(ModelError, match=r"(?s)def test_a_model|raise ValueError.*no such size: huge"):
        make_plan(
            replace(make_task(nn.Linear(1, 1)), model=model), RunConfig(batch_size=BATCH), parse_cluster("1xH200")
        )
