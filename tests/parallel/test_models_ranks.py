"""Models of Hugging Face and torchvision, as they are: cut into tensors and stages they give what one process gives.

They come from the task files in examples/, made small.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rung.distributed.world import open_fake_world
from rung.runtime import build_runtime
from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task, load_task
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import EXAMPLES, grouped_sgd, text_data

MISSING = [name for name in ("transformers", "torchvision") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"{' and '.join(MISSING)} not installed: pip install 'rung[models]'", allow_module_level=True)

# Loaded here, so that the server from which ranks are forked has imported both packages.
LANGUAGE, VISION = load_task(EXAMPLES / "huggingface"), load_task(EXAMPLES / "vision")
transformers = importlib.import_module("transformers")  # after the task, which prepares for a torchvision without CUDA


def language_task(kind: str) -> Task:
    sizes = {"layers": 2, "width": 32, "heads": 4, "context": 8, "vocabulary": 23}
    task = LANGUAGE.bind({"model.kind": kind, **{f"model.{key}": value for key, value in sizes.items()}})
    return replace(
        task, train_data=lambda: text_data(25), eval_data=lambda: text_data(7), optimizer=grouped_sgd, schedule=None
    )


def vision_task(kind: str) -> Task:
    sizes = {"layers": 2, "width": 32, "heads": 4, "classes": 5}
    task = VISION.bind({"model.kind": kind, **{f"model.{key}": value for key, value in sizes.items()}})
    return replace(task, train_data=lambda: images(12), eval_data=lambda: images(6), optimizer=grouped_sgd)


def images(count: int) -> TensorDataset:
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 3, 32, 32, generator=g), torch.randint(5, (count,), generator=g))


def gpt2_task() -> Task:
    """A tied head, Hugging Face's Conv1D, fused queries, keys and values, outputs in a dataclass."""
    return language_task("gpt2")


def llama_task() -> Task:
    """Fewer key than query heads, rotary positions, RMSNorm, and a tensor plan of its own."""
    return language_task("llama")


def resnet_task() -> Task:
    return vision_task("resnet18")


def vit_task() -> Task:
    """A class token and positions that are used outside of any module."""
    return vision_task("vit")


EXPERT_SIZES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    # Latent attention, a dense layer first, groups of experts, and one that every row takes.
    "DeepseekV3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def experts_task(kind: str, implementation: str, **options: Any) -> Task:
    def model() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=23,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
            experts_implementation=implementation,
            **{"num_key_value_heads": 2, **EXPERT_SIZES[kind], **options},
        )
        made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return made

    return replace(language_task("llama"), model=model)


def mixtral_task() -> Task:
    """Experts in a loop that skips those without rows."""
    return experts_task("Mixtral", "eager")


def grouped_mixtral_task() -> Task:
    """Experts by one grouped matrix product, for which torch has no float64."""
    return experts_task("Mixtral", "grouped_mm")


def qwen_task() -> Task:
    """A shared expert beside those that are chosen."""
    return experts_task("Qwen2Moe", "eager")


def qwen3_task() -> Task:
    return experts_task("Qwen3Moe", "eager")


def mixtral_of_four_heads_task() -> Task:
    """With as many key as query heads: the model's own plan cuts both."""
    return experts_task("Mixtral", "eager", num_key_value_heads=4)


def qwen3_of_four_heads_task() -> Task:
    return experts_task("Qwen3Moe", "eager", num_key_value_heads=4)


def deepseek_task() -> Task:
    return experts_task("DeepseekV3", "eager")


def balanced_mixtral_task() -> Task:
    """The balance of the experts of all layers, which transformers computes at the end of the model."""
    task = experts_task("Mixtral", "eager", output_router_logits=True)

    def loss(output: Any, target: Tensor) -> Tensor:
        found: Tensor = task.loss(output, target) + 0.1 * output.aux_loss
        return found

    return replace(task, loss=loss)


def grouped_qwen_task() -> Task:
    return experts_task("Qwen2Moe", "grouped_mm")


def difference_from_a_loop_by_hand(make_task: Callable[[], Task], strategy: str, config: RunConfig) -> float:
    num_ranks = required_num_ranks(strategy)
    assert num_ranks is not None
    layout = parse(strategy, num_ranks)
    found: list[Outcome] = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    own = micro_batch_size(config, layout)
    expected = by_hand(make_task(), config, None if own is None else own * layout.num_data_ranks)
    assert all(torch.isfinite(torch.tensor([*expected.losses, *expected.norms])))
    return largest_difference(expected, found[0])


LANGUAGE_CONFIG = RunConfig(batch_size=10, steps=4, precision="fp64", clip=0.5, device="cpu")
VISION_CONFIG = RunConfig(batch_size=12, steps=2, precision="fp64", clip=0.5, device="cpu")


