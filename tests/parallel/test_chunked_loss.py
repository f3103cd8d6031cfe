"""A cross entropy in chunks is torch's own, in value and gradients, and anything else gets the logits."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.errors import ModelError
from rung.parallel.chunked_loss import ChunkedLinear, HeadOutput

BATCH, LENGTH, WIDTH, CLASSES = 3, 7, 5, 11
Loss = Callable[[Tensor, Tensor], Tensor]


def head(bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)


def chunked(layer: nn.Linear, rows: int = 4) -> nn.Linear:
    layer.__class__ = ChunkedLinear
    layer.rows_per_chunk = rows  # type: ignore[assignment]
    return layer


def outcome(layer: nn.Linear, loss: Loss, device_type: torch.dtype | None = None) -> tuple[Tensor, list[Tensor | None]]:
    torch.manual_seed(2)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=layer.weight.dtype, requires_grad=True)
    target = torch.randint(CLASSES, (BATCH, LENGTH))
    target[0, 2:5] = -100
    with torch.autocast("cpu", dtype=device_type, enabled=device_type is not None):
        value = loss(layer(x), target)
    (3 * value.sum()).backward()
    return value.detach(), [x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad]


def flat(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), **options)


WEIGHTS = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)
LOSSES: dict[str, Loss] = {
    "mean": flat,
    "sum": lambda y, t: flat(y, t, reduction="sum"),
    "rows": lambda y, t: flat(y, t, reduction="none") * torch.arange(BATCH * LENGTH),
    "module": lambda y, t: nn.CrossEntropyLoss()(y.flatten(0, 1), t.flatten()),
    "smoothed": lambda y, t: flat(y, t, label_smoothing=0.1),
    "weighted": lambda y, t: flat(y, t, weight=WEIGHTS),
    "weighted by bytes": lambda y, t: flat(y, t.clamp(min=0).byte(), weight=WEIGHTS),
    "weighted rows": lambda y, t: flat(y, t, weight=WEIGHTS, reduction="none"),
    "other class ignored": lambda y, t: flat(y, t.clamp(min=0), ignore_index=3),
    "all ignored but the sum": lambda y, t: flat(y, torch.full_like(t, -100), reduction="sum"),
    "shifted": lambda y, t: F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)),
    "shifted with dots": lambda y, t: F.cross_entropy(
        y[..., :-1, :].contiguous().view(-1, y.size(-1)), t[..., 1:].contiguous().view(-1)
    ),
    "classes second": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "permuted": lambda y, t: F.cross_entropy(y.permute(0, 2, 1), t, reduction="none").mean(),
    "masked": lambda y, t: F.cross_entropy(y[t >= 0], t[t >= 0]),
    "chosen rows": lambda y, t: F.cross_entropy(y[torch.tensor([0, 0, 2])].reshape(-1, CLASSES), t[[0, 0, 2]].view(-1)),
    "the last position": lambda y, t: F.cross_entropy(y[:, -1], t[:, -1]),
    "in fp32": lambda y, t: flat(y.float(), t),
    "in fp64": lambda y, t: flat(y.to(torch.float64), t),
    "two parts": lambda y, t: (
        F.cross_entropy(y[:, :4].reshape(-1, CLASSES), t[:, :4].reshape(-1))
        + 2 * F.cross_entropy(y[:, 3:].reshape(-1, CLASSES), t[:, 3:].reshape(-1))
    ),
}
# These need the logits, wholly or beside the loss.
OTHERS: dict[str, Loss] = {
    "beside a penalty": lambda y, t: flat(y, t) + 1e-2 * y.logsumexp(-1).square().mean(),
    "a penalty first": lambda y, t: 1e-2 * y.logsumexp(-1).square().mean() + flat(y, t),
    "capped": lambda y, t: flat(5 * torch.tanh(y / 5), t),
    "by hand": lambda y, t: -y.log_softmax(-1).gather(-1, t.clamp(min=0)[..., None]).mean(),
    "probabilities": lambda y, t: F.cross_entropy(y.view(-1, CLASSES), y.detach().view(-1, CLASSES).softmax(-1)),
    "weighted and smoothed": lambda y, t: flat(y, t.clamp(min=0), weight=WEIGHTS, label_smoothing=0.1),
    "chosen classes": lambda y, t: y[..., 2:5].square().mean() + y[:, :, 0].sum(),
    "rounded between": lambda y, t: flat(y.to(torch.bfloat16).float(), t),
    "of a part": lambda y, t: flat(y, t) + y[:, 2:4].exp().sum(),
    "turned around": lambda y, t: F.cross_entropy(y.transpose(0, 1).reshape(-1, CLASSES), t.t().reshape(-1)),
}


@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_value_and_gradients_are_torch_s_own(name: str, rows: int) -> None:
    loss = LOSSES.get(name) or OTHERS[name]
    expected, gradients = outcome(head(), loss)
    found, others = outcome(chunked(head(), rows), loss)
    near = 1e-12 if expected.dtype == torch.float64 else 1e-6
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    for own, other in zip(others, gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=near, atol=near)


def test_classes_that_cannot_be() -> None:
    """Their logits are -inf, and a loss may be larger than the logarithm of the smallest number."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(-1, CLASSES), torch.full((BATCH * LENGTH,), 2))

    for value in (-1e4, -torch.inf):
        layers = [head(), chunked(head(), 4)]
        for layer in layers:
            assert layer.bias is not None
            layer.bias.data[1:3] = torch.tensor([value, -200.0])
        (expected, gradients), (found, others) = (outcome(layer, loss) for layer in layers)
        assert 150 < float(expected) < 250
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(others, gradients)


