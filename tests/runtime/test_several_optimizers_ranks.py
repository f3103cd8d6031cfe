"""Several optimizers over one model, and Muon on whole matrices, against a plain loop; their checkpoints and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from rung.data.permutation import Permutation
from rung.distributed.world import open_world
from rung.errors import TaskError
from rung.launch.spawn import on_ranks
from rung.planner.dryrun import dry_run
from rung.runtime import build_runtime
from rung.runtime.base import LocalStep
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from rung.train.worker import make_batches
from tests.checkpoints import legs
from tests.harness import RankFailed
from tests.marks import slow
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import EXAMPLES, TASKS, TinyGPT, halving, text_task

BASE: dict[str, Any] = {"batch_size": 10, "steps": 4, "precision": "fp64", "device": "cpu", "clip": 0.5}


def matrices_and_rest(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "token" not in name]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in model.parameters() if id(p) not in chosen]


def two_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


def muon_and_adamw(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return {"matrices": torch.optim.Muon(matrices, lr=0.02), "rest": torch.optim.AdamW(rest, lr=0.01, eps=1e-3)}


def two_sgd_task() -> Task:
    return text_task(padded=True, optimizer=two_sgd, schedule=halving)


def muon_task() -> Task:
    return text_task(padded=True, optimizer=muon_and_adamw, schedule=halving)


def example_task() -> Task:
    """The GPT example with its own optimizers, on the tests' small data."""
    example = load_task(EXAMPLES / "gpt").bind({"optimizer.kind": "muon"})
    return replace(TASKS["gpt"](), optimizer=example.optimizer, schedule=example.schedule)


def run(make_task: Any, strategy: str, ranks: int, config: RunConfig) -> Outcome:
    if ranks == 1:
        return with_rung(make_task, strategy, config)
    found: Outcome = on_ranks(with_rung, ranks, make_task, strategy, config)[0]
    return found


# Muon rounds to bf16 inside. In float64 the ranks' gradients differ from one process's by 1e-16 of their size, which
# moves a number across a boundary between two bf16 values (2e-3 of its size apart) once in some 10^13: so the numbers
# are equal to 1e-9 here as well, if every matrix is whole where it is rounded. On shards they are off by 4e-3.
@pytest.mark.parametrize(
    ("make_task", "strategy", "ranks"),
    [
        (two_sgd_task, "zero1", 2),
        (two_sgd_task, "fsdp2,tp2", 4),
        (muon_task, "ddp", 2),
        (muon_task, "zero1", 2),
        (muon_task, "zero3", 3),
        (muon_task, "tp2", 2),
        (muon_task, "pp2", 2),
        (muon_task, "fsdp2,tp2", 4),
        (example_task, "zero3", 2),
        *(slow(two_sgd_task, strategy, 2) for strategy in ("ddp", "zero2", "zero3", "tp2", "pp2", "rpc-pp2")),
        *(slow(task, strategy, 1) for strategy in ("single", "dp2") for task in (two_sgd_task, muon_task)),
        *(slow(muon_task, strategy, 4) for strategy in ("hsdp2x2", "pp2,fsdp2", "pp2,tp2", "zero1x2,tp2")),
        slow(muon_task, "zero2", 2),
        slow(muon_task, "ps", 3),
        slow(muon_task, "rpc-pp2", 2),
    ],
)
def test_several_optimizers_are_those_of_a_plain_loop(make_task: Any, strategy: str, ranks: int) -> None:
    config = RunConfig(**BASE)
    assert largest_difference(by_hand(make_task(), config), run(make_task, strategy, ranks, config)) < 1e-9


class Preconditioned(torch.optim.Optimizer):
    """By the rows of a matrix, with an operation that DTensor does not have."""

    whole_parameters = True

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    square = mean @ mean.T + torch.eye(len(mean), dtype=mean.dtype)
                    parameter.sub_(torch.linalg.solve(square, mean), alpha=group["lr"])


def preconditioned_task() -> Task:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        matrices, rest = matrices_and_rest(model)
        return [torch.optim.SGD(rest, lr=0.1), Preconditioned(matrices, lr=0.02)]

    return text_task(optimizer=optimizers)


def adafactor_task() -> Task:
    return text_task(optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02))


