"""What must hold on a CUDA device, as rows that run with or without a test runner."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from rung.config import RunConfig
from rung.runtime import build_runtime
from rung.strategy import parse
from rung.train import make_batches
from rung.world import environment_size, open_world
from tests.harness import on_ranks
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import TASKS

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")


def matches_cpu(strategy: str, model: str, num_ranks: int, **changes: Any) -> str:
    """The CUDA run equals a hand-written loop on the CPU in float64."""
    backend = "gloo" if num_ranks > 1 else "auto"
    micro = changes.pop("global_micro_batch", None)
    config = RunConfig(
        batch_size=25,
        steps=5,
        precision="fp64",
        clip=0.5,
        device="cuda",
        backend=backend,
        micro_batch=None if micro is None else micro // num_ranks,
        **changes,
    )
    expected = by_hand(TASKS[model](), config, micro)
    found = on_ranks(with_rung, num_ranks, TASKS[model], strategy, config, timeout=300)
    difference = largest_difference(expected, found[0])
    assert difference < 1e-9, f"differs by {difference:.1e}"
    return f"{difference:.1e}"


def half_is_near(strategy: str, precision: str, **changes: Any) -> str:
    config = RunConfig(batch_size=25, steps=10, precision=precision, device="cuda", **changes)
    expected = by_hand(TASKS["text"](), RunConfig(batch_size=25, steps=10, precision="fp64"))
    found = on_ranks(with_rung, 1, TASKS["text"], strategy, config, timeout=300)
    if precision == "fp16":
        # The scaler starts too high and skips steps until it has found its level, later where gradients are half.
        assert found[0].losses[-1] < found[0].losses[0], found[0].losses
        return f"loss {found[0].losses[0]:.3f} -> {found[0].losses[-1]:.3f}"
    gap = max(abs(a - b) for a, b in zip(found[0].losses, expected.losses, strict=True))
    assert gap < 0.05, f"losses differ by {gap}"
    assert all(str(value.dtype) == "float32" for value in found[0].state.values())
    return f"loss gap {gap:.1e}"


def _steps_without_synchronisation(strategy: str, precision: str) -> int:
    task = TASKS["adamw"]()
    config = RunConfig(batch_size=16, steps=8, precision=precision, clip=1.0, device="cuda")
    with open_world(parse(strategy, environment_size())) as world:
        runtime = build_runtime(task, world, config, total_steps=8)
        for window in runtime.place(make_batches(task, config, world)):
            if window.step > 3:  # by then every cache is warm
                torch.cuda.set_sync_debug_mode("error")
            try:
                runtime.step(window)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    return 8


def does_not_synchronise(strategy: str, precision: str) -> str:
    """A step that does not log never waits for the device: torch raises at any such operation."""
    return f"{on_ranks(_steps_without_synchronisation, 1, strategy, precision, timeout=300)[0]} steps"


def rows() -> list[tuple[str, Callable[[], str]]]:
    found: list[tuple[str, Callable[[], str]]] = []

    def add(name: str, function: Callable[..., str], *args: Any, **kwargs: Any) -> None:
        found.append((name, lambda: function(*args, **kwargs)))

    for model in ("babycnn", "gpt"):
        for strategy in STRATEGIES:
            add(f"{strategy} {model} 1 rank nccl", matches_cpu, strategy, model, 1)
        for strategy in STRATEGIES[1:]:
            add(f"{strategy} {model} 2 ranks gloo", matches_cpu, strategy, model, 2)
            add(f"{strategy} {model} 2 ranks gloo x3", matches_cpu, strategy, model, 2, global_micro_batch=12)
    add("zero3 gpt offload cpu", matches_cpu, "zero3", "gpt", 1, offload="cpu")
    add("zero3 gpt offload cpu 2 ranks gloo", matches_cpu, "zero3", "gpt", 2, offload="cpu")
    add("ddp babycnn full checkpointing", matches_cpu, "ddp", "babycnn", 1, activation_checkpointing="full")
    add("zero3 gpt selective checkpointing", matches_cpu, "zero3", "gpt", 1, activation_checkpointing="selective")
    add("single gpt compiled", matches_cpu, "single", "gpt", 1, compile=True)
    add("ddp gpt compiled", matches_cpu, "ddp", "gpt", 1, compile=True)
    add("zero3 gpt compiled", matches_cpu, "zero3", "gpt", 1, compile=True)
    add("single images workers pinned", matches_cpu, "single", "images", 1, workers=2)
    for strategy in ("single", "ddp", "zero1", "zero3"):
        add(f"{strategy} bf16", half_is_near, strategy, "bf16")
        add(f"{strategy} fp16", half_is_near, strategy, "fp16")
        add(f"{strategy} bf16 no synchronisation", does_not_synchronise, strategy, "bf16")
        add(f"{strategy} fp32 no synchronisation", does_not_synchronise, strategy, "fp32")
    add("single fp16 no synchronisation", does_not_synchronise, "single", "fp16")
    return found


def main() -> None:
    failures = 0
    words = sys.argv[1:]
    chosen = [(name, function) for name, function in rows() if not words or any(word in name for word in words)]
    for name, function in chosen:
        try:
            print(f"ok    {name:<42} {function()}", flush=True)
        except Exception as error:
            failures += 1
            print(f"FAIL  {name:<42} {str(error).strip()[-1500:]}", flush=True)
    print(f"{len(chosen) - failures} passed, {failures} failed")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
