"""What a state holds besides weights comes back as it was: odd optimizers, schedules, buffers and extra state."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LRScheduler, OneCycleLR

from rung.checkpoint import Position, Saver, StorageTopology, choose, restore
from rung.checkpoint.parts import EmergencySaver
from rung.distributed.world import open_world
from rung.errors import CheckpointError
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.train.checkpointing import Checkpointing
from rung.train.worker import make_batches
from tests.tasks import image_task


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def _steps(task: Task, folder: Path, start: int, stop: int, total: int = 12) -> tuple[Any, list[float]]:
    """Steps start+1..stop in one process, from the checkpoint of `start` if that is not 0; `stop` is saved."""
    config = RunConfig(batch_size=10, steps=total, device="cpu")
    folder.mkdir(exist_ok=True)
    with open_world(parse("single", 1), device="cpu") as world:
        found = choose({"checkpoints": folder}, world, StorageTopology(world, folder)) if start else None
        assert (found.step if found else 0) == start
        runtime = build_runtime(task, world, config, total_steps=total, seeded=found is None)
        if found is not None:
            restore(runtime, found, seed=0)
        windows = make_batches(task, replace(config, steps=stop), world, start_step=start)
        rates = [runtime.step(window).learning_rate for window in runtime.place(windows)]
        Saver(folder, runtime).save(Position(stop, 0, 0, 0), wait=True)
    return runtime, rates


def _resumed(task: Task, tmp_path: Path) -> tuple[Any, Any, list[float], list[float]]:
    whole, rates = _steps(task, tmp_path / "whole", 0, 10)
    _, first = _steps(task, tmp_path / "legs", 0, 4)
    legs, second = _steps(task, tmp_path / "legs", 4, 10)
    return whole, legs, rates, first + second


def _assert_same(one: Any, other: Any) -> None:
    for (name, a), (_, b) in zip(one.model.state_dict().items(), other.model.state_dict().items(), strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a, b), name


class Odd(torch.optim.Optimizer):
    """State of every type, some of it for no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"] = {"count": self.state.get("all", {"count": 0})["count"] + 1}
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["wide"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["count"] = torch.zeros_like(parameter, dtype=torch.int64)
                state["mask"] = torch.ones_like(parameter, dtype=torch.bool)
                state["number"], state["nothing"] = 1, None
            state["wide"].mul_(0.9).add_(parameter.grad.double())
            state["count"] += 1
            state["mask"] &= parameter.grad.abs() > 1e-4
            state["number"] += 1
            rate = self.param_groups[0]["lr"] / (self.state["all"]["count"] + state["number"])
            parameter.sub_((rate * state["wide"] * state["mask"] / state["count"]).float())


def test_optimizer_state_keeps_its_types(tmp_path: Path) -> None:
    task = image_task(model=Plain, optimizer=lambda model: Odd(model.parameters()), schedule=None)
    whole, legs, _, _ = _resumed(task, tmp_path)
    _assert_same(whole, legs)
    state = legs.optimizer.state[legs.model.layer.weight]
    assert [state[key].dtype for key in ("wide", "count", "mask")] == [torch.float64, torch.int64, torch.bool]


class Opaque(ExponentialLR):
    """Holds an object, which only pickle could save; its rate follows from the one before."""

    def __init__(self, optimizer: Any) -> None:
        self.object = object()
        super().__init__(optimizer, 0.9)


def test_a_schedule_that_cannot_be_saved_is_gone_through_again(tmp_path: Path) -> None:
    task = image_task(model=Plain, schedule=lambda optimizer, total: Opaque(optimizer))
    whole, legs, rates, in_legs = _resumed(task, tmp_path)
    assert in_legs == rates
    _assert_same(whole, legs)


class Wandering(Opaque):
    """Gives another rate whenever it is made: it cannot be resumed, and that is said."""

    made = 0

    def __init__(self, optimizer: Any) -> None:
        Wandering.made += 1
        super().__init__(optimizer)
        self.gamma = 1 - 0.1 * Wandering.made


def test_a_schedule_that_goes_elsewhere_is_refused(tmp_path: Path) -> None:
    task = image_task(model=Plain, schedule=lambda optimizer, total: Wandering(optimizer))
    _steps(task, tmp_path / "legs", 0, 4)
    with pytest.raises(CheckpointError, match="the schedule cannot be resumed"):
        _steps(task, tmp_path / "legs", 4, 10)


@pytest.mark.parametrize("kind", ["cosine", "one cycle"])
def test_a_schedule_follows_a_new_total(tmp_path: Path, kind: str) -> None:
    def schedule(optimizer: Any, total: int) -> LRScheduler:
        if kind == "cosine":
            return CosineAnnealingLR(optimizer, total)
        return OneCycleLR(optimizer, max_lr=[0.1, 0.1], total_steps=total + 1)

    task = image_task(model=Plain, schedule=schedule)
    _, rates = _steps(task, tmp_path / "whole", 0, 20, total=20)
    _steps(task, tmp_path / "legs", 0, 8, total=8)
    _, after = _steps(task, tmp_path / "legs", 8, 20, total=20)
    assert after == pytest.approx(rates[8:], rel=1e-9)


class Estimating(torch.optim.SGD):
    """Keeps what it learns in its groups, as Prodigy does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["estimate"] = group["estimate"] + group["lr"]


def test_a_new_total_leaves_the_optimizer_what_it_learned(tmp_path: Path) -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return Estimating([{"params": list(model.parameters()), "estimate": 0.0}], lr=0.1)

    task = image_task(model=Plain, optimizer=optimizer, schedule=lambda o, total: CosineAnnealingLR(o, total))
    first, _ = _steps(task, tmp_path / "legs", 0, 8, total=20)
    learned = first.optimizer.param_groups[0]["estimate"]
    again, rates = _steps(task, tmp_path / "legs", 8, 9, total=30)
    assert learned > 0
    assert again.optimizer.param_groups[0]["estimate"] == pytest.approx(learned + rates[0], abs=0.02)


class Peculiar(nn.Module):
    """A buffer that comes later, one over itself, one that forward replaces, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 5)
        self.register_buffer("late", None)
        self.register_buffer("spread", torch.ones(1).expand(5))
        self.register_buffer("replaced", torch.zeros(5))
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(1))
        if self.training:
            self.calls += 1
            self.late = y.detach().mean(0) if self.late is None else 0.5 * self.late + y.detach().mean(0)
            self.replaced = 0.9 * self.replaced + y.detach().mean(0)
        return y * self.spread + 0.01 * self.replaced + 0.01 * self.late + 0.01 * self.calls