@pytest.mark.parametrize("make_task", [preconditioned_task, adafactor_task])
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp2,tp2", 4), slow("zero1", 2), slow("zero3", 3), slow("pp2", 2)])
def test_optimizers_that_ask_for_it_get_whole_parameters(make_task: Any, strategy: str, ranks: int) -> None:
    config = RunConfig(**BASE)
    assert largest_difference(by_hand(make_task(), config), run(make_task, strategy, ranks, config)) < 1e-9


@pytest.mark.parametrize(
    ("make_task", "route"),
    [
        (muon_task, [("ddp", 2, 1), ("zero3", 3, 2), ("tp2", 2, 3), ("single", 1, 4)]),
        slow(two_sgd_task, [("zero1", 2, 1), ("pp2", 2, 2), ("fsdp2,tp2", 4, 3), ("zero2", 2, 4)]),
        slow(adafactor_task, [("single", 1, 1), ("zero3", 2, 2), ("tp2", 2, 3), ("ddp", 2, 4)]),
    ],
)
def test_checkpoints_of_several_optimizers_go_to_other_layouts(make_task: Any, route: Any, tmp_path: Path) -> None:
    config = RunConfig(**BASE, eval_every="never")
    expected = by_hand(make_task(), config)
    losses, state = legs(make_task, config, tmp_path, route)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max((state[name] - value).abs().max().item() for name, value in expected.state.items()) < 1e-9


def adamw_task() -> Task:
    return text_task(padded=True, optimizer=lambda model: torch.optim.AdamW(model.parameters()), schedule=halving)


def test_a_checkpoint_of_one_optimizer_is_not_that_of_two(tmp_path: Path) -> None:
    config = RunConfig(**BASE, eval_every="never")
    legs(adamw_task, config, tmp_path, [("single", 1, 1)])
    with pytest.raises(RankFailed) as error:
        legs(muon_task, config, tmp_path, [("single", 1, 2)])
    assert "the state of AdamW with 1 parameter groups; the task now makes Muon and AdamW with 2" in error.value.error


@pytest.mark.parametrize("strategy", ["zero3", slow("tp2")])
def test_the_average_of_weights_follows_several_optimizers(strategy: str) -> None:
    config = RunConfig(**BASE, ema=0.8)
    expected, found = run(muon_task, "single", 1, config), run(muon_task, strategy, 2, config)
    assert largest_difference(expected, found) < 1e-9
    assert expected.evaluation["loss"] != by_hand(muon_task(), config).evaluation["loss"]


def steps_of(task: Task) -> list[LocalStep]:
    config = RunConfig(**BASE)
    with open_world(parse("single", 1), device="cpu") as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
        return [runtime.step(window) for window in runtime.place(batches)]


def test_a_schedule_is_made_for_each_optimizer_by_its_name() -> None:
    def schedule(optimizer: Any, total_steps: int, name: str, factor: float = 0.5) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, factor) if name == "matrices" else None

    steps = steps_of(text_task(optimizer=muon_and_adamw, schedule=schedule).bind({"schedule.factor": 0.1}))
    assert [step.learning_rates["matrices"] for step in steps] == pytest.approx([0.02, 2e-3, 2e-4, 2e-5])
    assert [step.learning_rates["rest"] for step in steps] == [0.01] * 4
    assert [step.learning_rate for step in steps] == [step.learning_rates["matrices"] for step in steps]


def test_a_schedule_of_one_optimizer_may_take_a_name() -> None:
    steps = steps_of(text_task(schedule=lambda optimizer, total_steps, *, name: halving(optimizer, total_steps)))
    assert [step.learning_rates for step in steps] == [{}] * 4
    assert steps[0].learning_rate == 2 * steps[-1].learning_rate


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


def lbfgs_task() -> Task:
    return text_task(padded=True, model=lambda: TinyGPT(width=24), optimizer=lbfgs)


