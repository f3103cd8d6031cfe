"""The parts of `parallel` and `runtime` that need no other process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rung.data.pytree import map_tensors
from rung.errors import ModelError
from rung.parallel.activation import apply_activation_checkpointing
from rung.parallel.batchnorm import synchronise_batch_norm
from rung.parallel.blocks import find_blocks
from rung.parallel.gradients import clip, global_norm
from rung.parallel.sharding import choose_units
from rung.runtime.forward import NoDropout, default_type
from rung.runtime.optimizer import make_optimizer
from tests.expert_models import ListLayer
from tests.tasks import TinyCNN, TinyGPT, image_task


def test_blocks_are_the_largest_list_of_like_modules() -> None:
    assert [name for name, _ in find_blocks(TinyGPT())] == ["blocks.0", "blocks.1"]


def test_experts_are_no_blocks() -> None:
    assert [name for name, _ in find_blocks(ListLayer(4))] == ["norm", "router", "experts", "shared"]


def test_blocks_of_a_model_without_a_list_are_its_children() -> None:
    assert [name for name, _ in find_blocks(TinyCNN())] == ["first", "second", "frozen", "head"]


def test_blocks_can_be_named_by_a_pattern() -> None:
    assert [name for name, _ in find_blocks(TinyGPT(), "blocks.*.up")] == ["blocks.0.up", "blocks.1.up"]
    with pytest.raises(ModelError, match="matches no module"):
        find_blocks(TinyGPT(), "layers.*")


def test_units_by_size_reach_the_size_and_leave_no_list_as_a_unit() -> None:
    model = TinyGPT()
    names = [name for name, _ in choose_units(model, "size:400", None)]
    assert "blocks.0.up" in names
    assert "blocks" not in names
    assert choose_units(model, "whole", None) == []
    assert choose_units(model, "size:100M", None) == []


def test_fused_is_chosen_where_the_task_leaves_it_open() -> None:
    model = TinyCNN()

    def build(make: Any, fused: bool = True) -> Any:
        return make_optimizer(image_task(optimizer=make), model, fused=fused, device=torch.device("cpu"))[0]

    groups = [{"params": model.head.parameters(), "lr": 0.5}, {"params": model.first.parameters()}]
    adamw = build(lambda m: torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), weight_decay=0.3))
    assert [(g["fused"], g["lr"], g["betas"], g["weight_decay"]) for g in adamw.param_groups] == [
        (True, 0.5, (0.8, 0.9), 0.3),
        (True, 0.1, (0.8, 0.9), 0.3),
    ]
    assert build(lambda m: torch.optim.AdamW(m.parameters(), foreach=True)).param_groups[0]["fused"] is None
    assert build(lambda m: torch.optim.AdamW(m.parameters(), fused=False)).param_groups[0]["fused"] is False
    assert build(lambda m: torch.optim.AdamW(m.parameters()), fused=False).param_groups[0]["fused"] is None
    assert type(build(lambda m: torch.optim.Adamax(m.parameters()))) is torch.optim.Adamax


def test_a_subclass_of_an_optimizer_is_left_as_it_is() -> None:
    class Own(torch.optim.SGD):
        pass

    model = TinyCNN()
    found, _ = make_optimizer(
        image_task(optimizer=lambda m: Own(m.parameters(), lr=1)), model, fused=True, device=torch.device("cpu")
    )
    assert type(found) is Own


def test_clipping_is_torch_s_own() -> None:
    torch.manual_seed(0)
    ours, theirs = [nn.Parameter(torch.zeros(3)) for _ in range(4)], [nn.Parameter(torch.zeros(3)) for _ in range(4)]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(3)
        b.grad = a.grad.clone()
    norm = global_norm(ours)
    clip(ours, 0.5, norm)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, 0.5))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_the_norm_of_large_gradients_on_a_cpu_is_torch_s_own() -> None:
    gradients = [
        torch.randn(300, 300, dtype=torch.float64),  # computed by all cores
        torch.randn(400, 400, dtype=torch.float64).t(),
        torch.randn(300, 300).half(),
        torch.randn(5),
    ]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.testing.assert_close(global_norm(parameters), torch.nn.utils.get_total_norm(gradients), rtol=1e-7, atol=0)
        torch.testing.assert_close(global_norm(parameters[:1]), gradients[0].norm(), rtol=1e-14, atol=0)
        gradients[0][0, 0] = torch.inf
        assert global_norm(parameters).isinf()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_a_block_that_is_called_twice_is_recomputed_in_half_precision(mode: str) -> None:
    def gradients(checkpointed: bool) -> list[Any]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        if checkpointed:
            apply_activation_checkpointing([block], mode)
        x = torch.randn(3, 4)
        with torch.autocast("cpu", torch.bfloat16):
            result = block(block(x)).sum()
        result.backward()
        return [parameter.grad for parameter in block.parameters()]

    for ours, plain in zip(gradients(True), gradients(False), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_keeps_names_gradients_and_statistics(mode: str) -> None:
    def train(checkpointed: bool) -> Any:
        torch.manual_seed(0)
        model = TinyCNN()
        if checkpointed:
            apply_activation_checkpointing([model.first, model.second], mode)
        model(torch.randn(4, 1, 6, 6)).sum().backward()
        return model.state_dict(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    (state, grads), (other_state, other_grads) = train(False), train(True)
    assert list(state) == list(other_state)
    assert all(torch.equal(state[n], other_state[n]) for n in state)
    assert all(torch.allclose(grads[n], other_grads[n]) for n in grads)


@pytest.fixture
def lone_group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(x))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d, (6, 3)),
        (nn.BatchNorm1d, (6, 3, 5)),
        (nn.BatchNorm2d, (4, 3, 5, 2)),
        (nn.BatchNorm3d, (4, 3, 2, 3, 2)),
        (NormAndActivation, (4, 3, 5, 2)),
    ],
)
def test_synchronised_batch_norm_is_batch_norm(lone_group: Any, momentum: float | None, layer: Any, shape: Any) -> None:
    torch.manual_seed(0)
    plain, synced = (nn.Sequential(layer(3, momentum=momentum)).double() for _ in range(2))
    for model in (plain, synced):
        nn.init.normal_(model[0].weight, generator=torch.Generator().manual_seed(1))
    synchronise_batch_norm(synced, lone_group)
    for step in range(3):
        x = torch.randn(shape, dtype=torch.float64) * 3 + 100 * step
        inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
        for model, value in zip((plain, synced), inputs, strict=True):
            model(value).square().sum().backward()
        assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-9)
    for (name, a), (_, b) in zip(plain.state_dict().items(), synced.state_dict().items(), strict=True):
        assert torch.allclose(a, b, atol=1e-10), name
    assert torch.equal(plain.eval()(x), synced.eval()(x)) or torch.allclose(plain(x), synced(x))


def test_synchronised_batch_norm_does_not_cancel_in_fp32(lone_group: Any) -> None:
    """A mean of 1000 and a deviation of 0.1: the difference of squares would leave nothing, nor a gradient without a
    difference from the mean."""
    torch.manual_seed(0)
    x = torch.randn(64, 2) * 0.1 + 1000
    plain, synced = (nn.Sequential(nn.BatchNorm1d(2)) for _ in range(2))
    synchronise_batch_norm(synced, lone_group)
    outputs, gradients = [], []
    for model in (plain, synced):
        value = x.clone().requires_grad_()
        outputs.append(model(value))
        (outputs[-1] * x.sub(1000)).sum().backward()
        gradients.append(value.grad)
    assert torch.allclose(*outputs, atol=1e-2)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("has_weight", "has_bias"), [(True, True), (True, False), (False, False)])
def test_synchronised_batch_norm_of_any_type_and_layout_keeps_only_its_input(
    lone_group: Any, has_weight: bool, has_bias: bool, dtype: torch.dtype
) -> None:
    """Half and full precision, channels last, with and without weight and bias."""
    torch.manual_seed(0)
    x = (torch.randn(8, 3, 4, 4) + 2).to(dtype, memory_format=torch.channels_last)
    plain, synced = (nn.Sequential(nn.BatchNorm2d(3, affine=has_weight)) for _ in range(2))
    for model in (plain, synced):
        if has_weight and not has_bias:
            model[0].register_parameter("bias", None)
    synchronise_batch_norm(synced, lone_group)
    kept: list[torch.Tensor] = []
    results = []
    for model in (plain, synced):
        value = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            output = model(value)
        output.backward(x.square())
        results.append([output, value.grad, *(parameter.grad for parameter in model.parameters())])
    assert sum(t.dim() == 4 for t in kept) == 2 and all(t.dtype == dtype for t in kept if t.dim() == 4)
    precision = {torch.bfloat16: 2e-2, torch.float32: 1e-5}[dtype]
    for ours, theirs in zip(*reversed(results), strict=True):
        assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=precision, atol=precision)


def test_statistics_of_a_tensor_without_data_have_a_shape_and_a_type() -> None:
    x, running = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4, 3, 5, 5), (3,)))
    for found in torch.batch_norm_update_stats(x, running, running, 0.0):
        assert (found.shape, found.dtype, found.device.type) == ((3,), torch.float32, "meta")


def test_no_dropout_reaches_functions_modules_and_attention() -> None:
    x = torch.ones(4, 2, 6, 8)
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout2d(0.9), nn.AlphaDropout(0.9)).train()
    with NoDropout():
        assert torch.equal(model(x), x)
        assert torch.equal(nn.functional.dropout(x, 0.9), x)
        a = nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.9)
        b = nn.functional.scaled_dot_product_attention(x, x, x, None, 0.9)
    assert torch.allclose(a, x)
    assert torch.allclose(b, x)


def test_tensors_are_found_in_any_nesting() -> None:
    nested = {"a": [torch.ones(1), ("x", torch.ones(1))], "b": 3}
    found = map_tensors(nested, lambda t: t + 1)
    assert found["a"][0] == 2 and found["a"][1][1] == 2 and found["b"] == 3 and found["a"][1][0] == "x"


def test_threads_share_the_default_type_and_leave_it_as_it_was() -> None:
    """torch's is one for the process: of two threads that overlap, the one that came second must not keep it."""
    first, second = default_type(torch.float64), default_type(torch.float64)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_default_dtype() == torch.float64
    second.__exit__(None, None, None)
    assert torch.get_default_dtype() == torch.float32
