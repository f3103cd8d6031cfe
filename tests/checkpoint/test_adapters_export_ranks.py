"""Adapters trained beside a Llama of transformers: merged for transformers, and as a folder for peft."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from benchmarks.contenders.torchvision_operators import declare_torchvision_operators
from rung.cli.main import main
from rung.distributed.world import open_world
from rung.errors import ConfigError
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.marks import slow
from tests.tasks import text_data, text_task

declare_torchvision_operators()
peft = pytest.importorskip("peft")

CONFIG = RunConfig(batch_size=8, steps=3, device="cpu", clip=1.0, eval_every="never")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    return model


def llama_task() -> Task:
    return hugging_face_task(llama)


def gpt2_task() -> Task:
    return hugging_face_task(gpt2)


def hugging_face_task(model: Any) -> Task:
    return text_task(
        model=model,
        train_data=text_data,
        forward=lambda model, batch: model(batch[0], use_cache=False).logits,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=2.0, momentum=0.9),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
    )


def peft_llama() -> nn.Module:
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    model: nn.Module = peft.get_peft_model(llama(), config)
    return model


def peft_llama_task() -> Task:
    return hugging_face_task(peft_llama)


def peft_head_task() -> Task:
    """A head that is trained as a whole, and an adapter before it."""
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])
    return hugging_face_task(lambda: peft.get_peft_model(llama(), config))


def saved(model: nn.Module, folder: Path, seed: int = 5) -> Path:
    torch.manual_seed(seed)
    type(model)(model.config).save_pretrained(folder)  # type: ignore[operator, union-attr]
    return folder


def rung(*words: Any) -> None:
    assert main([str(word) for word in words]) == 0


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(text_data(4)[:][0], use_cache=False).logits
    return logits


def trained(task: Task, config: RunConfig, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logits of the model with these weights, as one process computes them."""
    with open_world(parse("single", 1), device="cpu") as world:
        model = build_runtime(task, world, config).model
    model.load_state_dict(state, strict=True)
    return logits_of(model)


@pytest.mark.parametrize(
    ("make_task", "make", "targets", "strategy", "ranks"),
    [
        (llama_task, llama, "", "fsdp2,tp2", 4),
        slow(llama_task, llama, ",targets=q_proj+down_proj", "ddp", 2),
        slow(llama_task, llama, ",targets=o_proj+lm_head", "tp2", 2),
        slow(gpt2_task, gpt2, ",targets=c_attn+mlp.c_proj", "zero3", 2),
        slow(gpt2_task, gpt2, "", "tp2", 2),
    ],
)
def test_transformers_and_peft_load_what_was_trained(
    make_task: Any, make: Any, targets: str, strategy: str, ranks: int, tmp_path: Path
) -> None:
    base = saved(make(), tmp_path / "base")
    chosen = replace(CONFIG, init=str(base), lora=f"r=3,alpha=6{targets}")
    run = tmp_path / "run"
    _, state = legs(make_task, chosen, run, [(strategy, ranks, 3)])
    expected = trained(make_task(), chosen, state)
    kind = type(make())
    begun = kind.from_pretrained(base)
    assert (logits_of(begun) - expected).abs().max() > 1e-3  # or there would be nothing to see
    rung("export", run, "--output", tmp_path / "hf", "--format", "hf", "--like", base, "--base", base)
    merged, told = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert (logits_of(merged) - expected).abs().max() < 1e-6
    rung("export", run, "--output", tmp_path / "peft", "--format", "peft", "--base", base)
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(base), tmp_path / "peft")
    assert (logits_of(adapted) - expected).abs().max() < 1e-6
    # One file, and without --merge what the checkpoint has.
    rung("export", run, "--output", tmp_path / "merged.safetensors", "--merge", "--base", base)
    begun.load_state_dict(load_file(tmp_path / "merged.safetensors"), strict=not begun.config.tie_word_embeddings)
    assert (logits_of(begun) - expected).abs().max() < 1e-6
    rung("export", run, "--output", tmp_path / "own.safetensors")
    own = load_file(tmp_path / "own.safetensors")
    assert own and all(".lora_" in name for name in own)


@pytest.mark.parametrize("make_task", [slow(peft_llama_task), peft_head_task])
def test_adapters_of_peft_are_exported_from_its_own_models(make_task: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = tmp_path / "base"
    _, state = legs(make_task, CONFIG, tmp_path / "run", [("zero3", 2, 2), ("single", 1, 3)])
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", ""): value
        for name, value in state.items()
        if ".lora_" not in name and ".modules_to_save" not in name
    }
    model = llama()
    model.load_state_dict(plain, strict=True)
    model.save_pretrained(base)
    expected = trained(make_task(), CONFIG, state)
    rung("export", tmp_path / "run", "--output", tmp_path / "peft", "--format", "peft")
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "peft")
    assert (logits_of(adapted) - expected).abs().max() < 1e-6
    rung("export", tmp_path / "run", "--output", tmp_path / "hf", "--format", "hf", "--like", base, "--base", base)
    assert (logits_of(type(model).from_pretrained(tmp_path / "hf")) - expected).abs().max() < 1e-6
    # What was merged is where a new run may begin: the module and its copy get it.
    rung("export", tmp_path / "run", "--output", tmp_path / "merged.safetensors", "--merge", "--base", base)
    begun = replace(CONFIG, init=str(tmp_path / "merged.safetensors"), steps=0)
    with open_world(parse("single", 1), device="cpu") as world:
        found = build_runtime(make_task(), world, begun).model
    assert (logits_of(found) - expected).abs().max() < 1e-6


