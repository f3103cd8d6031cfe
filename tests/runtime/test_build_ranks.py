"""How ranks build a model together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_rank, environment_size
from tests.harness import on_ranks
from tests.tasks import TinyCNN, image_task


def _build(strategy: str, failing: int | None) -> dict[str, Any]:
    """The weights that a rank ends up with. On the rank `failing`, the constructor fails on the meta device."""

    def model() -> nn.Module:
        if environment_rank() == failing and torch.empty(0).device.type == "meta":
            raise OSError("a file that only this rank could not read")
        return TinyCNN()

    config = RunConfig(batch_size=8, steps=1, device="cpu")
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=10) as world:
        runtime = build_runtime(image_task(model=model), world, config, total_steps=1)
        return {name: value.tolist() for name, value in runtime.named_weights()}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_constructor_that_fails_on_one_rank_alone_does_not_hang_the_others(strategy: str) -> None:
    known = on_ranks(_build, 2, strategy, None)[0]
    for failing in range(2):
        found = on_ranks(_build, 2, strategy, failing)[0]
        assert found == known
