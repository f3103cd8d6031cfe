"""Adapters of `--lora`: where they are put, what they begin with, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rung.distributed.world import open_fake_world, open_world
from rung.errors import ConfigError, StrategyError
from rung.parallel.adapters import adapted_layers, describe_adapters, digest_of, initial_value
from rung.planner.dryrun import dry_run
from rung.runtime import Runtime, build_runtime
from rung.spec.compatibility import validate_config
from rung.spec.config import RunConfig, check
from rung.spec.lora import Lora, parse_lora
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.tasks import text_task

CONFIG = RunConfig(batch_size=8, steps=2, device="cpu", lora="r=2")


def built(task: Task, config: RunConfig = CONFIG, strategy: str = "single", ranks: int = 1) -> Runtime:
    layout = parse(strategy, ranks)
    with open_world(layout, device="cpu") if ranks == 1 else open_fake_world(layout) as world:
        return build_runtime(task, world, config, total_steps=2)


def test_the_setting_is_read() -> None:
    assert parse_lora("r=16") == Lora(16, 16)
    assert parse_lora("r=8, alpha=32,targets=q_proj+v_proj,dropout=0.1,base=bf16") == Lora(
        8, 32, ("q_proj", "v_proj"), 0.1, "bf16"
    )
    assert parse_lora("r=4,alpha=2").scale == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "'16' is none of r=, alpha="),
        ("rank=3", "'rank=3' is none of"),
        ("r=3,target=q", "Did you mean 'targets'"),
        ("r=3,r=4", "r is given twice"),
        ("alpha=3", "as in r=16, not None"),
        ("r=2.5", "r is a whole number"),
        ("r=0", "r is a whole number"),
        ("r=x", "r is a number, not 'x'"),
        ("r=3,alpha=0", "alpha must be above 0"),
        ("r=3,dropout=1", "dropout must be at least 0 and below 1"),
        ("r=3,base=int4", "base is bf16, or left out"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check("lora", text)


def test_half_a_base_needs_the_precision() -> None:
    with pytest.raises(ConfigError, match="Use --precision bf16, or leave base out"):
        validate_config(RunConfig(lora="r=2,base=bf16"), parse("ddp", 2))


@pytest.mark.parametrize(
    ("lora", "layers", "ends"),
    [
        ("r=2", 12, {"query", "key", "value", "up", "down"}),
        ("r=2,targets=query+up", 4, {"query", "up"}),
        ("r=2,targets=blocks.1.*", 5, {"query", "key", "value", "up", "down"}),
        ("r=2,targets=head", 1, {"head"}),
    ],
)
def test_targets_are_names_and_patterns(lora: str, layers: int, ends: set[str]) -> None:
    model = built(text_task(), replace(CONFIG, lora=lora)).model
    found = adapted_layers(model)
    assert {name.rpartition(".")[2] for name in found} == ends
    assert len(found) == (10 if layers == 12 else layers)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{name}.lora_{part}.default.weight" for name in found for part in "AB"
    }


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            "qery",
            r"no linear layer is named 'qery'. Did you mean 'query'\? There are: down, head, key, query, up, value",
        ),
        ("norm", "names blocks.0.norm, which is a LayerNorm and no linear layer"),
    ],
)
def test_wrong_targets_are_refused(targets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(text_task(), replace(CONFIG, lora=f"r=2,targets={targets}"))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has none"):
        built(text_task(model=lambda: nn.Sequential(nn.Embedding(23, 23))))


def test_a_model_with_adapters_is_refused() -> None:
    def twice() -> nn.Module:
        return built(text_task()).model

    with pytest.raises(ConfigError, match=r"has adapters already, at blocks\.0\.query"):
        built(text_task(model=twice))


def test_adapters_begin_by_name_and_seed_alone() -> None:
    parameters = dict(built(text_task()).model.named_parameters())
    name = "blocks.1.up.lora_A.default.weight"
    assert torch.equal(parameters[name], initial_value(name, torch.Size([2, 12]), 0))
    assert parameters[name].abs().max() <= 12**-0.5
    assert not torch.equal(parameters[name], initial_value(name, torch.Size([2, 12]), 1))
    assert not torch.equal(parameters[name], parameters[name.replace(".1.", ".0.")])
    assert not parameters[name.replace("lora_A", "lora_B")].any()
    plain = dict(built(text_task(), replace(CONFIG, lora=None)).model.named_parameters())
    assert torch.equal(parameters["blocks.1.up.base_layer.weight"], plain["blocks.1.up.weight"])


def test_a_frozen_base_can_be_kept_in_half_with_the_same_numbers() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
            self.norm = nn.LayerNorm(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    task = text_task(model=Small)
    x = torch.randn(3, 4)
    found = []
    for lora in ("r=2", "r=2,base=bf16"):
        runtime = built(task, replace(CONFIG, lora=lora, precision="bf16"))
        dtypes = {n: p.dtype for n, p in runtime.model.named_parameters()}
        with torch.autocast("cpu", torch.bfloat16):
            found.append(runtime.model(x))
    assert dtypes["blocks.0.0.base_layer.weight"] == torch.bfloat16
    assert dtypes["norm.weight"] == dtypes["blocks.0.0.lora_A.default.weight"] == torch.float32
    assert torch.equal(*found)
    assert "40 in bfloat16 and 8 in float32" in " ".join(runtime.notes)


def test_the_fused_path_of_an_encoder_layer_does_not_skip_adapters() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
            self.layers = nn.TransformerEncoder(layer, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    model = built(text_task(model=Encoder), replace(CONFIG, lora="r=2,targets=linear1+linear2")).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
        x = torch.randn(2, 3, 8)
        assert (model.train()(x) - model.eval()(x)).abs().max() < 1e-6


def test_tensor_ranks_with_unequal_parts_refuse_dropout() -> None:
    task = text_task()
    assert built(task, replace(CONFIG, lora="r=2,dropout=0.1"), "tp2", 2)
    with pytest.raises(StrategyError, match=r"unequal parts of its 36 inputs, and with dropout"):
        built(task, replace(CONFIG, lora="r=2,dropout=0.1,targets=down"), "tp8", 8)


def test_sequence_parallelism_is_refused() -> None:
    with pytest.raises(StrategyError, match="which Rung does not do with adapters"):
        built(text_task(), replace(CONFIG, sequence_parallel=True), "tp2", 2)


def test_adapters_stay_out_of_float8() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16)) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    chosen = replace(CONFIG, lora="r=16", precision="fp8", fp8_emulate=True)
    runtime = built(text_task(model=Wide), chosen)
    assert any("2 linear layers multiply in float8" in note and "4 not, of adapters" in note for note in runtime.notes)
    described = describe_adapters(runtime.model)
    assert described is not None
    assert not described["special"]


def test_a_digest_sees_values_places_and_no_types() -> None:
    values = torch.randn(5, 7)
    assert digest_of(values) == digest_of(values.clone())
    assert digest_of(values) != digest_of(values.flip(0))
    other = values.clone()
    other[3, 3] += 1e-6
    assert digest_of(values) != digest_of(other)
    half = values.bfloat16()
    assert digest_of(half) == digest_of(half.float())
    assert digest_of(values.to(torch.complex64)) != digest_of(values)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("zero3", 4), ("fsdp2,tp2", 4)])
def test_a_plan_sees_the_memory_that_adapters_save(strategy: str, ranks: int) -> None:
    task = text_task(optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    whole = dry_run(task, parse(strategy, ranks), replace(CONFIG, lora=None)).state_bytes
    small = dry_run(task, parse(strategy, ranks), CONFIG).state_bytes
    assert small["optimizer"] < whole["optimizer"] / 2