@pytest.mark.parametrize("strategy", ["tp2", slow("pp2"), slow("pp2,fsdp2")])
def test_gpt2_of_hugging_face(strategy: str) -> None:
    assert difference_from_a_loop_by_hand(gpt2_task, strategy, LANGUAGE_CONFIG) < 1e-9


@pytest.mark.parametrize("strategy", [slow("tp2"), "pp2", slow("fsdp2,tp2"), slow("pp2,tp2")])
def test_llama_of_hugging_face(strategy: str) -> None:
    assert difference_from_a_loop_by_hand(llama_task, strategy, LANGUAGE_CONFIG) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", slow("tp2"), slow("pp2,ddp2")])
def test_resnet18_of_torchvision(strategy: str) -> None:
    # Six images at a time over all ranks. The last batch norms see one pixel of each; with three images even one
    # process has only eight digits that do not depend on the order of additions.
    micro_batch = {"tp2": None, "pp2": 6, "pp2,ddp2": 3}[strategy]
    config = replace(VISION_CONFIG, micro_batch=micro_batch)
    assert difference_from_a_loop_by_hand(resnet_task, strategy, config) < 1e-9


@pytest.mark.parametrize("strategy", ["tp2", slow("pp2"), slow("pp2,fsdp2")])
def test_vision_transformer_of_torchvision(strategy: str) -> None:
    assert difference_from_a_loop_by_hand(vit_task, strategy, VISION_CONFIG) < 1e-9


@pytest.mark.parametrize(
    ("make_task", "strategy"),
    [
        (mixtral_task, "pp2"),
        (mixtral_task, "tp2"),
        slow(mixtral_task, "fsdp2,tp2"),
        slow(mixtral_task, "pp2,tp2"),
        slow(mixtral_task, "pp2,fsdp2"),
        slow(mixtral_of_four_heads_task, "tp4"),
        slow(qwen_task, "pp2"),
        slow(qwen_task, "tp2"),
        slow(qwen3_task, "pp2"),
        (qwen3_task, "fsdp2,tp2"),
        slow(qwen3_task, "pp2,fsdp2"),
        slow(qwen3_of_four_heads_task, "tp4"),
        slow(deepseek_task, "pp2"),
        (deepseek_task, "tp2"),
        slow(deepseek_task, "fsdp2,tp2"),
        slow(deepseek_task, "pp2,fsdp2"),
        slow(deepseek_task, "tp4"),
        slow(balanced_mixtral_task, "tp2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_mixtures_of_experts_of_hugging_face(make_task: Callable[[], Task], strategy: str) -> None:
    # DeepSeek-V3 chooses experts in float32, so the last digit of float64 becomes the last one of float32.
    limit = 1e-7 if make_task is deepseek_task else 1e-9
    config = replace(LANGUAGE_CONFIG, micro_batch=2 if "fsdp" in strategy else 4)
    assert difference_from_a_loop_by_hand(make_task, strategy, config) < limit


def test_a_balance_of_all_layers_is_refused_under_stages() -> None:
    with pytest.raises(RankFailed, match=r"modeling_mixtral\.py:\d+: .*layer_gate[\s\S]*did not return"):
        on_ranks(with_rung, 2, balanced_mixtral_task, "pp2", LANGUAGE_CONFIG)


def test_experts_of_hugging_face_are_shared_out() -> None:
    """The models' own plans cut each expert; whole experts are shared out in their place, and attention as planned."""
    for make_task, pairs in ((mixtral_task, True), (qwen3_task, True), (deepseek_task, False)):
        with open_fake_world(parse("tp2", 2)) as world:
            plan = build_runtime(make_task(), world, LANGUAGE_CONFIG, total_steps=1).parallel.plan
        assert plan is not None and plan.source == "model"
        assert plan.styles["model.layers.1.mlp.experts"] == "experts"
        assert (plan.styles.get("model.layers.1.self_attn.o_proj") == "rowwise") is pairs


@pytest.mark.parametrize(
    ("make_task", "strategy"),
    [(grouped_mixtral_task, "pp2"), (grouped_mixtral_task, "tp2"), slow(grouped_qwen_task, "tp2")],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_grouped_experts_of_hugging_face(make_task: Callable[[], Task], strategy: str) -> None:
    config = replace(LANGUAGE_CONFIG, precision="fp32", micro_batch=5)
    found = on_ranks(with_rung, 2, make_task, strategy, config)
    assert largest_difference(with_rung(make_task, "single", config), found[0]) < 1e-5


def test_llama_is_cut_by_its_own_plan() -> None:
    found = on_ranks(with_rung, 2, llama_task, "tp2", replace(LANGUAGE_CONFIG, steps=1))
    assert any("the model's own plan" in note for note in found[0].notes)
