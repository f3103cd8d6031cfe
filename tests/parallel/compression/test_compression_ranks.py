"""Compressed gradients and local steps on real ranks: exact where they must be, alike on all ranks, and resumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rung.checkpoint import StorageTopology, restore
from rung.cli.main import main
from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.distributed.status_board import StatusWriter
from rung.distributed.world import World, open_world
from rung.planner.recorder import Recorder
from rung.runtime import build_runtime
from rung.runtime.compressed import UnsentGradients
from rung.runtime.local_steps import LocalWeights
from rung.runtime.measure import weighted
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.checkpointing import find_state
from rung.train.worker import make_batches
from tests.checkpoint.test_state_copies_ranks import _steps
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import by_hand
from tests.tasks import dropping_task, halving, image_data, image_task, padded_task, text_task

FP64 = RunConfig(strategy="ddp", batch_size=21, steps=7, precision="fp64", device="cpu", eval_every="never")
Case = tuple[Callable[[], Task], dict[str, Any]]


def _nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.1)


def _dampened(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8, dampening=0.3, weight_decay=0.1)


def _rising(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.5, maximize=True)


class _Forking(nn.Module):
    """Uses one of two layers, by the first number of the batch, and one of them seldom."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.never = nn.Linear(36, 5), nn.Linear(36, 5), nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return self.left(flat) if flat[0, 0] > -0.8 else self.right(flat)


def _forking_task() -> Task:
    return image_task(model=_Forking, train_data=lambda: image_data(24), schedule=None)


def _nesterov_task() -> Task:
    return text_task(optimizer=_nesterov)


def _dampened_task() -> Task:
    return text_task(optimizer=_dampened)


def _rising_task() -> Task:
    return text_task(optimizer=_rising)


def _plain_task() -> Task:
    return padded_task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))


