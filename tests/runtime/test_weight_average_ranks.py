"""`--ema` and `--swa-start`: torch's averages of a plain loop, everywhere, in evaluations, checkpoints and exports."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import default_collate

from rung.cli.main import main
from rung.data.permutation import Permutation
from rung.distributed.world import open_world
from rung.errors import ConfigError
from rung.launch.spawn import on_ranks
from rung.runtime import build_runtime
from rung.spec.compatibility import validate_config
from rung.spec.config import RunConfig, check
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.worker import make_batches, make_eval_batches
from tests.checkpoints import legs
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import TASKS, text_task

BASE: dict[str, Any] = {"batch_size": 10, "steps": 4, "precision": "fp64", "device": "cpu", "ema": 0.8}


def averaged_by_hand(task: Task, config: RunConfig) -> tuple[dict[str, torch.Tensor], float]:
    """torch's AveragedModel beside a plain loop, and the loss of the average over the evaluation data."""
    torch.manual_seed(config.seed)
    model = task.model().double()
    decayed = {"multi_avg_fn": get_ema_multi_avg_fn(config.ema)} if config.ema is not None else {}
    average = AveragedModel(model, **decayed)
    optimizer, data = task.optimizer(model), task.train_data()
    order = Permutation(len(data), config.seed, shuffle=True)
    per_epoch = -(-len(data) // config.batch_size)
    schedule = task.schedule(optimizer, config.steps) if task.schedule else None
    for step in range(config.steps or 0):
        epoch, within = divmod(step, per_epoch)
        first = within * config.batch_size
        samples = order.samples(epoch, first, min(first + config.batch_size, len(data)))
        inputs, target = default_collate([data[i] for i in samples])
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        optimizer.zero_grad()
        task.loss(model(inputs), target).backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if step + 1 >= (config.swa_start or 1) and step % config.ema_every == 0:
            average.update_parameters(model)
    module = average.module.eval()
    for name, buffer in model.named_buffers():
        module.get_buffer(name).copy_(buffer)
    held_out = task.eval_data()
    inputs, target = default_collate([held_out[i] for i in range(len(held_out))])
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    with torch.no_grad():
        return module.state_dict(), task.loss(module(inputs), target).item()


@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [
        ("single", 1, "adamw"),
        ("ddp", 2, "babycnn"),
        ("zero1", 2, "adamw"),
        ("zero3", 3, "gpt"),
        ("tp2", 2, "gpt"),
        ("pp2,fsdp2", 4, "gpt"),
        slow("zero2", 2, "adamw"),
        slow("hsdp2x2", 4, "text"),
        slow("pp2", 2, "gpt"),
        slow("dp", 1, "text"),
        slow("pp2,zero1x2", 4, "gpt"),
        ("ps", 3, "gpt"),
        slow("ddp+ps", 3, "gpt"),
        slow("ddp+ps", 3, "babycnn"),
        slow("rpc-pp", 2, "gpt"),
    ],
)
def test_the_average_is_that_of_a_plain_loop(strategy: str, ranks: int, model: str) -> None:
    chosen = RunConfig(**BASE)
    _, loss = averaged_by_hand(TASKS[model](), chosen)
    expected = by_hand(TASKS[model](), chosen)
    assert abs(loss - expected.evaluation["loss"]) > 1e-6  # or this test could not tell them apart
    found = on_ranks(with_rung, ranks, TASKS[model], strategy, chosen)[0] if ranks > 1 else None
    found = found or with_rung(TASKS[model], strategy, chosen)
    assert found.evaluation["loss"] == pytest.approx(loss, abs=1e-9)
    found.evaluation = expected.evaluation  # of other weights
    assert largest_difference(expected, found) < 1e-9, "training goes on with its own weights"


