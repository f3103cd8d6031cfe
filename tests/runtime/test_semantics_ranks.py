"""What a careful user would check: odd models, options that must not change numbers, and refusals with a reason."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_rank, environment_size
from rung.train.worker import make_batches
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import Outcome, by_hand, largest_difference, with_rung, with_rung_traced
from tests.tasks import TASKS, TinyCNN, TinyGPT, image_task, text_task

BASE: dict[str, Any] = {"batch_size": 10, "steps": 4, "precision": "fp64", "device": "cpu"}


def config(**changes: Any) -> RunConfig:
    return RunConfig(**{**BASE, **changes})


# -- options that must not change the numbers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "model", "changes"),
    [
        ("zero3", "gpt", {"shard_by": "whole"}),
        ("zero3", "gpt", {"shard_by": "size:1K"}),
        ("zero2", "babycnn", {"shard_by": "size:300"}),
        ("zero3", "gpt", {"offload": "cpu", "clip": 0.1}),
        ("hsdp", "images", {"offload": "cpu"}),
        ("ddp", "gpt", {"activation_checkpointing": "full"}),
        ("zero3", "gpt", {"activation_checkpointing": "selective", "micro_batch": 2}),
        ("ddp", "babycnn", {"activation_checkpointing": "full"}),
        ("zero3", "babycnn", {"activation_checkpointing": "full"}),
        ("zero1", "babycnn", {"activation_checkpointing": "selective"}),
        ("zero3", "images", {"workers": 1}),
        ("ddp", "text", {"fused": False}),
        ("ddp", "text", {"shuffle": False}),
        ("ddp", "text", {"chunked_loss": "5", "clip": 0.1}),
        ("zero3", "gpt", {"chunked_loss": "5", "micro_batch": 2}),
        ("pp2", "gpt", {"chunked_loss": "5", "micro_batch": 5}),
        slow("zero1", "text", {"chunked_loss": "1"}),
        slow("zero2", "gpt", {"chunked_loss": "7", "activation_checkpointing": "full"}),
        slow("zero3", "text", {"chunked_loss": "5", "offload": "cpu"}),
        slow("hsdp", "text", {"chunked_loss": "5"}),
        slow("pp2:zb", "text", {"chunked_loss": "5", "micro_batch": 5}),
    ],
)
def test_options_do_not_change_the_numbers(strategy: str, model: str, changes: dict[str, Any]) -> None:
    chosen = config(**changes)
    expected = by_hand(TASKS[model](), chosen, None if chosen.micro_batch is None else 2 * chosen.micro_batch)
    found = on_ranks(with_rung, 2, TASKS[model], strategy, chosen)
    assert largest_difference(expected, found[0]) < 1e-9


def test_activation_checkpointing_leaves_running_statistics_of_one_process_alone() -> None:
    chosen = config(activation_checkpointing="full")
    assert (
        largest_difference(by_hand(TASKS["babycnn"](), chosen), with_rung(TASKS["babycnn"], "single", chosen)) < 1e-12
    )


@pytest.mark.parametrize(
    ("strategy", "run", "changes"),
    [
        ("ddp", with_rung_traced, {"activation_checkpointing": "selective"}),
        slow("ddp", with_rung_traced, {}),
        slow("ddp", with_rung_traced, {"activation_checkpointing": "full"}),
        slow("zero3", with_rung_traced, {"activation_checkpointing": "selective"}),
        ("cp2", with_rung_traced, {"cp_form": "ulysses"}),
        slow("cp2", with_rung_traced, {"cp_form": "gather"}),
        slow("ddp", with_rung, {}),
        slow("zero3", with_rung, {}),
    ],
)
def test_compiled_models_give_the_same_numbers(
    strategy: str, run: Callable[..., Outcome], changes: dict[str, Any]
) -> None:
    expected = by_hand(TASKS["gpt"](), config(steps=2))
    found = on_ranks(run, 2, TASKS["gpt"], strategy, config(steps=2, compile=True, **changes), timeout=600)
    assert largest_difference(expected, found[0]) < 1e-9
    assert not found[0].graph_breaks


@pytest.mark.parametrize("mode", ["full", slow("selective")])
def test_compiled_blocks_that_compute_again_update_their_statistics_once(mode: str) -> None:
    chosen = config(steps=2, activation_checkpointing=mode)
    (found,) = on_ranks(with_rung_traced, 1, TASKS["babycnn"], "single", replace(chosen, compile=True), timeout=600)
    assert largest_difference(by_hand(TASKS["babycnn"](), chosen), found) < 1e-9


def perceptron_task() -> Task:
    """Few kernels: a C++ compiler takes seconds for each."""
    return image_task(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.GELU(), nn.Linear(8, 5)))


@pytest.mark.parametrize("task", [perceptron_task, slow(text_task)])
def test_a_compiled_model_gives_the_same_numbers(task: Callable[[], Task]) -> None:
    expected = by_hand(task(), config(steps=2))
    assert largest_difference(expected, with_rung(task, "single", config(steps=2, compile=True))) < 1e-9


def test_a_compiled_loss_in_chunks_gives_the_same_numbers() -> None:
    """Chunks of two sizes. The layer that they are of is a block here, and stays as it is."""
    expected = by_hand(perceptron_task(), config(steps=2))
    found = with_rung(perceptron_task, "single", config(steps=2, compile=True, chunked_loss="5"))
    assert largest_difference(expected, found) < 1e-9


# -- odd models --------------------------------------------------------------------------------------------------


class SometimesUnused(nn.Module):
    """One layer is used by no sample, one only by a few samples, so that in most steps some rank does not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(36, 8)
        self.never = nn.Linear(8, 8)
        self.rarely = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x.flatten(1)).relu()
        chosen = (x[:, 0, 0, 0] > 1.2).nonzero().flatten()
        if len(chosen) > 0:
            h = h.index_add(0, chosen, self.rarely(h[chosen]))
        return self.head(h)


