"""channels_last: another order of the same numbers in memory, under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.runtime.forward import laid_out
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import TinyCNN, image_task

CONFIG = RunConfig(batch_size=10, steps=4, precision="fp64", clip=0.5, device="cpu", memory_format="channels_last")
PLAIN = RunConfig(batch_size=10, steps=4, precision="fp64", clip=0.5, device="cpu")
STRATEGIES = ("ddp", "zero1", "zero3", "pp2")


class OwnFormat(TinyCNN):
    """A model whose author has chosen the format."""

    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)


def own_format_task() -> Task:
    return image_task(model=OwnFormat)


def all_strategies(names: tuple[str, ...]) -> dict[str, Outcome]:
    return {name: with_rung(image_task, name, CONFIG) for name in names}


def is_last(tensor: Any) -> bool:
    return bool(tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous())


def formats(make_task: Any, config: RunConfig) -> tuple[bool, bool]:
    """Whether the weight of a convolution, and what the optimizer keeps for it, lie with their channels last."""
    task = make_task()
    with open_world(parse("ddp" if environment_size() > 1 else "single", environment_size()), device="cpu") as world:
        runtime = build_runtime(task, world, config, total_steps=config.steps)
        runtime.step(next(iter(runtime.place(make_batches(task, config, world)))))
        weight = runtime.model.get_parameter("second.0.weight")
        return is_last(weight), is_last(runtime.optimizer.state[weight]["momentum_buffer"])


def test_batches_of_images_have_the_format() -> None:
    images = torch.rand(2, 3, 4, 4)
    assert is_last(laid_out(CONFIG, images)) and torch.equal(laid_out(CONFIG, images), images)
    assert laid_out(PLAIN, images) is images
    assert laid_out(CONFIG, images[0]).is_contiguous()


def test_every_strategy_computes_what_one_process_does() -> None:
    expected = by_hand(image_task(), CONFIG)
    micro = by_hand(image_task(), CONFIG, micro=3)
    assert largest_difference(expected, with_rung(image_task, "single", CONFIG)) < 1e-9
    found = on_ranks(all_strategies, 2, STRATEGIES)[0]
    for name, outcome in found.items():
        assert largest_difference(micro if name == "pp2" else expected, outcome) < 1e-9, name


def test_weights_and_optimizer_state_have_the_format() -> None:
    assert formats(image_task, CONFIG) == (True, True)
    assert on_ranks(formats, 2, image_task, CONFIG)[1] == (True, True)
    assert not formats(image_task, PLAIN)[0]


def test_a_format_of_the_models_own_is_kept() -> None:
    assert on_ranks(formats, 2, own_format_task, PLAIN)[1][0]


def test_a_format_of_the_models_own_can_be_sharded_and_resumed(tmp_path: Path) -> None:
    """Sharding wants contiguous weights, from the seed and from a checkpoint alike."""
    _, state = legs(own_format_task, PLAIN, tmp_path, [("zero3", 2, 2), ("ddp", 2, 3), ("zero3", 2, 4)])
    expected = by_hand(image_task(), PLAIN)
    assert max(float((state[name] - value).abs().max()) for name, value in expected.state.items()) < 1e-9
