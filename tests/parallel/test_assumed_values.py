"""A trace on fake tensors goes on where forward reads values inside a part, or values that never change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from rung.errors import ModelError
from rung.parallel.forward_trace import ForwardTrace
from rung.parallel.forward_tracer import ForwardTracer


class Part(nn.Module):
    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self.layers, x)


def traced(function: Callable[[nn.Module, Tensor], Tensor]) -> ForwardTrace:
    tracer = ForwardTracer(
        nn.Sequential(Part(function), nn.Linear(4, 2)), lambda model, batch: model(batch), torch.device("cpu")
    )
    tracer.is_part = lambda name, module: name in ("0", "1")
    return tracer(torch.zeros(6, 4))


def _skipping(layers: nn.Module, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else layers[0](x)


def _first_of(layers: nn.Module, x: Tensor) -> Tensor:
    return layers[int(x.argmax())](x)


def _selecting(layers: nn.Module, x: Tensor) -> Tensor:
    output = torch.zeros_like(x)
    for layer, mask in zip(layers, (x > 0).unbind(1)[:3], strict=True):
        rows = mask.nonzero().squeeze(1)
        if rows.numel() > 0:
            output[mask] += layer(x[mask]) + layer(x[rows])
    return output


def _counting(layers: nn.Module, x: Tensor) -> Tensor:
    values, places, counts = (x > 0).long().unique(return_inverse=True, return_counts=True)
    order = torch.bincount(places.flatten(), minlength=3)[:3].repeat_interleave(torch.ones_like(counts)[:3])
    return layers[0](x) + x.masked_select(x > 0).sum() + order.sum() + values.sum()


def _splitting(layers: nn.Module, x: Tensor) -> Tensor:
    """Rows sorted by the layer that they go to, as mixtures of experts do."""
    choice = x[:, :3].argmax(1)
    counts = torch.bincount(choice, minlength=3)
    share = counts / torch.ones(3)
    parts = x[choice.argsort()].split(counts.tolist())
    return torch.cat([layer(part) for layer, part in zip(layers, parts, strict=True)]) * share.sum()


def _naming(layers: nn.Module, x: Tensor) -> Tensor:
    named = {f"expert_{number}": layer for number, layer in enumerate(layers.children())}
    for number in (x > 0).any(0).nonzero():
        x = named[f"expert_{number[0]}"](x)
    return x


def _converting(layers: nn.Module, x: Tensor) -> Tensor:
    """To what it is, and back from a tensor's type."""
    return layers[0].to(torch.float32)(x) + layers[1].to(x)(x)


def _raising(layers: nn.Module, x: Tensor) -> Tensor:
    assert not x.isnan().any()
    if (x > 100).any():
        raise ValueError("too large")
    return layers[0](x) if (x > 0).all() else x


@pytest.mark.parametrize("function", [_skipping, _first_of, _selecting, _counting, _splitting, _naming, _raising])
def test_a_part_that_reads_values_is_traced_and_keeps_all_of_its_parameters(
    function: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    found = traced(function)
    assert [tuple(call.output_tensors()[0].shape) for call in found.calls] == [(6, 4), (6, 2)]
    assert "test_assumed_values.py" in found.calls[0].reads_values
    assert found.calls[1].reads_values == ""
    assert len(found.calls[0].parameters) == 6
    assert found.unused == []


def test_a_module_may_be_converted_to_what_it_is() -> None:
    assert traced(_converting).calls[0].reads_values == ""
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64


def test_a_module_that_forward_converts_is_refused_with_the_line() -> None:
    def converting(layers: nn.Module, x: Tensor) -> Tensor:
        return layers[0].to(torch.float64)(x.double())

    with pytest.raises(
        ModelError, match=r"converting|layers\[0\].*\n.*Linear.weight from float32 on cpu to float64 on cpu"
    ):
        traced(converting)


def test_a_part_that_fails_with_all_values_is_refused_with_the_line_that_reads_them() -> None:
    def refusing(layers: nn.Module, x: Tensor) -> Tensor:
        return layers[0](x.view((x > 0).sum(0).tolist()))

    with pytest.raises(
        ModelError, match=r"tolist\(\)\)\)\nforward branches on tensor values here[\s\S]*RuntimeError: shape"
    ):
        traced(refusing)


def test_an_error_that_has_nothing_to_do_with_values_keeps_its_words() -> None:
    def wrong(layers: nn.Module, x: Tensor) -> Tensor:
        raise LookupError("no such thing")

    with pytest.raises(ModelError, match="cannot be traced on fake tensors: LookupError: no such thing"):
        traced(wrong)


class Deciding(nn.Module):
    """Decides between its parts."""

    def __init__(self, decide: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)
        self._decide = decide

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.one(x) if self._decide(x) else self.other(x)
        return output


def parts_called(decide: Callable[[Tensor], bool]) -> list[str]:
    tracer = ForwardTracer(Deciding(decide), lambda model, batch: model(batch), torch.device("cpu"))
    tracer.is_part = lambda name, module: name in ("one", "other")
    return [call.name for call in tracer(torch.zeros(6, 4)).calls]


def _is_causal(x: Tensor) -> bool:
    mask = torch.triu(torch.full((len(x), len(x)), float("-inf")), diagonal=1)
    return bool((mask == nn.Transformer.generate_square_subsequent_mask(len(x))).all())


def _is_listed(x: Tensor) -> bool:
    return int(torch.tensor([3, 5, 6]).argmax()) == 0


def _was_changed(x: Tensor) -> bool:
    mask = torch.ones(4, dtype=torch.bool)
    mask[2:] = x[0, 2:] > 0
    return bool(mask.all())


def _is_left_open(x: Tensor) -> bool:
    return bool((torch.empty(3) > 0).all())


def _is_drawn(x: Tensor) -> bool:
    return bool((torch.rand(3) > 0.5).all())


def test_a_decision_by_values_that_never_change_is_taken_as_in_every_run() -> None:
    assert parts_called(_is_causal) == ["one"]
    assert parts_called(_is_listed) == ["other"]


@pytest.mark.parametrize("decide", [_was_changed, _is_left_open, _is_drawn])
def test_a_decision_between_parts_by_unknown_values_is_refused(decide: Callable[[Tensor], bool]) -> None:
    with pytest.raises(ModelError, match="forward branches on tensor values here"):
        parts_called(decide)