def unused_task() -> Task:
    """Weight decay and momentum tell a parameter without a gradient from one with a gradient of zero."""
    return image_task(model=SometimesUnused, schedule=None)


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero3"])
def test_unused_parameters_are_named_in_the_error(strategy: str) -> None:
    size = 1 if strategy == "single" else 2
    with pytest.raises(RankFailed) as error:
        on_ranks(with_rung, size, unused_task, strategy, config(steps=1))
    assert "got no gradient" in error.value.error
    assert "never.weight" in error.value.error
    assert "unused_parameters=allow" in error.value.error


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("ddp", {}),
        ("ddp", {"micro_batch": 2}),
        ("zero1", {}),
        ("zero3", {"shard_by": "whole"}),
        ("zero2", {"shard_by": "whole"}),
    ],
)
def test_parameters_that_only_some_ranks_use(strategy: str, changes: dict[str, Any]) -> None:
    if strategy in ("zero2", "zero3") and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("FSDP takes this from torch 2.13 on; before, the run says so")
    chosen = config(unused_parameters="allow", steps=8, batch_size=4, **changes)
    expected = by_hand(unused_task(), chosen, 4 if changes.get("micro_batch") else None)
    found = on_ranks(with_rung, 2, unused_task, strategy, chosen)
    assert largest_difference(expected, found[0]) < 1e-9


def never_used_task() -> Task:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(36, 5)
            self.never = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x.flatten(1))

    return image_task(model=Model, schedule=None)


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1", "zero2", "zero3", "hsdp"])
def test_unused_parameters_can_be_allowed_and_are_left_alone(strategy: str) -> None:
    chosen = config(unused_parameters="allow")
    expected = by_hand(never_used_task(), chosen)
    found = on_ranks(with_rung, 1 if strategy == "single" else 2, never_used_task, strategy, chosen)
    assert largest_difference(expected, found[0]) < 1e-9


def partly_used_task() -> Task:
    """Blocks with a layer that is never called, on any stage, beside parameters outside of the blocks."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.never = nn.Linear(36, 36), nn.Linear(36, 36)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.used(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block() for _ in range(4)])
            self.head, self.other_head = nn.Linear(36, 5), nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    return image_task(model=Model, optimizer=optimizer, schedule=None)


@pytest.mark.parametrize("strategy", ["pp2,fsdp2", slow("pp2:zb,zero2"), slow("pp2:interleaved,fsdp2")])
def test_pipelines_with_sharding_leave_unused_parameters_alone(strategy: str) -> None:
    chosen = config(unused_parameters="allow", micro_batch=2)
    expected = by_hand(partly_used_task(), chosen, 4)
    found = on_ranks(with_rung, 4, partly_used_task, strategy, chosen)
    assert largest_difference(expected, found[0]) < 1e-9


def later_used_task() -> Task:
    """Momentum of one parameter begins a step after that of another. One is named as an attribute of embeddings."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse = nn.Parameter(torch.ones(36))
            self.used, self.later, self.calls = nn.Linear(36, 5), nn.Linear(36, 5), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = x.flatten(1) * self.sparse
            return self.used(x) if self.calls == 1 else self.used(x) + self.later(x)

    return image_task(model=Model, schedule=None)


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero1"])
def test_a_parameter_may_be_used_for_the_first_time_in_a_later_step(strategy: str) -> None:
    chosen = config(unused_parameters="allow", fused=True)
    expected = by_hand(later_used_task(), chosen)
    found = on_ranks(with_rung, 1 if strategy == "single" else 2, later_used_task, strategy, chosen)
    assert largest_difference(expected, found[0]) < 1e-9


