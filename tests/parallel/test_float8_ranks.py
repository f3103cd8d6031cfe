"""`--precision fp8`: every strategy takes the way of one process, as far as float8 goes; what it cannot do is said."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.errors import EnvironmentProblem, ModelError
from rung.parallel.float8 import Float8Linear, GatheredWeight
from rung.parallel.float8_cast import FACTOR
from rung.planner.dryrun import dry_run
from rung.planner.tracer import tensors_of
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
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


# -- gathered in float8 ------------------------------------------------------------------------------------------------

GATHERED = "fp8: FSDP gathers the weights of these {} layers in float8"


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "others", "num_layers"),
    [
        ("zero3", 3, "ddp", 8),  # 64 and 256 rows on three ranks
        slow("zero3", 2, "ddp", 8),
        slow("zero2", 2, "ddp", 8),
        slow("hsdp2x2", 4, "ddp", 8),
        slow("pp2,fsdp2", 4, "pp2,ddp2", 4),
        slow("pp2,zero2x2", 4, "pp2,ddp2", 4),
    ],
)
def test_weights_gathered_in_float8_are_those_that_each_rank_would_cast(
    strategy: str, num_ranks: int, others: str, num_layers: int
) -> None:
    expected = on_ranks(with_rung, num_ranks, make_task, others, _config())[0]
    found = on_ranks(with_rung, num_ranks, make_task, strategy, _config())[0]
    assert GATHERED.format(num_layers) in found.notes
    assert found.losses[0] == expected.losses[0]
    assert _apart(found, expected) < 1e-3  # the order of sums, which rounding makes larger
    for name, value in expected.evaluation.items():
        assert found.evaluation[name] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("run", [with_rung_traced, slow(with_rung)])
def test_compiled_code_takes_weights_gathered_in_float8(alone: Outcome, run: Any) -> None:
    found = on_ranks(run, 2, make_task, "zero3", _config(compile=True), timeout=600)
    assert GATHERED.format(8) in found[0].notes
    assert _apart(found[0], alone) < 0.05


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("zero3", {"gather": "fp32"}),
        slow("zero3", {"fp8_scaling": "row"}),
        slow("zero3", {"offload": "cpu"}),
        slow("fsdp2,tp2", {}),
        slow("ddp", {}),
    ],
)
def test_other_settings_gather_as_under_bf16(strategy: str, changes: dict[str, Any]) -> None:
    run = dry_run(make_task(), parse(strategy, 4), _config(**changes), device="cuda")
    assert GATHERED.format(8) not in run.notes


def test_a_plan_sees_that_half_the_bytes_are_gathered() -> None:
    def gathered(**changes: Any) -> list[int]:
        config = _config(batch_size=10, micro_batch=None, **changes)
        run = dry_run(make_task(), parse("zero3", 2), config, device="cuda")
        sent = run.trace.messages(run.second_step)
        return [message.num_bytes for message in sent if message.operation == "all-gather"]

    whole, half = gathered(fp8_scaling="row"), gathered()
    in_float8 = 2 * 64 * 256  # of a block
    assert [before - after for before, after in zip(whole, half, strict=True)] == [0, *[in_float8] * (len(whole) - 1)]


def test_a_plan_counts_a_gathered_weight_by_its_float8_elements() -> None:
    weight = GatheredWeight(torch.zeros(32, 16, dtype=FACTOR), torch.ones(()), torch.bfloat16)
    assert tensors_of([weight, weight.factor]) == [weight.factor]


class PeekingBlock(Block):
    """Reads a weight of a float8 layer itself."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        wide = F.gelu(F.linear(normed, self.up.weight, self.up.bias))
        return x + self.down(wide) * torch.sigmoid(self.gate(normed))


def peeking_net() -> Net:
    net = Net()
    for block in net.blocks:
        block.__class__ = PeekingBlock
    return net


def test_a_weight_that_the_model_reads_itself_is_not_rounded_in_silence() -> None:
    task = partial(make_task, peeking_net)
    found = on_ranks(_refusal, 2, task)
    assert all("--set gather=fp32 gathers such weights as they are" in one for one in found)
    assert on_ranks(with_rung, 2, task, "zero3", _config(gather="fp32", steps=1))[0].losses


def _refusal(task: Any) -> str:
    with pytest.raises(ModelError) as caught:
        with_rung(task, "zero3", _config(steps=1))
    return str(caught.value)


def test_a_layer_without_rows_takes_a_gathered_weight() -> None:
    layer = _layer(32, 48, rows=False)
    x = torch.zeros(2, 0, 32, requires_grad=True)
    weight = nn.Parameter(GatheredWeight(layer.weight.detach().to(FACTOR), torch.ones(()), torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        result = layer.product(x, weight, None)
    assert result.shape == (2, 0, 48)
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and not weight.grad.any()


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