def test_peculiar_modules(tmp_path: Path) -> None:
    whole, legs, _, _ = _resumed(image_task(model=Peculiar), tmp_path)
    _assert_same(whole, legs)
    assert legs.model.calls == whole.model.calls == 10


@pytest.mark.parametrize("size", [5, 2**17])
def test_a_rescue_puts_back_what_forward_changed_or_refuses(tmp_path: Path, size: int) -> None:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(36, 5)
            self.register_buffer("bank", torch.zeros(size))
            self.register_buffer("mean", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x.flatten(1))
            self.bank[:5] += y.detach().mean(0)
            self.mean = 0.9 * self.mean + y.detach().mean(0)
            return y + self.bank[:5] + self.mean

    task = image_task(model=Bank)
    config = RunConfig(batch_size=10, steps=5, device="cpu")
    with open_world(parse("single", 1), device="cpu") as world:
        runtime = build_runtime(task, world, config, total_steps=5)
        rescuer = EmergencySaver(tmp_path, runtime, {}, Position(0, 0, 0, 0))
        for window in runtime.place(make_batches(task, config, world)):
            rescuer.before_step()
            before = copy.deepcopy(dict(runtime.model.named_buffers()))
            if window.step == 4:
                runtime.model(window.micro_batches[0].data[0])  # and then it fails
                break
            runtime.step(window)
            rescuer.after_step(Position(window.step, 0, 0, 0))
        assert rescuer.rescue() == (size == 5)
        if size == 5:
            assert all(torch.equal(buffer, before[name]) for name, buffer in runtime.model.named_buffers())