def sparse_in_a_later_group_task(kind: type[torch.optim.Optimizer]) -> Task:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(2, 5, sparse=True), nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            return self.head(x) + self.table((x[:, 0] > 0).long())

    def optimizer(model: Any) -> torch.optim.Optimizer:
        groups = [{"params": model.head.parameters()}, {"params": model.table.parameters(), "lr": 0.5}]
        return kind(groups, lr=0.1)  # type: ignore[call-arg]

    return image_task(model=Model, optimizer=optimizer, schedule=None)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_a_group_that_fused_kernels_refuse_does_not_step_the_groups_before_it_twice(kind: Any) -> None:
    expected = by_hand(sparse_in_a_later_group_task(kind), config())
    found = on_ranks(with_rung, 1, partial(sparse_in_a_later_group_task, kind), "single", config())
    assert largest_difference(expected, found[0]) < 1e-9


def tied_blocks_task() -> Task:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(36, 36) for _ in range(3)])
            self.layers[2].weight = self.layers[0].weight
            self.head = nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(x)

    return image_task(model=Model)


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_weights_tied_between_blocks_stay_tied(strategy: str) -> None:
    expected = by_hand(tied_blocks_task(), config())
    found = on_ranks(with_rung, 2, tied_blocks_task, strategy, config())
    assert largest_difference(expected, found[0]) < 1e-9
    state = found[0].state
    assert np.array_equal(state["layers.0.weight"], state["layers.2.weight"])
    if strategy != "zero1":
        assert any("shares a parameter" in note for note in found[0].notes)


def odd_shapes_task() -> Task:
    """A scalar parameter, one with fewer rows than ranks, and a constructor that computes with real numbers."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = int(torch.linspace(1, 5, 3).sum().item())
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.row = nn.Parameter(torch.randn(1, 36))
            self.body = nn.Linear(36, width)
            self.head = nn.Linear(width, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((self.body(x.flatten(1) + self.row) * self.scale).tanh())

    return image_task(model=Model)


def numpy_init_task() -> Task:
    """A constructor that needs real numbers and draws them from numpy and Python: every rank builds it for itself."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(36, 5)
            with torch.no_grad():
                self.layer.weight.copy_(torch.from_numpy(np.random.randn(5, 36)) * random.random())
            self.width = int(self.layer.weight.abs().sum().item())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.flatten(1))

    return image_task(model=Model)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_weights_drawn_from_numpy_are_the_same_on_all_ranks(strategy: str) -> None:
    found = on_ranks(with_rung, 2, numpy_init_task, strategy, config())
    alone = with_rung(numpy_init_task, "single", config())
    assert largest_difference(alone, found[0]) < 1e-9


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", slow("hsdp")])
def test_scalars_and_thin_parameters(strategy: str) -> None:
    expected = by_hand(odd_shapes_task(), config())
    assert largest_difference(expected, on_ranks(with_rung, 4, odd_shapes_task, strategy, config())[0]) < 1e-9


