"""Mixtures of experts, small and with awkward parts: by hand, and of Hugging Face."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import torch
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


class Feed(nn.Module):
    """An expert of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12, bias=False)

    def forward(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.down(F.gelu(self.up(rows)))


class ListLayer(nn.Module):
    """Visits the experts that some row has chosen, with the rows that have; or calls all of them with all rows, and
    changes their results in place. A shared expert, and the sum inside. With `favoured`, rows choose among the first
    experts alone, and most rows none."""

    def __init__(self, num_experts: int, favoured: int | None = None, *, is_dense: bool = False) -> None:
        super().__init__()
        self.is_dense, self.bar = is_dense, -100.0 if favoured is None else 1.5
        self.norm, self.router = nn.LayerNorm(12), nn.Linear(12, num_experts, bias=False)
        self.experts = nn.ModuleList([Feed() for _ in range(num_experts)])
        self.shared = Feed()
        favours = torch.zeros(num_experts)
        if favoured is not None:
            favours[:favoured] = 30.0
        self.register_buffer("favours", favours)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        probabilities = (self.router(rows) + self.favours).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        result = self.shared(rows)
        if self.is_dense:
            whole = torch.zeros_like(probabilities).scatter(1, chosen, weights).view(*x.shape[:-1], -1)
            found = [expert(rows.view_as(x), scale=0.5) for expert in self.experts]
            for number, one in enumerate(found):
                one *= whole[..., number : number + 1]
            return torch.stack([x, result.view_as(x), *found]).sum(0)
        takes = rows[:, 0] > self.bar
        for number in chosen[takes].unique().tolist():
            row, place = torch.where((chosen == number) & takes.unsqueeze(1))
            found = self.experts[number](rows[row], scale=0.5) * weights[row, place, None]
            result = result.index_add(0, row, found.to(result))
        return x + result.view_as(x)


class ListMixture(nn.Module):
    """A layer that skips experts, and one that may call all; a tied head."""

    def __init__(self, num_experts: int = 7, favoured: int | None = None, *, is_dense: bool = True) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 12)
        self.blocks = nn.ModuleList([ListLayer(num_experts, favoured, is_dense=one) for one in (False, is_dense)])
        self.head = nn.Linear(12, 23, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        x = x + 0.5 * x.cumsum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TwoLists(nn.Module):
    """Rows choose an expert of a list, and most of them one of another list, of another size and called later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.further_router = nn.LayerNorm(12), nn.Linear(12, 5), nn.Linear(12, 3)
        self.experts = nn.ModuleList([Feed() for _ in range(5)])
        self.further_experts = nn.ModuleList([nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        further_weights, further = self.further_router(rows).softmax(-1).max(-1)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            (taken,) = torch.where(chosen == number)
            if len(taken):
                result = result.index_add(0, taken, expert(rows[taken]) * weights[taken, None])
        for number, expert in enumerate(self.further_experts):
            (taken,) = torch.where((further == number) & (rows[:, 0] > -0.5))
            result = result.index_add(0, taken, expert(rows[taken]) * further_weights[taken, None])
        return x + result.view_as(x)


class TwoListMixture(ListMixture):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TwoLists(), TwoLists()])


def two_lists_task() -> Task:
    return text_task(model=TwoListMixture, padded=True)


def list_task() -> Task:
    """Weighted by tokens; some samples, and so some ranks' micro-batches, have none that count."""
    return text_task(model=ListMixture, padded=True)


def lonely_list_task(*, is_dense: bool = True) -> Task:
    """Few rows choose any expert, of the first two of a list: many micro-batches of a rank call none."""
    return text_task(model=lambda: ListMixture(8, favoured=2, is_dense=is_dense))
