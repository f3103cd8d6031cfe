"""Buffers that forward changes, replaces or creates."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rung.errors import ModelError
from rung.parallel.activation import apply_activation_checkpointing
from rung.parallel.module_state import ModuleState
from rung.runtime.buffers import OwnBuffers


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("changed", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("created", None)
        self.register_buffer("left", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().reshape(-1, 2).mean(0)
        self.changed += mean
        self.replaced = self.replaced + mean
        self.created = mean
        return x


def _model() -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm1d(2), nn.Softplus(), Keeps())


def test_a_stand_in_leaves_buffers_as_they_were() -> None:
    model = _model()
    own = OwnBuffers(model, [])
    before = dict(own.named())
    with own.kept():
        model[2](torch.ones(2))
    after = dict(own.named())
    assert set(after) - set(before) == {"2.created"}  # all ranks have one, to be synchronised
    assert all(after[name] is buffer and not buffer.any() for name, buffer in before.items() if name.startswith("2."))
    assert own.named()[0][0] == "0.running_mean"
    assert OwnBuffers(model, [model[0]]).named()[0][0] == "2.changed"


def test_buffers_that_forward_replaces_are_found_and_named() -> None:
    model = _model()
    own = OwnBuffers(model, [])
    before = own.versions()
    model(torch.arange(6.0).reshape(3, 2) + 1)
    (note,) = own.change_notes(before)
    assert note.startswith("forward changes 2.changed, 2.replaced, 2.created: each rank")
    assert float(dict(own.named())["2.replaced"].sum()) != 0
    with pytest.raises(ModelError, match=r"forward creates the buffer 2\.created, which was None"):
        own.refuse_created(before)
    own.refuse_created(own.versions())


def test_the_state_of_a_module_is_put_back_with_buffers_that_were_none() -> None:
    model = _model()
    buffers = dict(model.named_buffers())
    kept = ModuleState(model)
    model(torch.arange(6.0).reshape(3, 2) + 1)
    kept.restore()
    assert dict(model.named_buffers()).keys() == buffers.keys() and model[2].created is None
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert not model[2].changed.any() and not model[0].running_mean.any()


class Averaging(nn.Module):
    """Assigns one buffer and updates another in place. A part of it can be left out of the graph."""

    def __init__(self, leaves_graph: bool) -> None:
        super().__init__()
        self.layer, self.leaves_graph = nn.Linear(3, 3), leaves_graph
        self.register_buffer("mean", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3, momentum=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        if self.leaves_graph:
            torch._dynamo.graph_break()
        return torch.relu(self.norm(self.layer(x)))


@pytest.mark.parametrize("leaves_graph", [False, True])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_buffer_again(mode: str, compiles: bool, leaves_graph: bool) -> None:
    torch.manual_seed(0)
    block = Averaging(leaves_graph)
    by_hand = copy.deepcopy(block)
    apply_activation_checkpointing([block], mode)
    if compiles:
        block.compile(backend="aot_eager")
    for _ in range(2):
        x = torch.rand(4, 3)
        block(x).sum().backward()
        by_hand(x).sum().backward()
    for (name, buffer), (_, expected) in zip(block.named_buffers(), by_hand.named_buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, msg=name)
    for parameter, expected in zip(block.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