def dict_task() -> Task:
    class Records(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 21

        def __getitem__(self, index: int) -> Any:
            return {
                "x": torch.full((4,), float(index)) / 21,
                "scale": torch.tensor(0.5),
                "target": torch.tensor(index % 3),
            }

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * scale[:, None]

    return Task(
        model=Model,
        train_data=Records,
        loss=lambda output, target: F.cross_entropy(output, target),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def losses_of(make_task: Any, strategy: str, chosen: RunConfig) -> Any:
    task = make_task()
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(task, world, chosen, total_steps=4)
        results = [runtime.step(w, want_norm=True) for w in runtime.place(make_batches(task, chosen, world))]
        shares = world.gather(world.tensors.read([r.loss_share for r in results]))
        return [sum(column) for column in zip(*shares, strict=True)], runtime.notes


def test_dict_batches_are_passed_by_name() -> None:
    single = losses_of(dict_task, "single", config())[0]
    spread = on_ranks(losses_of, 2, dict_task, "ddp", config())[0][0]
    assert np.allclose(single, spread, rtol=0, atol=1e-12)


# -- batch norm, dropout, buffers -----------------------------------------------------------------------------------


def test_the_choice_of_batch_norm_is_told_and_local_differs_from_one_process() -> None:
    expected = by_hand(TASKS["images"](), config())
    local = on_ranks(with_rung, 2, TASKS["images"], "ddp", config(batch_norm="local"))
    assert any("batch norm: local" in note for note in local[0].notes)
    assert largest_difference(expected, local[0]) > 1e-6
    for name, value in local[0].state.items():
        assert np.isfinite(value).all(), name
    sync = on_ranks(with_rung, 2, TASKS["images"], "ddp", config())
    assert any("batch norm: sync" in note for note in sync[0].notes)


def test_a_batch_too_short_for_batch_norm_is_told_with_a_way_out() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))

    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:  # 103 samples
        with_rung(lambda: image_task(model=model), "single", config(batch_size=51, steps=3))
    assert "step 3 come in micro-batches of 1 over all ranks" in caught.value.__notes__[0]


def test_local_batch_norm_is_not_touched_by_a_stand_in() -> None:
    """One sample on two ranks: the second rank's stand-in must leave no trace in what is kept."""
    chosen = config(batch_size=1, steps=2, batch_norm="local")
    expected = by_hand(TASKS["images"](), chosen)
    # Rank 1 has the sample (pieces are cut from the end); its statistics are not kept, but the weights are the same.
    found = on_ranks(with_rung, 2, TASKS["images"], "ddp", chosen)
    names = [n for n, _ in TinyCNN().named_parameters()]
    assert max(np.abs(found[0].state[n] - expected.state[n].numpy()).max() for n in names) < 1e-9


def dropout_task() -> Task:
    class Model(TinyGPT):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(tokens), 0.3, self.training)

    return text_task(model=Model)


def masks(strategy: str) -> Any:
    from rung.data.permutation import mix

    with open_world(parse(strategy, environment_size()), device="cpu") as world:
        torch.manual_seed(mix(0, world.rank, 1))
        return F.dropout(torch.ones(64), 0.5).tolist()


def test_dropout_differs_between_ranks_and_repeats_between_runs() -> None:
    first, second = on_ranks(masks, 2, "ddp"), on_ranks(masks, 2, "ddp")
    assert first == second
    assert first[0] != first[1]


def test_dropout_can_be_turned_off_as_function_and_as_module() -> None:
    plain = by_hand(TASKS["text"](), config())
    found = on_ranks(with_rung, 2, dropout_task, "zero3", config(dropout=False))
    assert largest_difference(plain, found[0]) < 1e-9


def counting_task() -> Task:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(36, 5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += x.shape[0]
            return self.layer(x.flatten(1))

    return image_task(model=Model)


def test_buffers_that_forward_changes_are_told() -> None:
    found = on_ranks(with_rung, 2, counting_task, "ddp", config())
    assert any("forward changes seen" in note for note in found[0].notes)
    assert found[0].state["seen"] == 20  # rank 0's: 5 samples in each of 4 steps


# -- precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_half_precision_keeps_fp32_master_weights_and_stays_near(precision: str, strategy: str) -> None:
    exact = by_hand(TASKS["text"](), config())
    found = on_ranks(with_rung, 2, TASKS["text"], strategy, config(precision=precision))
    assert all(value.dtype == np.float32 for value in found[0].state.values())
    assert np.allclose(found[0].losses, exact.losses, atol=0.05)
    assert found[0].losses == found[1].losses
    assert found[0].losses != exact.losses


class Exploding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf") if environment_rank() == 1 else grad


def overflow_task() -> Task:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(36, 36), nn.Linear(36, 36)])
            self.head = nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            for layer in self.layers:
                x = layer(x).relu()
            return self.head(Exploding.apply(x))

    return image_task(model=Model, schedule=None)


