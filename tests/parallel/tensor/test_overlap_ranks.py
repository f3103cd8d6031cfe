"""Async tensor parallelism: the compiler joins messages with products, and the numbers stay. It is off elsewhere."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.utils import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from rung.distributed.world import open_fake_world
from rung.launch.spawn import on_ranks
from rung.parallel.tensor import overlap
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.parity import Outcome, largest_difference, with_rung

CONFIG = RunConfig(
    batch_size=4, steps=1, precision="fp64", device="cpu", eval_every="never", compile=True, sequence_parallel=True,
    async_tp=True,
)  # fmt: skip


class Block(nn.Module):
    """Without biases, as in Llama: a product with a bias is another operation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.gate, self.up = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([Block()])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_task() -> Task:
    tokens = torch.randint(11, (12, 9), generator=torch.Generator().manual_seed(1))
    return Task(
        model=Net,
        train_data=lambda: TensorDataset(tokens[:, :-1], tokens[:, 1:]),
        eval_data=lambda: TensorDataset(tokens[:4, :-1], tokens[:4, 1:]),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        blocks="layers.*",
    )


def without_code(module: torch.fx.GraphModule, inputs: Any, *, is_inference: bool = False, **_: Any) -> Any:
    """All that the compiler does to a graph. The code for it would take half a minute."""
    view_to_reshape(module)
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(module, is_inference)
    module.recompile()
    return make_boxed_func(module.forward)


def with_joined_messages() -> tuple[Outcome, Counter[str]]:
    """On the CPU, with torch's own stand-ins for the joint operations, which are for GPUs."""
    calls: Counter[str] = Counter()
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):

        def counted(*args: Any, name: str = name, **kwargs: Any) -> Any:
            calls[name] += 1
            return getattr(symmetric_memory, f"_{name}_fallback")(*args, **kwargs)

        library.impl(name, counted, "CPU")
    patch = pytest.MonkeyPatch()
    patch.setattr(dist, "is_nccl_available", lambda: True)
    backend = partial(compile_fx, inner_compile=without_code)
    patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    patch.setattr(nn.Module, "compile", lambda self: setattr(self, "forward", torch.compile(self.forward)))
    patch.setattr(overlap, "_why_not", lambda world, config: None)
    with symmetric_memory._test_mode():
        return with_rung(make_task, "tp2", CONFIG), calls


def test_the_compiler_joins_messages_with_products_and_the_numbers_stay() -> None:
    expected = with_rung(make_task, "single", RunConfig(batch_size=4, steps=1, precision="fp64", eval_every="never"))
    found, calls = on_ranks(with_joined_messages, 2)[0]
    assert calls["fused_all_gather_matmul"] and calls["fused_matmul_reduce_scatter"]
    assert largest_difference(expected, found) < 1e-9


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("cpu", {}, "it needs GPUs with NCCL, and this run is on cpu"),
        ("cuda", {"compile": False}, "there is no --compile"),
        ("cuda", {"sequence_parallel": False}, "there is no --sequence-parallel"),
        ("cuda", {}, "plans are made without the compiler"),
    ],
)
def test_elsewhere_it_is_off_and_a_line_says_why(
    device: str, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    config = RunConfig(**{**vars(CONFIG), "precision": "fp32", "device": "auto", **changes})
    with open_fake_world(parse("tp2", 2), device=device) as world:
        if device == "cuda":
            world.backend = "nccl"
        line = overlap.overlap_messages(world, config)
        assert line.startswith("async_tp is off: ") and reason in line
        if device == "cpu":
            assert line in build_runtime(make_task(), world, config, total_steps=1).notes
