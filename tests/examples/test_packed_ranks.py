"""The example of packed documents: no document sees another, and ranks compute what one process does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.data import default_collate

from rung.data.permutation import Permutation
from rung.spec.config import RunConfig
from rung.spec.task import Task, load_task
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import with_rung
from tests.tasks import EXAMPLES

CONFIG = RunConfig(precision="fp64", batch_size=5, device="cpu", steps=3, seed=2)
SIZES = {"train_data.count": 20, "train_data.context": 24, "train_data.longest": 40, "model.width": 8}


def packed_task() -> Task:
    task = load_task(EXAMPLES / "packed").bind(SIZES)
    parts = {"optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1), "eval_data": task.train_data}
    return replace(task, **parts)


def test_a_packed_document_gives_what_it_gives_alone() -> None:
    task = packed_task()
    data = task.train_data()
    assert sum(int((row["document"] >= 0).sum()) for row in data_rows(data)) == int(data.ends[-1])
    model = task.model().double()
    for row in data_rows(data)[:4]:
        output = model(*(row[name][None] for name in ("tokens", "position", "document")))[0]
        for number in row["document"].unique().tolist():
            own = row["document"] == number
            alone = model(*(row[name][own][None] for name in ("tokens", "position", "document")))[0]
            assert torch.allclose(output[own], alone, atol=1e-12)
            if number >= 0:
                following = data.documents[number][row["position"][own] + 1 - len(data.documents[number])]
                assert ((row["target"][own] == following) | (row["target"][own] == -100)).all()
    lost = sum(int((row["target"] == -100).sum() - (row["document"] < 0).sum()) for row in data_rows(data))
    assert lost == len(data.documents), "one token of each has none to follow"


def data_rows(data: object) -> list[dict[str, torch.Tensor]]:
    return [data[place] for place in range(len(data))]


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("cp2,ddp", 4), slow("ddp", 3), slow("zero3", 2), slow("tp2", 2), slow("pp2", 2)]
)
def test_the_numbers_of_one_process(strategy: str, ranks: int) -> None:
    task = packed_task()
    torch.manual_seed(CONFIG.seed)
    model, data = task.model().double(), task.train_data()
    optimizer, losses = task.optimizer(model), []
    places = Permutation(len(data), CONFIG.seed, shuffle=True).samples(0, 0, 15)
    for step in range(3):
        batch = default_collate([data[place] for place in places[5 * step : 5 * step + 5]])
        target = batch.pop("target")
        optimizer.zero_grad()
        loss = task.loss(model(**batch), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = on_ranks(with_rung, ranks, packed_task, strategy, CONFIG)[0]
    assert found.losses == pytest.approx(losses, abs=1e-9)
    state = dict(model.state_dict())
    assert max((torch.as_tensor(found.state[name]) - value).abs().max() for name, value in state.items()) < 1e-9