def scaled_steps(strategy: str) -> Any:
    task = overflow_task()
    chosen = RunConfig(batch_size=8, steps=2, precision="fp16", device="cpu")
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(task, world, chosen)
        before = {n: v.clone() for n, v in runtime.named_weights()}
        for window in runtime.place(make_batches(task, chosen, world)):
            runtime.step(window)
        after = dict(runtime.named_weights())
        assert runtime.scaler is not None
        return runtime.scaler.get_scale(), all(torch.equal(before[n], after[n]) for n in after)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_and_lower_the_scale(strategy: str) -> None:
    outcomes = on_ranks(scaled_steps, 2, strategy)
    assert outcomes[0] == outcomes[1] == (65536.0 / 4, True)


def test_clipping_under_fp16_sees_the_unscaled_gradient_whole() -> None:
    exact = by_hand(TASKS["text"](), config(clip=0.1))
    for strategy in ("ddp", "zero1", "zero3"):
        found = on_ranks(with_rung, 2, TASKS["text"], strategy, config(precision="fp16", clip=0.1))
        assert np.allclose(found[0].norms, exact.norms, rtol=0.05), strategy
        assert found[0].norms == found[1].norms


# -- what a review found -----------------------------------------------------------------------------------------------


def masked_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counted = (target > 2).to(output.dtype)
    return (F.cross_entropy(output, target, reduction="none") * counted).sum() / counted.sum()


def masked_task() -> Task:
    """A mean written by hand: 0/0 for a piece in which nothing counts, and so is its gradient."""
    return image_task(loss=masked_mean, loss_weight=lambda target: (target > 2).sum())


@pytest.mark.parametrize(
    ("strategy", "micro_batch", "chunked_loss"),
    [("single", 1, "never"), ("ddp", 1, "never"), ("zero3", 1, "never"), ("ddp", 2, "1")],
)
def test_a_piece_without_a_counted_unit_leaves_no_nan(strategy: str, micro_batch: int, chunked_loss: str) -> None:
    chosen = config(batch_size=8, steps=6, micro_batch=micro_batch, chunked_loss=chunked_loss)
    size = 1 if strategy == "single" else 2
    expected = by_hand(masked_task(), chosen, size * micro_batch)
    found = on_ranks(with_rung, size, masked_task, strategy, chosen)
    assert np.allclose(found[0].losses, expected.losses, atol=1e-9)
    assert all(np.isfinite(value).all() for value in found[0].state.values())


class OnlyEarly(nn.Module):
    """The second layer is used by samples at an even position, so not by the last micro-batch of three."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(36, 5), nn.Linear(36, 5)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.a(x.flatten(1)) + (self.b(x.flatten(1)) if self.calls % 3 else 0)


def only_early_task() -> Task:
    return image_task(model=OnlyEarly)


def test_a_parameter_missing_from_the_last_micro_batch_is_named() -> None:
    with pytest.raises(RankFailed) as error:
        on_ranks(with_rung, 2, only_early_task, "ddp", config(batch_size=6, micro_batch=1, steps=1))
    assert "b.weight" in error.value.error
    assert "not in the last" in error.value.error


def transformer_task() -> Task:
    """Dropout inside attention and in a recurrent kernel, a complex buffer, a state made in forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.5, batch_first=True)
            self.memory = nn.GRU(6, 6, num_layers=2, dropout=0.5, batch_first=True)
            self.register_buffer("turn", torch.polar(torch.ones(6), torch.arange(6.0)))
            self.register_buffer("small", torch.tensor([1, 2], dtype=torch.int16))
            self.head = nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.encoder(x.squeeze(1)) * self.turn.imag
            return self.head(self.memory(x, torch.zeros(2, x.shape[0], 6))[0].mean(1))

    return image_task(model=Model, schedule=None)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_dropout_is_off_inside_kernels_and_fp64_is_complete(strategy: str) -> None:
    chosen = config(dropout=False)
    alone = with_rung(transformer_task, "single", chosen)
    found = on_ranks(with_rung, 2, transformer_task, strategy, chosen)
    assert largest_difference(alone, found[0]) < 1e-9
    assert alone.state["turn"].dtype == np.complex128
    assert np.abs(alone.state["turn"].imag).max() > 0.5


def untracked_task() -> Task:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(1, track_running_stats=False)
            self.head = nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(x).flatten(1))

    return image_task(model=Model)