def test_a_type_of_targets_that_torch_refuses_is_refused_in_chunks_too() -> None:
    """Else a run would end at the first batch that fits into one chunk."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.view(-1, CLASSES), target.view(-1).int())

    for layer in (head(), chunked(head(), 4)):
        with pytest.raises(RuntimeError, match="Int"):
            outcome(layer, loss)


@pytest.mark.parametrize("name", LOSSES)
def test_logits_are_not_computed(name: str) -> None:
    seen: list[HeadOutput] = []
    layer = chunked(head())
    layer.register_forward_hook(lambda module, given, output: seen.append(output))
    outcome(layer, LOSSES[name])
    (output,) = seen
    assert isinstance(output, HeadOutput) and output.shape == (BATCH, LENGTH, CLASSES)
    assert output.call.is_chunked and not output.call.is_whole


def test_frozen_layers_and_layers_without_a_bias() -> None:
    expected, gradients = outcome(head(bias=False), flat)
    found, others = outcome(chunked(head(bias=False)), flat)
    torch.testing.assert_close([found, others[0], others[1]], [expected, gradients[0], gradients[1]])
    frozen = chunked(head()).requires_grad_(False)
    _, (own, weight, bias) = outcome(frozen, flat)
    torch.testing.assert_close(own, outcome(head(), flat)[1][0])
    assert weight is None and bias is None


def test_without_gradients_the_value_is_the_same() -> None:
    with torch.no_grad():
        x, target = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (BATCH, LENGTH))
        output = chunked(head())(x)
        torch.testing.assert_close(flat(output, target), flat(head()(x), target))
        assert not output.requires_grad
        torch.testing.assert_close(output.argmax(-1), head()(x).argmax(-1))
        assert (output.numpy() == head()(x).numpy()).all()
        assert output.tolist() == head()(x).tolist()
        torch.testing.assert_close(torch.from_dlpack(chunked(head())(x)), head()(x))
        torch.testing.assert_close(pickle.loads(pickle.dumps(output)), head()(x))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomalies_are_detected() -> None:
    with torch.autograd.detect_anomaly():
        torch.testing.assert_close(outcome(chunked(head()), flat), outcome(head(), flat))
        with pytest.raises(RuntimeError, match="returned nan values"):
            outcome(chunked(head()), lambda y, t: flat(y, t) * torch.tensor(torch.nan))


def test_a_mean_over_nothing_is_nan_as_in_torch() -> None:
    value, _ = outcome(chunked(head()), lambda y, t: flat(y, torch.full_like(t, -100)))
    assert value.isnan()


@pytest.mark.parametrize("name", ["mean", "rows", "shifted", "in fp32", "by hand", "capped"])
def test_under_autocast_it_is_as_near_as_rounding_allows(name: str) -> None:
    loss = LOSSES.get(name) or OTHERS[name]
    _, gradients = outcome(head(dtype=torch.float32), loss)
    usual, usual_gradients = outcome(head(dtype=torch.float32), loss, torch.bfloat16)
    found, others = outcome(chunked(head(dtype=torch.float32)), loss, torch.bfloat16)
    assert found.dtype == usual.dtype
    torch.testing.assert_close(found, usual, rtol=1e-5, atol=1e-5)
    for own, other, true in zip(others, usual_gradients, gradients, strict=True):
        assert own is not None and other is not None and true is not None and own.dtype == other.dtype
        assert (own - true).abs().max() <= 2 * (other - true).abs().max() + 1e-3 * true.abs().max()


def test_the_scale_of_a_mean_is_not_rounded_to_half() -> None:
    """One over 21 rows is no number of bf16: rounded, it would change all gradients by the same factor."""
    _, gradients = outcome(head(dtype=torch.float32), flat)
    _, others = outcome(chunked(head(dtype=torch.float32)), flat, torch.bfloat16)
    for own, true in zip(others, gradients, strict=True):
        assert own is not None and true is not None
        assert abs((own * true).sum() / (true * true).sum() - 1) < 2e-3


def test_backward_twice_adds_twice() -> None:
    layer, x = chunked(head()), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    value = flat(layer(x), torch.randint(CLASSES, (BATCH, LENGTH)))
    value.backward(retain_graph=True)
    assert layer.weight.grad is not None
    once = layer.weight.grad.clone()
    value.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * once)


def _written_by_a_view(y: Tensor, t: Tensor) -> Tensor:
    y.view(-1, CLASSES)[:, 0] = -5.0
    return F.cross_entropy(y.transpose(1, 2), t)


def _written_before_a_view(y: Tensor, t: Tensor) -> Tensor:
    z = y.view(-1, CLASSES)
    y[..., 0] = -5.0
    return F.cross_entropy(z, t.view(-1))


@pytest.mark.parametrize("loss", [_written_by_a_view, _written_before_a_view])
def test_views_of_logits_that_are_written_to_are_refused(loss: Loss) -> None:
    with pytest.raises(ModelError, match=r"changed in place.*chunked_loss=never"):
        outcome(chunked(head()), loss)


def test_logits_of_a_weight_that_has_changed_are_refused() -> None:
    layer, x = chunked(head()), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        early, late = layer(x), layer(x)
        there = early.sum()  # computed in time
        layer.weight.mul_(0.5)
        assert early.sum() == there
        with pytest.raises(ModelError, match=r"weight .* changed in place.*chunked_loss=never"):
            late.sum()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradients_of_gradients_are_refused(reduction: str) -> None:
    layer, x = chunked(head()), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = flat(layer(x), torch.randint(CLASSES, (BATCH, LENGTH)), reduction=reduction).sum()
    with pytest.raises(ModelError, match=r"create_graph.*chunked_loss=never"):
        torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_layer_in_fp32_stays_so_under_autocast(reduction: str) -> None:
    def of(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(4)
        x, target = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(CLASSES, (BATCH, LENGTH))
        output = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = flat(output, target, reduction=reduction).sum()
        loss.backward()
        return loss.detach(), layer.weight.grad

    torch.testing.assert_close(of(chunked(head(dtype=torch.float32))), of(head(dtype=torch.float32)))


def test_logits_may_be_added_to_something_else_in_place() -> None:
    x, total = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.ones(BATCH, LENGTH, CLASSES).double()
    with torch.no_grad():
        total += chunked(head())(x)
        torch.testing.assert_close(total, 1 + head()(x))


def test_changes_in_place_are_refused() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    with pytest.raises(ModelError, match=r"in place.*chunked_loss=never"):
        chunked(head())(x).div_(2)


def test_hooks_get_the_gradient_of_logits() -> None:
    seen: list[Tensor] = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        logits.retain_grad()
        logits.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        seen.append(logits)
        return flat(logits, target)

    torch.testing.assert_close(outcome(chunked(head()), loss), outcome(head(), loss))
    torch.testing.assert_close(seen[0].grad, seen[1].grad)


def test_hooks_that_come_after_an_arrangement_of_the_rows_are_refused() -> None:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        rows = logits.flatten(0, 1)
        logits.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
        return F.cross_entropy(rows, target.flatten())

    with pytest.raises(ModelError, match=r"gradient of the logits.*chunked_loss=never"):
        outcome(chunked(head()), loss)


def test_few_rows_are_computed_at_once() -> None:
    assert type(chunked(head(), rows=BATCH * LENGTH)(torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64))) is Tensor
