"""`--precision fp8`: every strategy takes the way of one process, as far as float8 goes; what it cannot do is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.errors import EnvironmentProblem, ModelError
from rung.parallel.float8 import Float8Linear
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import Outcome, with_rung, with_rung_traced


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 1)  # too narrow for float8

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed))) * torch.sigmoid(self.gate(normed))


class Net(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _data() -> TensorDataset:
    tokens = torch.randint(20, (27, 6), generator=torch.Generator().manual_seed(1)).sort(1).values
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def make_task(model: Any = Net) -> Task:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.2)

    return Task(model, _data, _loss, optimizer, name="float8", eval_data=_data)


def _config(**changes: Any) -> RunConfig:
    base = {"batch_size": 9, "steps": 4, "precision": "fp8", "fp8_emulate": True, "device": "cpu", "micro_batch": 5}
    return RunConfig(**{**base, **changes})  # type: ignore[arg-type]


def _start() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(Net().state_dict())


def _apart(ours: Outcome, other: Outcome) -> float:
    """How far two ends of training are apart, relative to the way from the start. All of it is the update's scale and
    direction: a gradient twice as large gives 1."""
    start = _start()
    way = sum(float((torch.as_tensor(other.state[name]) - start[name]).square().sum()) for name in start)
    off = [torch.as_tensor(ours.state[name]) - torch.as_tensor(other.state[name]) for name in start]
    return float((sum(float(one.square().sum()) for one in off) / way) ** 0.5)


@pytest.fixture(scope="module")
def alone() -> Outcome:
    return with_rung(make_task, "single", _config())


def test_it_trains_as_fp32_does(alone: Outcome) -> None:
    exact = with_rung(make_task, "single", _config(precision="fp32"))
    assert 1e-4 < _apart(alone, exact) < 0.1
    assert alone.losses[-1] < alone.losses[0]
    rows = with_rung(make_task, "single", _config(fp8_scaling="row"))
    assert 1e-4 < _apart(rows, exact) < 0.1
    assert _apart(rows, alone) > 1e-4  # the setting does something


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "changes"),
    [
        slow("ddp", 2, {}),
        ("zero3", 2, {"activation_checkpointing": "selective"}),
        ("tp2", 2, {}),
        slow("tp2", 2, {"sequence_parallel": True, "fp8_scaling": "row"}),
        ("pp2", 2, {}),
        slow("pp2", 2, {"schedule": "zb"}),
        slow("fsdp2,tp2", 4, {}),
        slow("pp2,zero1x2", 4, {"clip": 1.0}),
        slow("dp", 1, {}),
    ],
)
def test_a_strategy_takes_the_way_of_one_process(
    alone: Outcome, strategy: str, num_ranks: int, changes: dict[str, Any]
) -> None:
    found = on_ranks(with_rung, num_ranks, make_task, strategy, _config(**changes))
    if "clip" in changes:
        alone = with_rung(make_task, "single", _config(clip=changes["clip"]))
    assert _apart(found[0], alone) < 0.1
    assert any(note.startswith("fp8: 8 linear layers multiply in float8") for note in found[0].notes), found[0].notes


def test_compiled_code_computes_the_same(alone: Outcome) -> None:
    (found,) = on_ranks(with_rung_traced, 1, make_task, "single", _config(compile=True))
    assert _apart(found, alone) < 0.05


# -- the product -------------------------------------------------------------------------------------------------------


def _layer(inputs: int, outputs: int, *, rows: bool) -> Float8Linear:
    torch.manual_seed(1)
    layer = nn.Linear(inputs, outputs)
    layer.__class__ = Float8Linear
    assert isinstance(layer, Float8Linear)
    layer.scales_rows = rows
    return layer


def _rounded(tensor: Tensor, kind: torch.dtype, *, rows: bool) -> Tensor:
    """What float8 leaves of a factor."""
    most = torch.finfo(kind).max
    largest = tensor.abs().amax(1, keepdim=True) if rows else tensor.abs().amax()
    scale = most / largest.float()
    scale = 2.0 ** scale.log2().floor() if rows else scale
    return (tensor * scale).clamp(-most, most).to(kind).double() / scale.double()


@pytest.mark.parametrize("rows", [False, True])
def test_a_product_is_that_of_the_rounded_factors(rows: bool) -> None:
    layer = _layer(32, 48, rows=rows)
    x = torch.randn(3, 7, 32).bfloat16().float().requires_grad_()  # 21 tokens, which 16 does not divide
    gradient = torch.randn(3, 7, 48).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
    result.backward(gradient)
    e4m3, down = torch.float8_e4m3fn, torch.float8_e4m3fn if rows else torch.float8_e5m2
    flat, weight, flat_gradient = x.detach().flatten(0, 1), layer.weight.detach(), gradient.flatten(0, 1).float()
    expected = _rounded(flat, e4m3, rows=rows) @ _rounded(weight, e4m3, rows=rows).T + layer.bias.detach().double()
    torch.testing.assert_close(result.flatten(0, 1).double(), expected, rtol=2e-2, atol=2e-2)
    for_input = _rounded(flat_gradient, down, rows=rows) @ _rounded(weight.T, e4m3, rows=rows).T
    assert x.grad is not None and layer.weight.grad is not None
    torch.testing.assert_close(x.grad.flatten(0, 1).double(), for_input, rtol=2e-2, atol=2e-2)
    for_weight = _rounded(flat_gradient.T, down, rows=rows) @ _rounded(flat.T, e4m3, rows=rows).T
    torch.testing.assert_close(layer.weight.grad.double(), for_weight, rtol=2e-2, atol=2e-2)


def test_zeros_empty_batches_and_regions_without_autocast() -> None:
    layer = _layer(32, 48, rows=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(4, 32)).isfinite().all()
        assert layer(torch.zeros(0, 32)).shape == (0, 48)
        with torch.autocast("cpu", enabled=False):
            x = torch.randn(4, 32)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_cpu_is_refused_with_the_way_to_try_it() -> None:
    with pytest.raises(EnvironmentProblem, match=r"a CPU has none.*--set fp8_emulate=true"):
        with_rung(make_task, "single", _config(fp8_emulate=False))


def test_a_model_without_a_layer_for_it_is_refused() -> None:
    def narrow() -> nn.Module:
        return Net(width=20)

    with pytest.raises(
        ModelError, match=r"none that it could: 12 not, of sizes that 16 does not divide; 1 not, outside"
    ):
        with_rung(lambda: make_task(narrow), "single", _config())


def test_a_model_without_repeated_blocks_is_refused_with_the_way_to_name_them() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))

    with pytest.raises(ModelError, match=r'no list of equal blocks.*blocks = "layers'):
        with_rung(lambda: make_task(plain), "single", _config())


# -- what the task sees ------------------------------------------------------------------------------------------------


def test_an_optimizer_that_groups_by_class_gets_the_groups_of_bf16() -> None:
    sizes: dict[str, int] = {}

    def grouping(precision: str) -> Task:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            linear = [p for m in model.modules() if type(m) is nn.Linear for p in m.parameters()]
            sizes[precision] = len(linear)
            rest = [p for p in model.parameters() if all(p is not other for other in linear)]
            return torch.optim.SGD([{"params": linear, "lr": 0.1}, {"params": rest, "lr": 0.2}])

        return Task(Net, _data, _loss, optimizer, name="float8", eval_data=_data)

    for precision in ("bf16", "fp8"):
        with_rung(lambda precision=precision: grouping(precision), "single", _config(precision=precision, steps=1))
    assert sizes["fp8"] == sizes["bf16"] == 4 * 6 + 1


def test_a_layer_whose_forward_the_task_has_replaced_is_left_alone() -> None:
    def patched() -> nn.Module:
        net = Net()
        for block in net.blocks:
            block.up.forward = lambda x, layer=block.up: F.linear(x, layer.weight, layer.bias)  # type: ignore[union-attr]
        return net

    found = with_rung(lambda: make_task(patched), "single", _config(steps=1))
    assert any(note.startswith("fp8: 4 linear layers multiply in float8") for note in found.notes)
