"""Runs that begin with weights from a file: the numbers of a plain loop that loads it, under every strategy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rung.distributed.world import open_world
from rung.errors import ConfigError
from rung.launch.spawn import on_ranks
from rung.parallel.initial_weights import InitialWeights
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests.marks import slow
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import TASKS, text_task

BASE: dict[str, Any] = {"batch_size": 10, "steps": 2, "precision": "fp64", "device": "cpu"}


def trained(task: Task) -> nn.Module:
    """A model with other weights than those of the run's seed."""
    torch.manual_seed(77)
    return task.model()


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """As Hugging Face saves it: a tied weight once."""
    found, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor.detach().clone()
    return found


def as_file(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def as_folder(state: dict[str, torch.Tensor], folder: Path) -> Path:
    names = list(state)
    parts = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def as_checkpoint(state: dict[str, torch.Tensor], folder: Path) -> Path:
    """What a script of nanoGPT's kind writes, with a compiled model."""
    torch.save({"model": {f"_orig_mod.{k}": v for k, v in state.items()}, "iter_num": 3}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def as_old_file(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    return folder / "old.pth"


class ReadsValues(nn.Module):
    """Its constructor computes with real numbers, so that every rank builds the whole model on its host."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 23)
        self.scale = 1.0 if float(self.head.weight.detach().sum()) < 1e9 else 2.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * self.scale
        return self.head(x)


def reading_task() -> Task:
    return text_task(model=ReadsValues)


MAKERS: dict[str, Callable[[], Task]] = {**TASKS, "reading": reading_task}


@pytest.mark.parametrize(
    ("strategy", "ranks", "model", "write"),
    [
        ("single", 1, "gpt", as_file),
        ("single", 1, "babycnn", as_old_file),
        ("ddp", 2, "babycnn", as_checkpoint),
        ("zero3", 3, "gpt", as_folder),
        ("tp2", 2, "gpt", as_file),
        ("pp2,fsdp2", 4, "gpt", as_checkpoint),
        ("ps", 3, "gpt", as_file),
        ("pp2", 2, "reading", as_file),
        slow("zero3", 2, "reading", as_folder),
        slow("zero1", 2, "gpt", as_folder),
        slow("pp2", 2, "gpt", as_old_file),
        slow("zero3", 2, "babycnn", as_file),
        slow("hsdp2x2", 4, "text", as_file),
        slow("rpc-pp2", 2, "gpt", as_file),
        slow("dp", 1, "text", as_file),
    ],
)
def test_a_run_begins_with_the_weights(
    strategy: str, ranks: int, model: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    make = MAKERS[model]
    task = make()
    path = write(state_of(trained(task)), tmp_path)
    chosen = RunConfig(**BASE, init=str(path), servers=1 if strategy == "ps" else None)
    expected = by_hand(replace(task, model=lambda: trained(make())), chosen)
    found = on_ranks(with_rung, ranks, make, strategy, chosen)[0] if ranks > 1 else None
    found = found or with_rung(make, strategy, chosen)
    assert largest_difference(expected, found) < 1e-9
    assert any("begin as in --init" in note for note in found.notes)


def begun(task: Task, **changes: Any) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights with which a run begins, and what it tells."""
    config = RunConfig(**{**BASE, "precision": "fp32", **changes})
    with open_world(parse("single", 1), device="cpu") as world:
        runtime = build_runtime(task, world, config)
        return {name: value.clone() for name, value in runtime.model.state_dict().items()}, list(runtime.notes)


class Headed(nn.Module):
    """A trunk that others trained, with buffers that no file has, and a head of one's own."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, classes)
        self.register_buffer("angles", torch.arange(4) / 3.0, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x + self.angles))


def test_names_that_do_not_fit_are_listed_with_the_nearest(tmp_path: Path) -> None:
    task = text_task(model=Headed)
    state = state_of(Headed(5))
    state["trunk.0.wieght"] = state.pop("trunk.0.weight")
    path = as_file(state, tmp_path)
    with pytest.raises(ConfigError) as raised:
        begun(task, init=str(path))
    message = str(raised.value)
    assert "it lacks trunk.0.weight (8 x 4, nearest trunk.0.wieght)" in message
    assert "head.weight (5 x 8 there, not 3 x 8)" in message
    assert "the model has no trunk.0.wieght" in message and "--init-partial" in message


def test_what_fits_is_taken_and_the_rest_is_as_the_task_makes_it(tmp_path: Path) -> None:
    task = text_task(model=Headed)
    plain, _ = begun(task)
    given = state_of(Headed(5))
    found, notes = begun(task, init=str(as_file(given, tmp_path)), init_partial=True)
    assert torch.equal(found["trunk.0.weight"], given["trunk.0.weight"])
    assert torch.equal(found["head.weight"], plain["head.weight"])
    assert any("7 of 9 tensors" in note for note in notes) and any("head.weight" in note for note in notes)


def test_buffers_that_no_file_has_are_made_without_the_parameters(tmp_path: Path) -> None:
    drawn = []

    class Watched(Headed):
        def __init__(self) -> None:
            super().__init__()
            drawn.append(self.head.weight.device.type)

    with open_world(parse("single", 1), device="cpu") as world:
        config = RunConfig(**BASE, init=str(as_file(state_of(Headed()), tmp_path)))
        runtime = build_runtime(text_task(model=Watched), world, config)
        assert torch.equal(runtime.model.angles, (torch.arange(4) / 3.0).double())
    assert set(drawn) == {"meta"}


def test_a_task_may_name_its_weights_or_hold_them(tmp_path: Path) -> None:
    state = state_of(Headed())
    path = as_file(state, tmp_path)
    for given in (path, str(path), state):
        found, notes = begun(text_task(model=Headed, initial_weights=lambda given=given: given))
        assert torch.equal(found["head.weight"], state["head.weight"]) and notes
    with pytest.raises(ConfigError, match=r"initial_weights\(\) must return a path or a state dict"):
        begun(text_task(model=Headed, initial_weights=lambda: 3))
    other = state_of(Headed())
    (tmp_path / "other").mkdir()
    task = text_task(model=Headed, initial_weights=lambda: state)
    found, notes = begun(task, init=str(as_file(other, tmp_path / "other")))
    assert torch.equal(found["head.weight"], other["head.weight"])
    assert "--init replaces the task's initial_weights()" in notes


def test_prefixes_of_wrappers_are_left_out_with_a_line(tmp_path: Path) -> None:
    state = state_of(Headed())
    wrapped = InitialWeights({f"module.{name}": value for name, value in state.items()})
    wrapped.match(Headed(), is_partial=False)
    assert torch.equal(wrapped.read("head.bias"), state["head.bias"])
    assert any("'module.'" in note for note in wrapped.notes)
    inner = InitialWeights(dict(nn.Linear(8, 3).state_dict()))
    inner.match(nn.ModuleDict({"head": nn.Linear(8, 3)}), is_partial=False)
    assert any("in the model begin with 'head.'" in note for note in inner.notes)
    twice = InitialWeights(dict(nn.Linear(8, 3).state_dict()))
    with pytest.raises(ConfigError, match="no tensor fits"):  # student or teacher?
        twice.match(nn.ModuleDict({"student": nn.Linear(8, 3), "teacher": nn.Linear(8, 3)}), is_partial=True)


class Drawn(nn.Module):
    """Buffers that no file has: one drawn after the layers, one computed from a parameter."""

    def __init__(self, *, from_parameter: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        norm = self.layer.weight.detach().norm(dim=0)
        self.register_buffer("other", norm if from_parameter else torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.other


@pytest.mark.parametrize("from_parameter", [False, True])
def test_buffers_that_are_drawn_or_computed_are_those_of_the_constructor(from_parameter: bool, tmp_path: Path) -> None:
    task = text_task(model=lambda: Drawn(from_parameter=from_parameter))
    path = as_file(state_of(Drawn(from_parameter=False)), tmp_path)
    config = RunConfig(**{**BASE, "precision": "fp32"}, init=str(path))
    torch.manual_seed(config.seed)
    expected = Drawn(from_parameter=from_parameter).other
    with open_world(parse("single", 1), device="cpu") as world:
        assert torch.equal(build_runtime(task, world, config).model.other, expected)


def problem_of(state: dict[str, torch.Tensor], model: nn.Module) -> str:
    with pytest.raises(ConfigError) as raised:
        InitialWeights(state).match(model, is_partial=False)
    return str(raised.value)


def test_what_would_be_taken_wrongly_is_refused() -> None:
    linear = nn.Linear(2, 2)
    doubled = {"weight": torch.zeros(2, 2), "ema.weight": torch.ones(2, 2), "ema.bias": torch.ones(2)}
    assert "it lacks bias" in problem_of(doubled, linear) and "the model has no ema." in problem_of(doubled, linear)
    kinds = {"weight": torch.zeros(2, 2, dtype=torch.complex64), "bias": torch.zeros(2)}
    assert "weight (complex numbers there, not floating)" in problem_of(kinds, linear)
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    same, other = torch.zeros(2, 2), torch.ones(2, 2)
    assert "one weight for a.weight and b.weight, which differ" in problem_of(
        {"a.weight": same, "b.weight": other}, tied
    )
    InitialWeights({"a.weight": same, "b.weight": same.clone()}).match(tied, is_partial=False)


def test_old_files_may_have_buffers_that_are_not_saved_any_more() -> None:
    model = Headed()
    state = {**state_of(model), "angles": torch.zeros(7)}
    found = InitialWeights({f"module._orig_mod.{name}": value for name, value in state.items()})
    found.match(model, is_partial=False)
    assert "angles" not in found.names and len(found.names) == 9


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.safetensors", None, "no such file"),
        ("weights.ckpt", b"x", "weights are in a .safetensors"),
        ("weights.safetensors", b"nonsense", "cannot be read"),
        ("weights.pt", b"nonsense", "cannot be read"),
        ("model.safetensors.index.json", b"{}", "no index of files"),
        ("folder", None, "no model.safetensors"),
    ],
)
def test_a_file_that_is_none_is_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        begun(text_task(model=Headed), init=str(tmp_path / name))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ConfigError, match="cannot be read"):
        begun(text_task(model=Headed), init=str(tmp_path / "evil.pt"))
    assert not (tmp_path / "ran").exists()
