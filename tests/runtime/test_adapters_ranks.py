"""`--lora`, and models that peft made: the numbers of peft's LoRA in a plain loop, under every strategy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.contenders.torchvision_operators import declare_torchvision_operators
from rung.checkpoint.manifest import read_checkpoint
from rung.distributed.world import open_fake_world
from rung.errors import StrategyError
from rung.launch.spawn import on_ranks
from rung.parallel.adapters import initial_value
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.harness import RankFailed
from tests.marks import slow
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import text_task

declare_torchvision_operators()
peft = pytest.importorskip("peft")

BASE: dict[str, Any] = {"batch_size": 10, "steps": 5, "precision": "fp64", "device": "cpu", "clip": 0.5}
TARGETS = ("query", "value", "up", "down")
LORA = f"r=3,alpha=6,targets={'+'.join(TARGETS)}"


def quick_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The whole model, as many tasks give it; adapters move slowly at first, since B is zero."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def plain_task(**changes: Any) -> Task:
    return text_task(optimizer=quick_sgd, schedule=None, remote=["blocks.1", "norm"], **changes)


def peft_task(seed: int = 0, targets: tuple[str, ...] = TARGETS, **changes: Any) -> Task:
    """The same with peft's adapters, which begin as Rung's."""
    task = plain_task(**changes)
    return replace(task, model=partial(peft_model, task.model, seed, targets))


def peft_model(make: Any, seed: int, targets: tuple[str, ...]) -> nn.Module:
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(targets))
    model: nn.Module = peft.get_peft_model(make(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name and not parameter.is_meta:
                parameter.copy_(initial_value(name.removeprefix("base_model.model."), parameter.shape, seed))
    return model


def dora_model() -> nn.Module:
    config = peft.LoraConfig(r=3, target_modules=["up", "down"], use_dora=True)
    model: nn.Module = peft.get_peft_model(plain_task().model(), config)
    return model


def test_tensor_parallelism_refuses_what_it_does_not_cut() -> None:
    layout = parse("tp2", 2)
    with (
        open_fake_world(layout) as world,
        pytest.raises(StrategyError, match=r"more than A and B \(it has lora_magnitude"),
    ):
        build_runtime(plain_task(model=dora_model), world, RunConfig(**BASE))


def under_its_own_names(outcome: Outcome) -> Outcome:
    return replace(outcome, state={n.removeprefix("base_model.model."): v for n, v in outcome.state.items()})


STRATEGIES = [
    ("single", 1),
    ("ddp", 2),
    ("zero3", 2),
    ("tp2", 2),
    ("pp2", 2),
    ("fsdp2,tp2", 4),
    slow("zero1", 3),
    slow("zero2", 2),
    slow("hsdp2x2", 4),
    slow("cp2", 2),
    slow("tp3", 3),
    slow("pp2,fsdp2", 4),
    slow("pp2,tp2", 4),
    slow("dp", 1),
    ("ps", 3),
    ("rpc-pp", 2),
    slow("ddp+ps", 4),  # of two servers, one has a frozen module alone
]


@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_adapters_train_as_those_of_peft_in_a_plain_loop(strategy: str, ranks: int) -> None:
    chosen = RunConfig(**BASE, servers=2 if ranks == 4 and strategy == "ddp+ps" else None)
    expected = under_its_own_names(by_hand(peft_task(), chosen))
    assert expected.losses[0] - expected.losses[-1] > 1e-3  # or there would be nothing to see
    given = replace(chosen, lora=LORA)
    found = on_ranks(with_rung, ranks, plain_task, strategy, given)[0] if ranks > 1 else None
    found = found or with_rung(plain_task, strategy, given)
    assert largest_difference(expected, found) < 1e-9


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("fsdp2,tp2", 4),
        ("pp2", 2),
        slow("single", 1),
        slow("ddp", 2),
        slow("zero1", 3),
        slow("zero3", 2),
        slow("tp2", 2),
        slow("pp2,fsdp2", 4),
    ],
)
def test_models_of_peft_train_as_they_are(strategy: str, ranks: int) -> None:
    chosen = RunConfig(**BASE)
    expected = by_hand(peft_task(), chosen)
    found = on_ranks(with_rung, ranks, peft_task, strategy, chosen)[0] if ranks > 1 else None
    found = found or with_rung(peft_task, strategy, chosen)
    assert largest_difference(expected, found) < 1e-9


@pytest.mark.parametrize(
    "route",
    [
        [("ddp", 2, 2), ("fsdp2,tp2", 4, 3), ("pp2", 2, 5)],
        slow([("zero3", 2, 1), ("tp2", 2, 2), ("zero1", 3, 4), ("single", 1, 5)]),
        slow([("ps", 3, 2), ("ddp", 2, 3), ("rpc-pp", 2, 4), ("ddp+ps", 3, 5)]),
    ],
)
@pytest.mark.parametrize("made_by", ["rung", slow("peft")])
def test_a_run_goes_on_in_other_layouts(route: list[Any], made_by: str, tmp_path: Path) -> None:
    chosen = RunConfig(**BASE, eval_every="never")
    expected = by_hand(peft_task(), chosen)
    if made_by == "rung":
        expected, task, chosen = under_its_own_names(expected), plain_task, replace(chosen, lora=LORA)
    else:
        task = peft_task
    losses, state = legs(task, chosen, tmp_path / "run", route)
    assert losses == pytest.approx(expected.losses, abs=1e-9)
    assert set(state) == set(expected.state)
    assert max((state[name] - value).abs().max().item() for name, value in expected.state.items()) < 1e-9
    # Nothing that is frozen is in a checkpoint, or in the state of its optimizer.
    manifest = read_checkpoint(sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]).manifest
    saved = [name for name in manifest["tensors"] if not name.startswith("rank/")]
    assert saved
    assert all(".lora_" in name or name == "model/mask" for name in [n.replace("base_model.model.", "") for n in saved])
    assert len(manifest["base"]) == 21


def test_another_base_is_refused(tmp_path: Path) -> None:
    chosen = RunConfig(**BASE, eval_every="never", lora=LORA)
    legs(plain_task, chosen, tmp_path / "run", [("single", 1, 1)])
    with pytest.raises(RankFailed, match=r"trained beside another base: token\.weight, .* and 12 more tensors"):
        legs(plain_task, replace(chosen, seed=1), tmp_path / "run", [("single", 1, 2)])
