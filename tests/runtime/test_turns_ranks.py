"""A dict of losses that take turns within a step, against a plain loop; its checkpoints, figures and errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from rung.distributed.world import open_world
from rung.errors import StrategyError, TaskError
from rung.launch.spawn import on_ranks
from rung.planner.dryrun import dry_run
from rung.runtime import build_runtime
from rung.runtime.measure import metric_names
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches
from tests.checkpoints import legs
from tests.marks import slow
from tests.parity import Outcome, largest_difference, shuffled, with_rung
from tests.tasks import EXAMPLES

BASE: dict[str, Any] = {"batch_size": 10, "steps": 4, "precision": "fp64", "device": "cpu", "eval_every": "never"}


class Pair(nn.Module):
    """A generator with a frozen layer, and a critic with a batch norm and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.generator[2].requires_grad_(False)
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, real: torch.Tensor, noise: torch.Tensor, judges_real: bool) -> Any:
        made = self.scale * self.critic(self.generator(noise))
        return made, self.scale * self.critic(real) if judges_real else None


def points(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(
        torch.randn(count, 2, generator=generator, dtype=torch.float64) + 2,
        torch.randn(count, 3, generator=generator, dtype=torch.float64),
    )


def forward(model: Pair, batch: Any, turn: str) -> Any:
    return model(*batch, judges_real=turn == "critic")


def critic_loss(output: Any, target: Any) -> torch.Tensor:
    made, real = output
    return F.softplus(-real).mean() + F.softplus(made).mean()


def generator_loss(output: Any, target: Any) -> torch.Tensor:
    return F.softplus(-output[0]).mean()


def optimizer(model: Pair) -> dict[str, torch.optim.Optimizer]:
    critic = [*model.critic.parameters(), model.scale]
    return {
        "critic": torch.optim.SGD(critic, lr=0.2, momentum=0.9),
        "generator": torch.optim.SGD([p for p in model.generator.parameters() if p.requires_grad], lr=0.3),
    }


def halved(optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def gan_task(**changes: Any) -> Task:
    losses: Any = {"critic": critic_loss, "generator": generator_loss}
    parts: dict[str, Any] = {
        "model": Pair, "train_data": lambda: points(23), "loss": losses, "optimizer": optimizer, "forward": forward,
        "schedule": halved, "eval_data": lambda: points(7), "name": "gan",
    }  # fmt: skip
    return Task(**{**parts, **changes})


def by_hand(config: RunConfig, micro: int, ema: float | None = None) -> Outcome:
    """As a GAN is trained without Rung: one update of the critic, then one of the generator, on the same batch."""
    torch.manual_seed(config.seed)
    task, model = gan_task(), Pair().double()
    optimizers = optimizer(model)
    schedules = [halved(one, 0) for one in optimizers.values()]
    losses = {"critic": critic_loss, "generator": generator_loss}
    outcome, averages = Outcome(), {}
    trainable = dict(model.named_parameters())
    for samples in shuffled(task, config):
        pieces = [samples[i : i + micro] for i in range(0, len(samples), micro)]
        outcome.losses.append(0.0)
        outcome.rates.append(optimizers["critic"].param_groups[0]["lr"])
        squares = 0.0
        for turn, loss in losses.items():
            model.zero_grad()
            for piece in pieces:
                value = loss(forward(model, default_collate(piece), turn), None) * len(piece) / len(samples)
                value.backward()
                outcome.losses[-1] += value.item()
            own = [p for group in optimizers[turn].param_groups for p in group["params"]]
            norm = nn.utils.clip_grad_norm_(own, config.clip or torch.inf)
            squares += norm.item() ** 2
            optimizers[turn].step()
            if ema is not None:
                for name, parameter in trainable.items():
                    if any(parameter is p for p in own):
                        new = parameter.detach()
                        averages[name] = averages[name].lerp(new, 1 - ema) if name in averages else new.clone()
        outcome.norms.append(squares**0.5)
        for schedule in schedules:
            schedule.step()
    outcome.state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(averages, strict=False)
    model.eval()
    batch = default_collate([points(7)[i] for i in range(7)])
    with torch.no_grad():
        found = {f"{turn} loss": loss(forward(model, batch, turn), None).item() for turn, loss in losses.items()}
    outcome.evaluation = {**found, "loss": sum(found.values())}
    return outcome


def run(strategy: str, ranks: int, config: RunConfig) -> Outcome:
    if ranks == 1:
        return with_rung(gan_task, strategy, config)
    found: Outcome = on_ranks(with_rung, ranks, gan_task, strategy, config)[0]
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("single", 1),
        ("ddp", 2),
        ("zero3", 3),
        ("tp2", 2),
        *(slow(strategy, 2) for strategy in ("zero1", "zero2")),
        *(slow(strategy, 4) for strategy in ("ddp", "hsdp2x2", "fsdp2,tp2", "zero1x2,tp2", "zero2x2,tp2")),
    ],
)
def test_losses_that_take_turns_are_those_of_a_plain_loop(strategy: str, ranks: int) -> None:
    """With accumulation and clipping; the last batch of an epoch has three samples."""
    data_ranks = parse(strategy, ranks).num_data_ranks
    micro = -(-6 // data_ranks)
    config = RunConfig(**BASE, clip=0.1, micro_batch=micro)
    assert largest_difference(by_hand(config, micro * data_ranks), run(strategy, ranks, config)) < 1e-9


def probed(strategy: str, config: RunConfig) -> dict[str, float]:
    """The loss of the first step and the square of each gradient, as the check before it takes them."""
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        batches = make_batches(gan_task(), config, world)
        runtime = build_runtime(gan_task(), world, config, total_steps=batches.total_steps)
        found = runtime.probe(next(iter(runtime.place(batches))))
        assert found.gradients is not None
        squares = {name: float(square) for name, square in found.gradients.squares.items()}
        return {**squares, "loss": sum(share for (share,) in world.gather([float(found.loss_share)]))}


@pytest.mark.parametrize(("strategy", "unused"), [("ddp", "error"), ("zero3", "allow")])
def test_a_probe_has_the_gradients_of_all_turns(strategy: str, unused: str) -> None:
    config = RunConfig(**BASE, unused_parameters=unused)
    expected = probed("single", replace(config, micro_batch=6))
    found = on_ranks(probed, 2, strategy, replace(config, micro_batch=3))
    assert set().union(*found) == set(expected)
    for one in found:
        assert one == pytest.approx({name: expected[name] for name in one}, abs=1e-9)


@pytest.mark.parametrize("strategy", ["zero1", slow("ddp"), slow("zero3")])
def test_the_average_follows_the_parameters_of_each_turn(strategy: str) -> None:
    config = RunConfig(**BASE, ema=0.7)
    assert largest_difference(by_hand(config, 10, ema=0.7), run(strategy, 2, config)) < 1e-9


@pytest.mark.parametrize("route", [[("ddp", 2, 1), ("zero3", 2, 2), ("tp2", 2, 3), ("single", 1, 4)]])
def test_a_run_goes_on_in_other_layouts(route: Any, tmp_path: Path) -> None:
    config = RunConfig(**BASE)
    expected = by_hand(config, 10)
    losses, state = legs(gan_task, config, tmp_path, route)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert max((state[name] - value).abs().max().item() for name, value in expected.state.items()) < 1e-9


def test_both_updates_are_planned() -> None:
    run = dry_run(gan_task(), parse("ddp", 2), RunConfig(**BASE), device="cpu")
    sent = [message.num_bytes for message in run.trace.messages(run.second_step) if message.operation == "all-reduce"]
    groups = [group for one in optimizer(Pair()).values() for group in one.param_groups]
    sizes = [sum(8 * parameter.numel() for parameter in group["params"]) for group in groups]
    assert [size for size in sent if size in sizes] == sizes, sent


@pytest.mark.parametrize(
    ("changes", "strategy", "settings", "words"),
    [
        ({"loss": critic_loss}, "ddp", {}, "forward.*turn.* cannot be called as forward"),
        ({"loss": {"critic": critic_loss}}, "ddp", {}, "a dict of losses has two or more"),
        ({"loss": {"critic": critic_loss, "generator": 3}}, "ddp", {}, "'generator' is 3"),
        ({"loss": {"critic": critic_loss, "generator": lambda x: x}}, "ddp", {}, "cannot be called as loss"),
        (
            {"loss": {"critic": critic_loss, "maker": generator_loss}},
            "ddp",
            {},
            r"'critic', 'generator'\. Return a dict",
        ),
        ({"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}, "ddp", {}, r"returned '0'\. Return a dict"),
        ({}, "ddp", {"compress": "topk:0.5"}, "not possible with --compress"),
        ({}, "pp2", {}, "pp2 trains all parameters with one loss. Use ddp"),
        ({}, "cp2", {}, "cp2 trains all parameters with one loss"),
        ({}, "ddp", {"chunked_loss": "100"}, "is for one loss, and this task has several"),
    ],
)
def test_what_cannot_take_turns_is_refused(changes: Any, strategy: str, settings: Any, words: str) -> None:
    with pytest.raises((TaskError, StrategyError), match=f"(?s){words}"):
        dry_run(gan_task(**changes), parse(strategy, 2), RunConfig(**{**BASE, **settings}), device="cpu")


def test_a_metric_does_not_take_the_name_of_a_loss() -> None:
    task = gan_task(metrics=lambda output, target: {"critic loss": torch.zeros(7)})
    with pytest.raises(TaskError, match="may not return 'critic loss', which is measured anyway"):
        with_rung(lambda: task, "single", RunConfig(**BASE))


def test_each_loss_is_a_figure_of_the_step_and_may_log_others() -> None:
    def critic(output: Any, target: Any, log: Any) -> torch.Tensor:
        log("judged real", (output[1] > 0).double().mean())
        return critic_loss(output, target)

    task = gan_task(loss={"critic": critic, "generator": generator_loss})
    assert task.logging_functions() == ["loss"]
    assert replace(task, name="other").logging_functions() == ["loss"]


def test_metrics_get_the_output_of_the_last_turn_alone() -> None:
    def metrics(output: Any, target: Any) -> dict[str, torch.Tensor]:
        made, real = output
        assert real is None, "the output of the critic's turn"
        return {"made": made.double().squeeze(1)}

    task, config = gan_task(metrics=metrics), RunConfig(**BASE)
    found = with_rung(lambda: task, "single", config)
    model = Pair().double().eval()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in found.state.items()})
    made, _ = model(*default_collate([points(7)[i] for i in range(7)]), judges_real=False)
    assert found.evaluation["made"] == pytest.approx(made.mean().item(), abs=1e-12)
    for names in (metric_names(task), metric_names(gan_task())):
        assert names is not None
        assert {*names, "made"} == {"loss", "critic loss", "generator loss", "made"}


def test_the_example_takes_turns() -> None:
    run = dry_run(load_task(EXAMPLES / "gan"), parse("zero3", 2), RunConfig(batch_size=16, device="cpu"), device="cpu")
    assert {message.operation for message in run.trace.messages(run.second_step)} >= {"all-gather", "reduce-scatter"}