class Nested(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["nested"] = {"large": torch.zeros(10**4)}


def test_what_cannot_be_saved_is_said_after_the_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = image_task(model=Plain, optimizer=lambda model: Nested(model.parameters(), lr=0.1), schedule=None)
    for every in (5, None):
        config = RunConfig(batch_size=10, steps=5, device="cpu", checkpoint_every=every)
        with open_world(parse("single", 1), device="cpu") as world:
            runtime = build_runtime(task, world, config, total_steps=5)
            checkpointing = Checkpointing(
                tmp_path, runtime, StorageTopology(world, tmp_path), config, {}, Position(0, 0, 0, 0)
            )
            window = next(iter(runtime.place(make_batches(task, config, world))))
            checkpointing.before_step()
            runtime.step(window)
            if every is not None:
                with pytest.raises(CheckpointError, match="only pickle could save"):
                    checkpointing.after_step(Position(1, 0, 0, 0))
            else:
                checkpointing.after_step(Position(1, 0, 0, 0))
                assert "can have no checkpoint" in caplog.text


def test_a_failed_save_leaves_the_checkpoint_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = image_task(model=Plain)
    _, _ = _steps(task, tmp_path / "run", 0, 4)
    config = RunConfig(batch_size=10, steps=8, device="cpu")
    with open_world(parse("single", 1), device="cpu") as world:
        runtime = build_runtime(task, world, config, total_steps=8)
        saver = Saver(tmp_path / "run", runtime)
        monkeypatch.setattr("rung.checkpoint.share.write_tensors", _no_space)
        with pytest.raises(CheckpointError, match="no space left"):
            saver.save(Position(4, 0, 0, 0), wait=True)
        found = choose({"checkpoints": tmp_path / "run"}, world, StorageTopology(world, tmp_path / "run"))
    assert found is not None and found.step == 4


def _no_space(*args: Any, **kwargs: Any) -> Any:
    raise OSError(28, "No space left on device")


# -- a task that has changed ------------------------------------------------------------------------------------------


def _adamw(lr: float, weight_decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)) -> Any:
    return lambda model: torch.optim.AdamW(model.parameters(), lr, betas, weight_decay=weight_decay)


def _two_groups(lr: float) -> Any:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [model.layer.weight]}, {"params": [model.layer.bias], "lr": lr}], lr=0.1)

    return make


def _cosine(eta_min: float) -> Any:
    return lambda optimizer, total: CosineAnnealingLR(optimizer, 12, eta_min)