def lbfgs_by_hand(task: Task, config: RunConfig) -> Outcome:
    torch.manual_seed(config.seed)
    model = task.model().double()
    optimizer, data = task.optimizer(model), task.train_data()
    order = Permutation(len(data), config.seed, shuffle=True)
    outcome = Outcome()
    for step in range(config.steps or 0):
        samples = order.samples(0, step * config.batch_size, (step + 1) * config.batch_size)
        inputs, target = default_collate([data[i] for i in samples])

        def closure() -> float:
            optimizer.zero_grad()
            loss = task.loss(model(inputs), target)  # noqa: B023
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip or 0.0)
            return loss.item()

        outcome.losses.append(float(optimizer.step(closure)))
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    return outcome


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), slow("dp2", 1)])
def test_an_optimizer_that_evaluates_the_loss_is_that_of_a_plain_loop(strategy: str, ranks: int) -> None:
    config = RunConfig(**BASE)
    expected, found = lbfgs_by_hand(lbfgs_task(), config), run(lbfgs_task, strategy, ranks, config)
    assert found.losses == pytest.approx(expected.losses, abs=1e-9)
    difference = [(torch.as_tensor(found.state[name]) - value).abs().max() for name, value in expected.state.items()]
    assert max(difference) < 1e-9


def test_an_optimizer_that_evaluates_the_loss_is_resumed(tmp_path: Path) -> None:
    config = RunConfig(**BASE, eval_every="never", checkpoint_every=1)
    expected = lbfgs_by_hand(lbfgs_task(), config)
    losses, state = legs(lbfgs_task, config, tmp_path, [("single", 1, 3), ("ddp", 2, 4)])
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max((state[name] - value).abs().max() for name, value in expected.state.items()) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "changes", "words"),
    [
        ("zero3", {}, "LBFGS evaluates the loss several times a step: under zero3 no rank has the whole gradient"),
        ("pp2", {}, "under pp2 no rank"),
        ("ddp", {"compress": "topk:0.5"}, "ranks have gradients of their own"),
        ("ddp", {"precision": "fp16"}, "gradients are scaled"),
        ("ddp", {}, "cannot be planned"),
    ],
)
def test_where_the_loss_cannot_be_evaluated_again_that_is_said(strategy: str, changes: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        dry_run(lbfgs_task(), parse(strategy, 2), RunConfig(**{**BASE, **changes}), device="cpu")


def sgd_of(*parts: Any) -> Any:
    return lambda model: {f"part {n}": torch.optim.SGD(part(model), lr=0.1) for n, part in enumerate(parts)}


def with_hook(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Muon(matrices_and_rest(model)[0])
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class Sharded(Preconditioned):
    whole_parameters = False


class Counting(Preconditioned):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["lr"] *= 0.5


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (sgd_of(lambda m: m.parameters(), lambda m: m.norm.parameters()), "'part 0' and 'part 1' both update norm.w"),
        (sgd_of(lambda m: m.norm.parameters(), lambda m: m.blocks.parameters()), "'part 1' updates token.weight"),
        (lambda model: [], "a list or dict of them, but it returned list"),
        (lambda model: None, "a list or dict of them, but it returned NoneType"),
        (lambda model: [torch.optim.SGD(model.parameters(), lr=0.1), 3], "one is 3"),
        (lambda model: {0: torch.optim.SGD(model.parameters(), lr=0.1)}, "have names, but one has the key 0"),
        (lambda model: [lbfgs(model.norm), lbfgs(model.blocks)], "LBFGS evaluates the loss by itself"),
        (with_hook, "hooks of its step would run once for each"),
        (
            lambda model: Sharded(matrices_and_rest(model)[0], lr=0.1),
            "Sharded cannot compute on sharded .* `whole_parameters = True` in the class Sharded",
        ),
        (lambda model: Counting(matrices_and_rest(model)[0], lr=0.1), "changes 'lr' of its groups in a step"),
    ],
)
def test_wrong_optimizers_are_refused_with_the_reason(optimizer: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        dry_run(text_task(optimizer=optimizer), parse("zero3", 2), RunConfig(**BASE), device="cpu")


class Together(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["steps"] = 1


def test_state_of_no_parameter_is_refused_where_optimizers_share_one() -> None:
    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [Together(part, lr=0.1) for part in matrices_and_rest(model)]

    with pytest.raises(TaskError, match=r"'0' .Together. keeps state that belongs to no parameter"):
        steps_of(text_task(optimizer=optimizers))
