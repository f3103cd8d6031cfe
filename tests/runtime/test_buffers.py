"""Buffers that forward changes, replaces or creates."""

from __future__ import annotations

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


def test_recomputation_changes_no_buffer_again_that_forward_assigns() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
            return torch.relu(self.layer(x))

    block = Averaging()
    apply_activation_checkpointing([block], "full")
    block(torch.ones(2, 3)).sum().backward()
    assert float(block.mean) == 0.5