def dora(make: Any, targets: list[str]) -> nn.Module:
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, use_dora=True, use_rslora=True)
    model: nn.Module = peft.get_peft_model(make(), config)
    return model


def dora_llama_task() -> Task:
    return hugging_face_task(partial(dora, llama, ["q_proj", "down_proj"]))


def dora_gpt2_task() -> Task:
    return hugging_face_task(partial(dora, gpt2, ["c_attn", "mlp.c_proj"]))


@pytest.mark.parametrize(
    ("make_task", "make", "route"),
    [
        (dora_llama_task, llama, [("zero3", 2, 2), ("ddp", 2, 3)]),
        slow(dora_gpt2_task, gpt2, [("ps", 3, 2), ("pp2", 2, 3)]),
    ],
)
def test_dora_is_merged_as_peft_does(make_task: Any, make: Any, route: list[Any], tmp_path: Path) -> None:
    chosen = replace(CONFIG, precision="fp64")
    _, state = legs(make_task, chosen, tmp_path / "run", route)
    with open_world(parse("single", 1), device="cpu") as world:
        model: Any = build_runtime(make_task(), world, chosen).model
    begun, names = logits_of(model), [name for name in state if "lora_magnitude_vector" in name]
    lengths = {name: model.state_dict()[name].clone() for name in names}
    model.load_state_dict(state, strict=True)
    assert names and all((state[name] - lengths[name]).abs().max() > 1e-4 for name in names)
    assert (logits_of(model) - begun).abs().max() > 1e-3
    base = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value.clone()
        for name, value in state.items()
        if ".lora_" not in name
    }
    plain = make().double()
    plain.load_state_dict(base, strict=True)
    plain.save_pretrained(tmp_path / "base")
    run, output = tmp_path / "run", tmp_path / "merged.safetensors"
    rung("export", run, "--output", output, "--merge", "--base", tmp_path / "base")
    rung("export", run, "--output", tmp_path / "peft", "--format", "peft")
    adapted = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")
    theirs = logits_of(model.merge_and_unload())
    assert (logits_of(adapted) - theirs).abs().max() < 1e-9
    found = make().double()
    found.load_state_dict(load_file(output), strict=not found.config.tie_word_embeddings)
    assert (logits_of(found) - theirs).abs().max() < 1e-9


def test_another_base_for_dora_is_refused(tmp_path: Path) -> None:
    """The lengths of the rows, with which it begins, are those of the base that model() makes."""
    chosen = replace(CONFIG, init=str(saved(llama(), tmp_path / "base")))
    with open_world(parse("single", 1), device="cpu") as world:
        with pytest.raises(ConfigError, match=r"lora_magnitude_vector.* begins with the lengths .* in model"):
            build_runtime(dora_llama_task(), world, chosen)


@pytest.mark.parametrize("target", ["lm_head", "c_attn"])
def test_a_merged_weight_that_was_tied_is_named(target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = saved(gpt2(), tmp_path / "base")
    chosen = replace(CONFIG, init=str(base), lora=f"r=3,targets={target}", steps=1)
    legs(gpt2_task, chosen, tmp_path / "run", [("single", 1, 1)])
    rung("export", tmp_path / "run", "--output", tmp_path / "merged.safetensors", "--merge", "--base", base)
    told = "lm_head.weight was tied to transformer.wte.weight" in caplog.text
    assert told is (target == "lm_head")


def test_what_cannot_be_exported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = saved(llama(), tmp_path / "base")
    chosen = replace(CONFIG, init=str(base), lora="r=3,targets=q_proj", steps=1)
    run, output = tmp_path / "run", tmp_path / "out.safetensors"
    legs(llama_task, chosen, run, [("single", 1, 1)])
    refused = [
        (["--merge"], "did not begin with weights of a file"),
        (["--merge", "--base", saved(llama(), tmp_path / "other", seed=6)], "is not what the adapters were trained"),
        (["--merge", "--base", saved(gpt2(), tmp_path / "gpt2")], "no tensor fits"),
        (["--base", base], "--base is for --merge"),
        (["--format", "peft", "--merge"], "writes the adapters alone"),
    ]
    for flags, message in refused:
        assert main([str(word) for word in ("export", run, "--output", output, *flags)]) == 2
        assert message in capsys.readouterr().err
    assert not output.exists()
