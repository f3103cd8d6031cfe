"""Mixtures of experts, small and with awkward parts: by hand, and of Hugging Face."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from rung.spec.task import Task, load_task
from tests.tasks import EXAMPLES, ExpertLayer, Mixture, text_task


class FrozenMixture(Mixture):
    """Some parameters of the experts, a router and a layer's experts are not trained, and one layer is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].experts.up.requires_grad_(False)
        self.blocks[1].router.weight.requires_grad_(False)
        self.other = ExpertLayer(4)
        self.blocks.append(ExpertLayer(8))
        self.blocks[2].experts.requires_grad_(False)


def padded_mixture_task() -> Task:
    """Weighted by tokens; some samples, and so some ranks' micro-batches, have none that count."""
    return text_task(model=Mixture, padded=True)


def lonely_mixture_task() -> Task:
    """All rows choose the first two experts: with two ranks the second gets none, with four three get none."""
    return text_task(model=lambda: Mixture(8, favoured=2))


def uneven_mixture_task() -> Task:
    """Seven experts on two or four ranks."""
    return text_task(model=lambda: Mixture(7))


def frozen_mixture_task() -> Task:
    return text_task(model=FrozenMixture)


def transformers_task(kind: str, *, balance: float = 0.0, **options: Any) -> Task:
    """A model of Hugging Face with random weights; with `balance`, its load-balancing loss is added by that factor."""
    load_task(EXAMPLES / "huggingface")  # prepares for a torchvision without CUDA
    transformers = importlib.import_module("transformers")

    def model() -> nn.Module:
        sizes = {"num_local_experts": 4} if kind == "Mixtral" else {"num_experts": 4, "moe_intermediate_size": 12}
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts_per_tok=2,
            head_dim=8,
            use_cache=False,
            experts_implementation="eager",
            output_router_logits=balance > 0,
            **sizes,
            **options,
        )
        made: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return made

    def loss(output: Any, target: Tensor) -> Tensor:
        found = F.cross_entropy(output.logits.flatten(0, 1), target.flatten())
        return found + balance * output.aux_loss if balance else found

    def metrics(output: Any, target: Tensor) -> dict[str, Any]:
        return {"accuracy": ((output.logits.argmax(-1) == target).sum(), (target != -100).sum())}

    return replace(text_task(model=model), loss=loss, metrics=metrics)


def mixtral_task() -> Task:
    return transformers_task("Mixtral")


def qwen_task() -> Task:
    return transformers_task("Qwen3Moe")