def _warm(gamma: float) -> Any:
    def make(optimizer: Any, total: int) -> LRScheduler:
        parts = [ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, gamma)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    return make


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((_adamw(0.01), None), (_adamw(0.02), None), "lr is 0.02 in the task and 0.01 in the checkpoint: the checkpoi"),
        ((_adamw(0.01), None), (_adamw(0.01, 0.3), None), "weight_decay is 0.3 in the task and 0.1 in the checkpoint"),
        ((_adamw(0.01), None), (_adamw(0.01, 0.1, (0.8, 0.95)), None), "betas is [0.8, 0.95] in the task and [0.9, 0"),
        ((_two_groups(0.1), None), (_two_groups(0.2), None), "lr of group 1 is 0.2 in the task and 0.1 in the checkp"),
        ((_adamw(0.01), _cosine(0.0)), (_adamw(0.02), _cosine(0.0)), "lr is 0.02 in the task and 0.01 in the checkpo"),
        ((_adamw(0.01), _cosine(0.0)), (_adamw(0.01), _cosine(0.1)), "eta_min is 0.1 in the task and 0.0 in the chec"),
        ((_adamw(0.01), _warm(0.8)), (_adamw(0.01), _warm(0.7)), "gamma of part 1 is 0.7 in the task and 0.8 in the"),
        ((_adamw(0.01), _cosine(0.0)), (_adamw(0.01), None), "the task has none now, and the checkpoint was saved wi"),
    ],
)
def test_what_the_task_says_otherwise_is_told_in_one_line(tmp_path: Path, before: Any, after: Any, words: str) -> None:
    tasks = [image_task(model=Plain, optimizer=o, schedule=schedule) for o, schedule in (before, after)]
    first, _ = _steps(tasks[0], tmp_path, 0, 4)
    rate = first.optimizer.param_groups[-1]["lr"]
    runtime, rates = _steps(tasks[1], tmp_path, 4, 5)
    told = [note for note in runtime.notes if "the task" in note]
    assert len(told) == 1 and words in told[0], runtime.notes
    assert "start a new run from the weights (rung export)" in told[0]
    assert runtime.optimizer.param_groups[-1]["lr"] == rate or after[1] is not None
    if len(runtime.optimizer.param_groups) == 1:
        assert rates == [rate]  # the checkpoint's, as the line says


@pytest.mark.parametrize(
    ("first", "words"),
    [(["bias"], "layer.weight is group 1 in the task and group 0 in the checkpoint (and 1 more parameters): the"),
     ([], "layer.weight is in no group in the task and group 0 in the checkpoint: the task's groups are used")],
)  # fmt: skip
def test_parameters_that_changed_their_group_are_told_of(tmp_path: Path, first: list[str], words: str) -> None:
    def make(names: list[str]) -> Any:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            rest = {"weight", "bias"} - set(names) if names else {"bias"}
            groups = [[getattr(model.layer, name) for name in some] for some in (names, sorted(rest))]
            return torch.optim.SGD([{"params": some} for some in groups], lr=0.1)

        return optimizer

    before, after = (image_task(model=Plain, optimizer=make(names), schedule=None) for names in (["weight"], first))
    _steps(before, tmp_path, 0, 4)
    notes = _steps(after, tmp_path, 4, 5)[0].notes
    assert any(words in note for note in notes), notes


def test_another_schedule_is_refused_unless_it_begins_anew(tmp_path: Path) -> None:
    tasks = [image_task(model=Plain, optimizer=_adamw(0.01), schedule=made) for made in (_cosine(0.0), _warm(0.8))]
    _steps(tasks[0], tmp_path, 0, 4)
    with pytest.raises(CheckpointError, match="has the state of a CosineAnnealingLR"):
        _steps(tasks[1], tmp_path, 4, 5)
    notes = _steps(tasks[1], tmp_path, 4, 5, total=20)[0].notes
    assert "schedule: CosineAnnealingLR in the checkpoint, SequentialLR in the task: the task's is used" in notes


@pytest.mark.parametrize("schedule", [None, _cosine(0.0), _warm(0.8), lambda o, total: OneCycleLR(o, 0.1, total)])
def test_nothing_is_told_of_a_task_that_is_the_same(tmp_path: Path, schedule: Any) -> None:
    task = image_task(model=Plain, optimizer=_adamw(0.01), schedule=schedule)
    _steps(task, tmp_path, 0, 4)
    assert not [note for note in _steps(task, tmp_path, 4, 5)[0].notes if "the task" in note]


def test_with_another_length_the_schedule_and_its_groups_are_the_tasks(tmp_path: Path) -> None:
    tasks = [image_task(model=Plain, optimizer=_adamw(lr), schedule=_cosine(0.0)) for lr in (0.01, 0.02)]
    _steps(tasks[0], tmp_path, 0, 4)
    runtime, _ = _steps(tasks[1], tmp_path, 4, 5, total=20)
    assert [note for note in runtime.notes if "lr is 0.02 in the task" in note and "the task's is used" in note]
    assert runtime.optimizer.param_groups[0]["initial_lr"] == 0.02
