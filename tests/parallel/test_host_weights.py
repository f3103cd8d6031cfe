"""A model whose blocks stay in host memory computes what it computes on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.host_weights import build, gradients
from tests.tasks import TASKS


def test_gradients_are_those_of_the_whole_model() -> None:
    for name in ("gpt", "text", "images"):
        task = TASKS[name]()
        expected = gradients(build(task, "cpu"), task)
        found = gradients(build(task, "cpu", blocks_on_host=True), task)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_one_block_at_a_time_is_on_the_device() -> None:
    task = TASKS["gpt"]()
    runtime = build(task, "cpu", blocks_on_host=True)
    blocks = list(runtime.model.get_submodule("blocks").children())
    assert len(blocks) > 1
    homes = [next(block.parameters()).data_ptr() for block in blocks]
    seen: list[list[int]] = []

    def watch(module: nn.Module, inputs: Any) -> None:
        seen.append([n for n, block in enumerate(blocks) if next(block.parameters()).data_ptr() != homes[n]])

    for block in blocks:
        next(iter(block.children())).register_forward_pre_hook(watch)
    gradients(runtime, task)
    one_pass = [[number] for number in range(len(blocks))]
    assert seen[: 2 * len(blocks)] == one_pass + one_pass[::-1], "forward, and again in backward"
    assert [next(block.parameters()).data_ptr() for block in blocks] == homes
