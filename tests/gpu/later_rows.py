"""Experts, shared sequences, adapters, averages, turns, several optimizers on a GPU: the numbers of a CPU process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.expert_models import list_task, mixtral_task, qwen_task
from tests.harness import on_ranks
from tests.parity import largest_difference, with_rung
from tests.runtime.test_turns_ranks import gan_task
from tests.tasks import TASKS, text_task


def two_optimizers_task() -> Task:
    """Muon, which needs whole matrices, beside SGD."""

    def optimizer(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
        inside = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if all(p is not other for other in inside)]
        return [torch.optim.Muon(inside, lr=0.01), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]

    return text_task(optimizer=optimizer)


_TASKS: dict[str, Callable[[], Task]] = {
    **TASKS,
    "mixtral": mixtral_task,
    "qwen": qwen_task,
    "list": list_task,
    "gan": gan_task,
    "muon": two_optimizers_task,
}


def like_cpu(name: str, strategy: str, num_ranks: int, tolerance: float = 1e-9, **changes: Any) -> str:
    config = RunConfig(
        **{"batch_size": 25, "steps": 4, "precision": "fp64", "eval_every": "never", "device": "cuda", **changes}
    )
    config = replace(config, backend="gloo" if num_ranks > 1 else "auto")
    found = on_ranks(with_rung, num_ranks, _TASKS[name], strategy, config, timeout=400)[0]
    alone = replace(config, device="cpu", backend="auto", cp_form="auto", compile=False)
    expected = on_ranks(with_rung, 1, _TASKS[name], "single", alone, timeout=400)[0]
    difference = largest_difference(expected, found)
    assert difference < tolerance, f"differs by {difference:.1e}"
    return f"{difference:.1e}"


def rows() -> list[tuple[str, Callable[[], str]]]:
    cases: list[tuple[str, str, int, dict[str, Any]]] = [
        ("experts", "single", 1, {}), ("experts", "zero3", 1, {}), ("experts", "ep2", 2, {}),
        ("experts", "fsdp4,ep2", 4, {}),
        # Their norms compute in fp32 whatever the weights are.
        ("mixtral", "ep2", 2, {"tolerance": 1e-7}), ("qwen", "fsdp4,ep2", 4, {"tolerance": 1e-7}),
        ("list", "ep2", 2, {}), ("list", "tp2", 2, {}),
        ("gpt", "cp2", 2, {"cp_form": "ulysses"}), ("gpt", "cp2", 2, {"cp_form": "gather"}),
        ("gpt", "fsdp2,cp2", 4, {"cp_form": "ulysses"}),
        ("text", "single", 1, {"lora": "r=2"}), ("text", "zero3", 1, {"lora": "r=2"}),
        ("text", "ddp", 2, {"lora": "r=2"}), ("text", "tp2", 2, {"lora": "r=2"}),
        ("text", "single", 1, {"lora": "r=2", "compile": True}),
        ("text", "zero3", 2, {"ema": 0.9}), ("text", "tp2", 2, {"swa_start": 1}), ("gan", "ddp", 2, {}),
        ("gan", "zero3", 1, {}), ("gan", "single", 1, {"compile": True}),
        ("text", "tp2", 2, {"chunked_loss": "5"}), ("text", "fsdp2,tp2", 4, {"chunked_loss": "5"}),
        # torch's Muon makes matrices orthogonal in bf16
        ("muon", "single", 1, {"tolerance": 0.02}), ("muon", "zero3", 2, {"tolerance": 0.02}),
    ]  # fmt: skip
    found: list[tuple[str, Callable[[], str]]] = []
    for task, strategy, num_ranks, changes in cases:
        words = " ".join(f"{key}={value}" for key, value in changes.items())
        name = f"later {task} {strategy} {num_ranks} ranks {words}".strip()
        found.append((name, lambda t=task, s=strategy, n=num_ranks, c=changes: like_cpu(t, s, n, **c)))  # type: ignore[misc]
    return found