def test_batch_norm_without_running_statistics_evaluates_like_one_process() -> None:
    chosen = config(batch_size=10)
    alone = with_rung(untracked_task, "single", chosen)
    assert largest_difference(alone, on_ranks(with_rung, 2, untracked_task, "ddp", chosen)[0]) < 1e-9


# -- refusals --------------------------------------------------------------------------------------------------------


def bad_metrics_task() -> Task:
    return image_task(metrics=lambda output, target: {"accuracy": (output.argmax(1) == target).float().mean()})


def vector_loss_task() -> Task:
    return image_task(loss=lambda output, target: F.cross_entropy(output, target, reduction="none"))


def plateau_task() -> Task:
    return image_task(schedule=lambda optimizer, total_steps: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def frozen_task() -> Task:
    return image_task(model=lambda: TinyCNN().requires_grad_(False))


def lazy_task() -> Task:
    return image_task(model=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(5)))


def _hooked_model() -> nn.Module:
    model = TinyCNN()
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.5)
    return model


def hooked_task() -> Task:
    return image_task(model=_hooked_model)


def _hooking_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hooking_optimizer_task() -> Task:
    return image_task(optimizer=_hooking_optimizer)


def no_module_task() -> Task:
    return image_task(model=lambda: 3)


def kept_list_task() -> Task:
    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(36, 5))
            self.groups = [{"params": list(self[1].parameters())}]

    return image_task(model=Model, optimizer=lambda model: torch.optim.SGD(model.groups, lr=0.1), schedule=None)


def shared_storage_task() -> Task:
    class Model(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 5))
            self[2].weight = nn.Parameter(self[1].weight.data)

    return image_task(model=Model)


def loss_metric_task() -> Task:
    return image_task(metrics=lambda output, target: {"loss": target.float()})


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 5)
        self.shift = nn.Parameter(torch.zeros(5))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1)) + self.shift


def method_task() -> Task:
    return image_task(model=Encoder, forward=lambda model, batch: model.encode(batch[0]))


class OwnBatchNorm(nn.BatchNorm2d):
    """By parts of the batch, which are others on several ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(OwnBatchNorm, self).forward(part) for part in x.chunk(2)])


def own_batch_norm_task() -> Task:
    return image_task(model=lambda: nn.Sequential(nn.Conv2d(1, 5, 6), OwnBatchNorm(5), nn.Flatten()))


@pytest.mark.parametrize(
    ("make_task", "size", "words"),
    [
        (shared_storage_task, 1, "two parameters over one storage"),
        (loss_metric_task, 1, "may not return 'loss'"),
        (bad_metrics_task, 1, "one number per sample"),
        (vector_loss_task, 1, "must return one number"),
        (plateau_task, 1, "ReduceLROnPlateau"),
        (frozen_task, 1, "nothing to train"),
        (lazy_task, 1, "lazy"),
        (hooked_task, 1, "model() registers a hook on the gradient"),
        (hooking_optimizer_task, 2, "optimizer() registers a hook on the gradient"),
        (no_module_task, 1, "must return an nn.Module"),
        (own_batch_norm_task, 2, "batch_norm=local"),
    ],
)
def test_what_cannot_be_right_is_refused_with_a_reason(make_task: Any, size: int, words: str) -> None:
    with pytest.raises(RankFailed) as error:
        on_ranks(with_rung, size, make_task, "single" if size == 1 else "ddp", config(steps=1))
    assert words in error.value.error


@pytest.mark.parametrize(
    ("make_task", "words"),
    [
        (kept_list_task, "not parameters of the model"),
        (method_task, "call the model itself"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_a_reason(make_task: Any, words: str) -> None:
    with pytest.raises(RankFailed) as error:
        on_ranks(with_rung, 2, make_task, "zero3", config(steps=1))
    assert words in error.value.error


class SharingInner(nn.Module):
    """A block around a module that all blocks have in common."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.own(self.inner(x).tanh())


def shared_inside_task() -> Task:
    def model() -> nn.Module:
        inner = nn.Linear(12, 12)
        blocks = nn.Sequential(*[SharingInner(inner) for _ in range(2)])
        return nn.Sequential(nn.Embedding(23, 12), blocks, nn.Linear(12, 23))

    return text_task(model=model)


def test_blocks_may_have_a_module_in_common_under_fsdp() -> None:
    chosen = config(steps=2)
    found = on_ranks(with_rung, 2, shared_inside_task, "zero3", chosen)
    assert largest_difference(by_hand(shared_inside_task(), chosen), found[0]) < 1e-9