def _train(
    make_task: Callable[[], Task], config: RunConfig, world: World, change: Callable[[Any], None] | None = None
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Losses, weights and the runtime of a short run in a world that is already open."""
    task = make_task()
    batches = make_batches(task, config, world)
    runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
    if change is not None:
        change(runtime)
    losses = []
    for window in runtime.place(batches):
        result = runtime.step(window, want_norm=True)
        losses.append(sum(row[0] for row in world.gather(world.tensors.read([result.loss_share]))))
    weights = {name: value.detach().clone() for name, value in runtime.model.state_dict().items()}
    return losses, weights, runtime


def _spread(weights: dict[str, torch.Tensor], world: World) -> float:
    """By how much the ranks' weights differ."""
    flat = torch.cat([value.double().reshape(-1) for value in weights.values()])
    rows = world.gather(flat.tolist())
    return max(abs(a - b) for row in rows[1:] for a, b in zip(rows[0], row, strict=True))


def _differences(cases: list[Case], change: Callable[[Any], None] | None) -> list[float]:
    """Between ddp as it is and with the settings of each case: of losses and weights."""
    found = []
    with open_world(parse("ddp", environment_size()), device="cpu", timeout_seconds=60) as world:
        for make_task, settings in cases:
            common = {k: v for k, v in settings.items() if k not in ("compress", "local_steps", "outer")}
            plain, weights, _ = _train(make_task, replace(FP64, **common), world)
            losses, other, _ = _train(make_task, replace(FP64, **settings), world, change)
            gaps = [abs(a - b) for a, b in zip(plain, losses, strict=True)]
            gaps += [(value - other[name]).abs().max().item() for name, value in weights.items() if value.numel()]
            found.append(max([*gaps, _spread(other, world)]))
    return found


# -- compression --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [3, slow(4)])
def test_topk_of_everything_is_ddp(num_ranks: int) -> None:
    """Momentum taken over from SGD, with weight decay, groups, schedule, Nesterov, dampening; ragged shares, loss
    weights, micro-batches, a batch norm over all ranks, a frozen layer; fewer samples than ranks; unused parameters."""
    all_of_it = {"compress": "topk:1.0"}
    cases: list[Case] = [
        (image_task, all_of_it),
        (image_task, {**all_of_it, "micro_batch": 3}),
        (padded_task, all_of_it),
        (_nesterov_task, all_of_it),
        (_dampened_task, all_of_it),
        (_rising_task, all_of_it),
        (_plain_task, {**all_of_it, "batch_size": num_ranks - 1}),
        (_forking_task, {**all_of_it, "unused_parameters": "allow", "batch_size": 3, "steps": 8}),
    ]
    assert max(on_ranks(_differences, num_ranks, cases, None)[0]) < 1e-9


def _methods(methods: list[str]) -> list[tuple[float, float, int, int]]:
    """Of each: the loss in the end, how much ranks differ, bytes counted, bytes of the collectives that were called."""
    found = []
    config = replace(FP64, precision="fp32", steps=12, batch_size=24, compress_warmup=None)
    status = StatusWriter()
    with open_world(parse("ddp", environment_size()), device="cpu", timeout_seconds=60) as world:
        for method in methods:
            task, settings = text_task(), replace(config, compress=method)
            losses, weights, runtime = _train(text_task, settings, world)
            before = runtime.traffic()["gradients"].num_bytes
            (window,) = make_batches(task, replace(settings, steps=1), world)
            with Recorder(world, status) as recorder:
                runtime.step(window)
            counted = runtime.traffic()["gradients"].num_bytes - before
            called = 0
            # torch's hook for powersgd calls the last two of its three collectives in whichever thread is at hand.
            for message in recorder.messages[:1] if method.startswith("powersgd") else recorder.messages:
                part = {"all-gather": 1, "all-reduce": 2}[message.operation] * message.num_bytes
                called += part * (message.num_ranks - 1) // message.num_ranks
            if method.startswith("powersgd"):
                state = runtime.rank_state.exchange._state
                matrices = (state.p_memory_dict[0], state.q_memory_dict[0])
                called += sum(2 * (world.size - 1) * 4 * matrix.numel() // world.size for matrix in matrices)
            found.append((losses[-1], _spread(weights, world), counted, called))
    return found


@pytest.mark.parametrize("num_ranks", [2, slow(4)])
def test_every_method_trains_keeps_ranks_equal_and_counts_its_bytes(num_ranks: int) -> None:
    sizes = {
        "none": 1.0, "fp16": 2.0, "bf16": 2.0, "powersgd:1": 4.0, "topk:0.05": 15.0, "onebit": 15.0, "ternary": 12.0,
    }  # fmt: skip
    methods = [method for method in sizes if method != "none"]
    config = replace(FP64, steps=12, batch_size=24)
    plain = by_hand(text_task(), config).losses
    parameters = sum(p.numel() for p in text_task().model().parameters())
    for rows in on_ranks(_methods, num_ranks, methods):
        for method, (loss, spread, counted, called) in zip(methods, rows, strict=True):
            assert spread == 0.0, method
            assert counted == called > 0, method
            whole = 2 * (num_ranks - 1) * 4 * parameters // num_ranks
            gathers = num_ranks / 2 if method.split(":")[0] in ("topk", "onebit", "ternary") else 1
            assert counted <= whole / sizes[method] * gathers, method
            assert loss < plain[0] - 0.25 * (plain[0] - plain[-1]), method


def _half_precision() -> tuple[bool, float, float]:
    """A scale that overflows at first: whether what waits stayed untouched, and how the run went on."""
    config = replace(FP64, precision="fp16", compress="topk:0.1", steps=1, batch_size=4)
    with open_world(parse("ddp", environment_size()), device="cpu", timeout_seconds=60) as world:

        def overflow(runtime: Any) -> None:
            # On one rank only: the other must skip the step with it.
            runtime.scaler._init_scale = 2.0**13
            if world.rank == 1:
                scaled = runtime.context.scaled
                runtime.context.scaled = lambda loss, *parts: scaled(loss * float("inf"), *parts)

        _, _, runtime = _train(text_task, config, world, overflow)
        untouched = all(not vector.any() for vector in runtime.rank_state.exchange.vectors().values())
        before = {name: value.clone() for name, value in runtime.model.state_dict().items()}
        vars(runtime.context).pop("scaled", None)
        for window in runtime.place(make_batches(text_task(), replace(config, steps=2), world)):
            runtime.step(window)
        moved = max((value - before[name]).abs().max().item() for name, value in runtime.model.state_dict().items())
        return untouched, moved, _spread(runtime.model.state_dict(), world)


def test_a_step_that_overflows_on_one_rank_is_skipped_by_all() -> None:
    for untouched, moved, spread in on_ranks(_half_precision, 2):
        assert untouched and 0 < moved < 10 and spread == 0.0


# -- checkpoints --------------------------------------------------------------------------------------------------


def scheduled_task() -> Task:
    return replace(padded_task(), schedule=halving)


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "topk:0.1"},
        slow({"compress": "powersgd:1"}),
        slow({"compress": "ternary"}),
        {"local_steps": 4, "outer": "diloco"},
        slow({"compress": "onebit"}),
        slow({"local_steps": 3}),
        slow({"compress": "topk:0.1", "topk_values": "sign"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_bit_by_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    """Also in the middle of a warm-up, and between two averagings."""
    make_task = dropping_task if "onebit" in settings.values() else scheduled_task
    config = replace(FP64, precision="fp32", steps=7, **settings)
    losses, weights = legs(make_task, config, tmp_path / "whole", [("ddp", 2, 7)])
    others, resumed = legs(make_task, config, tmp_path / "legs", [("ddp", 2, 3), ("ddp", 2, 7)])
    assert losses == others
    assert all(torch.equal(value, resumed[name]) for name, value in weights.items())


def _pending(config: RunConfig, folder: str) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """What this rank begins with after a resume: notes, its own state, and the optimizer's momentum."""
    with open_world(parse(config.strategy or "ddp", environment_size()), device="cpu", timeout_seconds=60) as world:
        checkpoint = find_state(Path(folder), StorageTopology(world, Path(folder)), resume=True)
        assert checkpoint is not None
        runtime = build_runtime(padded_task(), world, config, total_steps=7, seeded=False)
        restore(runtime, checkpoint, seed=0)
        own: dict[str, Any] = {}
        if isinstance(runtime.rank_state, UnsentGradients):
            own = {name: vector.numpy() for name, vector in runtime.rank_state.exchange.vectors().items()}
        momentum = {}
        for name, parameter in runtime.model.named_parameters():
            buffer = runtime.optimizer.state.get(parameter, {}).get("momentum_buffer")
            if buffer is not None:
                momentum[name] = (buffer.full_tensor() if isinstance(buffer, DTensor) else buffer).numpy()
        weights = {f"weight {name}": value.numpy() for name, value in runtime.named_weights()}
        return runtime.notes, own, {**momentum, **weights}


def test_other_ranks_get_the_mean_of_what_was_still_to_be_sent(tmp_path: Path) -> None:
    config = replace(FP64, compress="topk:0.1")
    legs(padded_task, config, tmp_path, [("ddp", 2, 3)])
    before = on_ranks(_pending, 2, config, str(tmp_path))
    assert not any("mean" in note for note in before[0][0])
    for notes, own, _ in on_ranks(_pending, 3, config, str(tmp_path)):
        assert any("mean of the residuals (gradients not sent yet) of 2 ranks" in note for note in notes)
        for name, vector in own.items():
            mean = (torch.as_tensor(before[0][1][name]) + torch.as_tensor(before[1][1][name])) / 2
            assert mean.abs().max() > 0
            torch.testing.assert_close(torch.as_tensor(vector), mean, rtol=1e-12, atol=0)
    # Without --compress it is dropped, but for the momentum, which SGD gets back, whole or cut.
    notes, _, alone = on_ranks(_pending, 2, replace(config, strategy="zero3", compress="none"), str(tmp_path))[0]
    assert any("are dropped" in note for note in notes)
    velocity = sum(torch.as_tensor(own["velocity"]) for _, own, _ in before) / 2
    held = {name: value for name, value in alone.items() if not name.startswith("weight ")}
    given = {name: value for name, value in before[0][2].items() if not name.startswith("weight ")}
    gained = torch.cat([torch.as_tensor(held[name] - given[name]).reshape(-1) for name in held])
    torch.testing.assert_close(gained, velocity, rtol=1e-9, atol=1e-15)


def test_a_failed_exchange_leaves_the_state_of_the_step_before(tmp_path: Path) -> None:
    """One rank fails in backward, the other then in the exchange: both still have what they had, and save it."""
    config = replace(FP64, precision="fp32", compress="topk:0.1", steps=6)
    places = [str(tmp_path / "run")] * 2
    told = on_ranks(_steps, 2, padded_task, "ddp", config, places, 4, "backward")
    assert all(rescued for _, _, rescued in told)
    began, state, _ = on_ranks(_steps, 2, padded_task, "ddp", config, places, 6)[0]
    assert began == 3
    _, whole = legs(padded_task, config, tmp_path / "whole", [("ddp", 2, 6)])
    assert all(torch.equal(torch.as_tensor(state[name]), value) for name, value in whole.items())


# -- local steps --------------------------------------------------------------------------------------------------


def _meet_in_every_step(runtime: Any) -> None:
    if isinstance(runtime.rank_state, LocalWeights):
        runtime.rank_state.averaging.every = 1


def test_local_steps_that_meet_every_time_are_ddp() -> None:
    """SGD with momentum, ragged shares, loss weights, batch norm over all ranks, micro-batches, 2 samples on 3."""
    local = {"local_steps": 2}
    cases: list[Case] = [
        (image_task, {**local, "micro_batch": 3}),
        (padded_task, local),
        (_plain_task, {**local, "batch_size": 2}),
    ]
    assert max(on_ranks(_differences, 3, cases, _meet_in_every_step)[0]) < 1e-9


def _diloco_by_hand(world: World, config: RunConfig) -> dict[str, torch.Tensor]:
    """The same with torch's own SGD as the outer optimizer, on the mean of two models that train apart."""
    task = padded_task()
    torch.manual_seed(config.seed)
    start = task.model().double()
    copies = []
    for _ in range(2):
        copy = task.model().double()
        copy.load_state_dict(start.state_dict())
        copies.append((copy, task.optimizer(copy)))
    outer = torch.optim.SGD(start.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    readers = [
        iter(
            Batches(
                task.train_data(),
                BatchPartition(config.batch_size, 2, rank, None),
                seed=config.seed,
                num_steps=config.steps,
            )
        )
        for rank in range(2)
    ]
    for step in range(config.steps or 0):
        windows = [next(reader) for reader in readers]
        total = sum(int((w.micro_batches[0].data[1] != -100).sum()) for w in windows)
        for (copy, optimizer), window in zip(copies, windows, strict=True):
            inputs, target = window.micro_batches[0].data
            share = 2 * int((target != -100).sum()) / total
            optimizer.zero_grad()
            weighted(task.loss(copy(inputs), target), share).backward()
            optimizer.step()
        if (step + 1) % config.local_steps == 0:
            for p, a, b in zip(start.parameters(), copies[0][0].parameters(), copies[1][0].parameters(), strict=True):
                p.grad = p.detach() - (a.detach() + b.detach()) / 2
            outer.step()
            for copy, _ in copies:
                copy.load_state_dict(start.state_dict())
    return start.state_dict()


def _local(config: RunConfig) -> tuple[float, float, dict[str, int]]:
    with open_world(parse("ddp", environment_size()), device="cpu", timeout_seconds=60) as world:
        _, weights, runtime = _train(padded_task, config, world)
        expected = _diloco_by_hand(world, config)
        gap = max((weights[name] - value).abs().max().item() for name, value in expected.items())
        sent = runtime.traffic()["weights"]
        return gap, _spread(weights, world), {"messages": sent.messages, "bytes": sent.num_bytes}


def test_diloco_is_nesterov_on_the_mean_of_models_that_train_apart() -> None:
    config = replace(FP64, local_steps=3, outer="diloco", steps=6, log_every=100)
    parameters = sum(p.numel() for p in padded_task().model().parameters())
    for gap, spread, sent in on_ranks(_local, 2, config):
        assert gap < 1e-9 and spread == 0.0
        # Two meetings, and the norm of each of the six steps, which the test asks for.
        assert sent == {"messages": 2 + 6, "bytes": 2 * 8 * parameters + 6 * 8}


def test_between_two_averagings_a_checkpoint_is_the_mean_for_others(tmp_path: Path) -> None:
    config = replace(FP64, local_steps=4)
    legs(padded_task, config, tmp_path, [("ddp", 2, 3)])
    two = on_ranks(_pending, 2, config, str(tmp_path))
    ((_, _, one),) = on_ranks(_pending, 1, replace(config, strategy="single", local_steps=1), str(tmp_path))
    three = on_ranks(_pending, 3, config, str(tmp_path))
    assert any("mean of the weights and optimizers of 2 ranks" in note for note in three[0][0])
    for name, value in one.items():
        if name.startswith("weight "):  # of the ranks' mean, which rank 0 hands out
            torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(two[0][2][name]), rtol=0, atol=1e-12)
        else:
            mean = (torch.as_tensor(two[0][2][name]) + torch.as_tensor(two[1][2][name])) / 2
            torch.testing.assert_close(torch.as_tensor(value), mean, rtol=0, atol=1e-12)
            assert not torch.equal(torch.as_tensor(two[0][2][name]), torch.as_tensor(two[1][2][name]))


# -- the command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--strategy", "ddp", "--compress", "topkk"], "Did you mean 'topk'?"),
        (["--strategy", "zero3", "--compress", "topk"], "Use --strategy ddp, or leave it out."),
        (["--strategy", "ddp", "--compress", "fp16", "--local-steps", "4"], "Leave one of them out."),
    ],
)
def test_the_command_line_refuses_before_a_process_starts(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "examples/babycnn/task.py", "--nproc", "2", *flags]) != 0
    assert told in capsys.readouterr().err