def test_the_own_weights_can_be_evaluated() -> None:
    chosen = RunConfig(**BASE, eval_weights="own")
    assert largest_difference(by_hand(TASKS["text"](), chosen), with_rung(TASKS["text"], "single", chosen)) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "ranks", "model"),
    [
        ("single", 1, "adamw"),
        ("zero3", 2, "gpt"),
        ("tp2", 2, "gpt"),
        slow("ddp", 2, "babycnn"),
        slow("pp2", 2, "gpt"),
        slow("zero1", 2, "adamw"),
        slow("pp2,fsdp2", 4, "gpt"),
        ("ddp+ps", 3, "gpt"),
        slow("ps", 3, "adamw"),
        slow("rpc-pp", 2, "gpt"),
    ],
)
def test_the_equal_average_is_that_of_a_plain_loop(strategy: str, ranks: int, model: str) -> None:
    chosen = RunConfig(**{**BASE, "ema": None, "swa_start": 2})
    _, loss = averaged_by_hand(TASKS[model](), chosen)
    expected = by_hand(TASKS[model](), chosen)
    _, from_the_first = averaged_by_hand(TASKS[model](), replace(chosen, swa_start=1))
    assert min(abs(loss - expected.evaluation["loss"]), abs(loss - from_the_first)) > 1e-6
    found = on_ranks(with_rung, ranks, TASKS[model], strategy, chosen)[0] if ranks > 1 else None
    found = found or with_rung(TASKS[model], strategy, chosen)
    assert found.evaluation["loss"] == pytest.approx(loss, abs=1e-9)
    found.evaluation = expected.evaluation
    assert largest_difference(expected, found) < 1e-9


@pytest.mark.parametrize("every", [2, slow(3)])
def test_the_average_is_updated_once_in_so_many_steps(every: int) -> None:
    chosen = RunConfig(**BASE, ema_every=every)
    _, loss = averaged_by_hand(TASKS["text"](), chosen)
    _, in_every_step = averaged_by_hand(TASKS["text"](), replace(chosen, ema_every=1))
    assert abs(loss - in_every_step) > 1e-6
    assert with_rung(TASKS["text"], "single", chosen).evaluation["loss"] == pytest.approx(loss, abs=1e-9)


def test_before_its_first_step_there_is_no_equal_average() -> None:
    chosen = RunConfig(**{**BASE, "ema": None, "swa_start": 12, "steps": None, "epochs": 1})
    assert largest_difference(by_hand(TASKS["text"](), chosen), with_rung(TASKS["text"], "single", chosen)) < 1e-9


@pytest.mark.parametrize("kind", [{"ema": 0.8, "ema_every": 2}, slow({"ema": 0.8}), {"ema": None, "swa_start": 2}])
@pytest.mark.parametrize(
    "route",
    [
        [("ddp", 2, 2), ("pp2,fsdp2", 4, 3), ("single", 1, 4)],
        slow([("zero1", 2, 1), ("zero3", 3, 2), ("tp2", 2, 3), ("ddp", 2, 4)]),
        slow([("ps", 3, 1), ("ddp", 2, 2), ("rpc-pp", 2, 3), ("ddp+ps", 3, 4)]),
    ],
)
def test_the_average_goes_through_checkpoints_of_other_layouts(
    route: list[Any], kind: dict[str, Any], tmp_path: Path
) -> None:
    chosen = RunConfig(**{**BASE, "eval_every": "never", **kind})
    expected, _ = averaged_by_hand(TASKS["gpt"](), chosen)
    legs(TASKS["gpt"], chosen, tmp_path / "run", route)
    output = tmp_path / "average.safetensors"
    assert main(["export", str(tmp_path / "run"), "--average", "--output", str(output)]) == 0
    found = load_file(output)
    assert set(found) == set(expected)
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) < 1e-9


class LateUser(nn.Module):
    """A layer that gets no gradient in the first steps: Adam must still find its state empty then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.first(x) if self.calls < 3 else self.second(self.first(x))


def test_optimizers_see_no_average_while_they_step() -> None:
    from types import SimpleNamespace

    from rung.runtime.weight_average import WeightAverage

    torch.manual_seed(0)
    models = [LateUser().double(), LateUser().double()]
    models[1].load_state_dict(models[0].state_dict())
    own, plain = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in models)
    world = SimpleNamespace(barrier=lambda: None)
    context: Any = SimpleNamespace(optimizer=own, parameters=list(models[0].parameters()), world=world)
    average = WeightAverage(context, lambda: None, decay=0.9)
    reference = AveragedModel(models[1], multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for _ in range(5):
        x = torch.randn(4, 3, dtype=torch.float64)
        for model, optimizer in zip(models, (own, plain), strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        reference.update_parameters(models[1])
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    before = [parameter.clone() for parameter in models[0].parameters()]
    with average.in_place():
        for a, b in zip(models[0].parameters(), reference.module.parameters(), strict=True):
            assert (a - b).abs().max() < 1e-12
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), before, strict=True))


class HalfFrozen(nn.Module):
    """What fine-tuning often is: an optimizer of all parameters, some of which get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.embed.weight.requires_grad_(False)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 23)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def test_the_own_weights_are_back_after_an_evaluation_of_servers() -> None:
    """Trainers pull the average for the evaluation, and train on with what they had."""
    chosen = RunConfig(**{**BASE, "steps": 3})
    losses = on_ranks(losses_beside_evaluations, 3, "ps", chosen)[0]
    assert losses == pytest.approx(by_hand(TASKS["gpt"](), chosen).losses, abs=1e-9)
    assert on_ranks(losses_beside_evaluations, 3, "ddp+ps", chosen)[0] == pytest.approx(losses, abs=1e-9)


def losses_beside_evaluations(strategy: str, config: RunConfig) -> list[float]:
    task, losses = TASKS["gpt"](), []
    with open_world(parse(strategy, 3), device="cpu", timeout_seconds=60) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
        for window in runtime.place(batches):
            share = world.tensors.read([runtime.step(window).loss_share])
            losses.append(sum(row[0] for row in world.gather(share)))
            runtime.evaluate(make_eval_batches(task, config, world))
    return losses


def half_frozen_task() -> Task:
    return text_task(model=HalfFrozen, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1))


def test_a_run_with_frozen_parameters_is_resumed(tmp_path: Path) -> None:
    chosen = RunConfig(**{**BASE, "eval_every": "never"})
    expected, _ = averaged_by_hand(half_frozen_task(), chosen)
    legs(half_frozen_task, chosen, tmp_path / "run", [("single", 1, 2), ("zero3", 2, 3), ("ddp", 2, 4)])
    output = tmp_path / "average.safetensors"
    assert main(["export", str(tmp_path / "run"), "--average", "--output", str(output)]) == 0
    found = load_file(output)
    assert max((found[name] - value).abs().max().item() for name, value in expected.items()) < 1e-9


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match="--local-steps 4"):
        validate_config(RunConfig(ema=0.9, local_steps=4), parse("ddp", 2))
    with pytest.raises(ConfigError, match="eval_weights=own is for --ema and --swa-start"):
        validate_config(RunConfig(eval_weights="own"), parse("ddp", 2))
    with pytest.raises(ConfigError, match="ema_every=8 is for --ema"):
        validate_config(RunConfig(ema_every=8), parse("ddp", 2))
    with pytest.raises(ConfigError, match="below 1"):
        check("ema", 1.0)
    with pytest.raises(ConfigError, match="two averages of the weights"):
        validate_config(RunConfig(ema=0.9, swa_start=3), parse("ddp", 2))
    with pytest.raises(ConfigError, match=r"--swa-start 9 is after the last step, 8"):
        validate_config(RunConfig(swa_start=9, steps=8), parse("ddp", 2))
    with pytest.raises(ConfigError, match="--swa-start 2 averages the weights of every step"):
        validate_config(RunConfig(swa_start=2, local_steps=4), parse("ddp", 2))
    with pytest.raises(ConfigError, match="swa_start must be at least 1"):
        check("swa_start", 0)


class Late(nn.Module):
    """A large layer that the first two steps do not use."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.token, self.late, self.head = nn.Embedding(23, 12), nn.Linear(12, 200, bias=False), nn.Linear(12, 23)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        if self.training:
            self.calls += 1
        if self.calls > 2:
            x = x + self.late(x)[..., :12]
        return self.head(x)


def late_task() -> Task:
    return text_task(model=Late)


@pytest.mark.parametrize("kind", [{"ema": 0.8}, slow({"ema": None, "swa_start": 2})])
def test_a_server_whose_parameters_are_used_late_averages_as_one_process_does(kind: dict[str, Any]) -> None:
    chosen = RunConfig(**{**BASE, **kind, "unused_parameters": "allow"})
    _, loss = averaged_by_hand(late_task(), chosen)
    found = on_ranks(with_rung, 3, late_task, "ps", replace(chosen, servers=2))[0]
    assert found.evaluation["loss"] == pytest.approx(loss, abs=1e-9)
