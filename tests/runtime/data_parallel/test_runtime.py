"""dp: one process with a replica for each device, here threads; held against one process, and against torch's own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import rung
from rung.compare.verify import _why_not_in_parts
from rung.data.permutation import Permutation
from rung.errors import ModelError
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.checkpoints import legs
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.parity import Outcome, by_hand, largest_difference, with_rung
from tests.tasks import TASKS, TinyCNN, TinyGPT, dropping_task, gpt_task, grouped_sgd, image_task, text_data, text_task

FP64 = RunConfig(batch_size=25, steps=5, precision="fp64", clip=0.5, device="cpu")


@pytest.mark.parametrize(
    ("strategy", "micro_batch"),
    [("dp2", None), slow("dp2", 2), slow("dp2", 7), ("dp4", None), ("dp4", 2), ("dp4", 7)],
)
def test_a_loss_weighted_by_tokens_matches_one_process(strategy: str, micro_batch: int | None) -> None:
    config = replace(FP64, micro_batch=micro_batch)
    expected = by_hand(TASKS["padded"](), config, micro_batch)
    assert largest_difference(expected, with_rung(TASKS["padded"], strategy, config)) < 1e-9


@pytest.mark.parametrize("name", ["text", "recurrent", "adamw"])
def test_three_samples_on_four_replicas(name: str) -> None:
    config = replace(FP64, batch_size=3, steps=4)
    expected = by_hand(TASKS[name](), config)
    assert largest_difference(expected, with_rung(TASKS[name], "dp4", config)) < 1e-9


@dataclass
class Answer:
    logits: torch.Tensor
    more: dict[str, Any]


class Nesting(nn.Module):
    """Takes names, has a frozen layer, and answers with a dataclass around a dict; part of it takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(23, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 23)

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> Answer:
        hidden = self.frozen(self.token(tokens)) * scale[:, None, None]
        return Answer(self.head(hidden), {"hidden": (hidden,), "best": self.head(hidden).argmax(-1), "kind": "answer"})


class NamedText(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int) -> None:
        self._data = text_data(count)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        tokens, target = self._data[index]
        return {"tokens": tokens, "scale": torch.tensor(1.0 + index % 3), "target": target}


def nesting_loss(output: Answer, target: torch.Tensor) -> torch.Tensor:
    assert output.more["kind"] == "answer"
    return (
        F.cross_entropy(output.logits.flatten(0, 1), target.flatten()) + 0.1 * output.more["hidden"][0].square().mean()
    )


def nesting_task(**changes: Any) -> Task:
    task = text_task(model=Nesting, train_data=lambda: NamedText(103), eval_data=lambda: NamedText(37))
    metrics = lambda output, target: {"right": (output.more["best"] == target).float().mean(dim=1)}  # noqa: E731
    return replace(task, loss=nesting_loss, metrics=metrics, **changes)


def calling_task() -> Task:
    """A forward of the task's own, which takes the whole batch and uses parts of the model."""

    def forward(model: Nesting, batch: dict[str, torch.Tensor]) -> Answer:
        assert model.head.weight.dtype == torch.float64
        return model(batch["tokens"], batch["scale"])

    return nesting_task(forward=forward)


@pytest.mark.parametrize("make_task", [nesting_task, calling_task])
def test_named_inputs_and_nested_outputs(make_task: Callable[[], Task]) -> None:
    expected = with_rung(make_task, "single", FP64)
    assert largest_difference(expected, with_rung(make_task, "dp4", FP64)) < 1e-9


def _whole_batch_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    rows = F.normalize(output.mean(1), dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def test_a_loss_that_compares_samples_sees_the_whole_batch() -> None:
    """The one thing that dp can and ddp cannot: its loss is taken of all outputs together."""
    expected = with_rung(lambda: text_task(loss=_whole_batch_loss), "single", FP64)
    assert largest_difference(expected, with_rung(lambda: text_task(loss=_whole_batch_loss), "dp2", FP64)) < 1e-9


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_batch_norm_is_that_of_torch_s_data_parallel(num_replicas: int) -> None:
    """Each replica normalises its own part; of the running statistics those of the first are kept."""
    config = replace(FP64, clip=None, steps=6)
    task = image_task()
    torch.manual_seed(config.seed)
    model = TinyCNN().double()
    optimizer = grouped_sgd(model)
    schedule = task.schedule(optimizer, 6) if task.schedule else None
    data, order = task.train_data(), Permutation(103, config.seed, shuffle=True)
    losses = []
    for step in range(6):
        epoch, within = divmod(step, 5)
        rows = order.samples(epoch, within * 25, min((within + 1) * 25, 103))
        images, labels = torch.stack([data[i][0] for i in rows]).double(), torch.stack([data[i][1] for i in rows])
        parts = images.chunk(num_replicas)
        own = [dict(model.named_buffers()), *(copy.deepcopy(dict(model.named_buffers())) for _ in parts[1:])]
        parameters = dict(model.named_parameters())
        outputs = [
            functional_call(model, {**parameters, **buffers}, part) for buffers, part in zip(own, parts, strict=True)
        ]
        loss = F.cross_entropy(torch.cat(outputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert schedule is not None
        schedule.step()
        losses.append(loss.item())
    found = with_rung(image_task, f"dp{num_replicas}", config)
    assert found.losses == pytest.approx(losses, abs=1e-9)
    for name, value in model.state_dict().items():
        assert torch.allclose(torch.as_tensor(found.state[name]), value, rtol=0, atol=1e-9), name
    assert any("each replica normalises by its own part" in note for note in found.notes)
    single = with_rung(image_task, "single", config)
    assert largest_difference(single, found) > 1e-4
    assert "batch norm (first.1 and 1 more)" in (_why_not_in_parts(model) or "")
    assert _why_not_in_parts(TinyGPT()) is None


def deep_task() -> Task:
    """Dropout in blocks, as a module and inside of attention."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.MultiheadAttention(12, 2, dropout=0.2, batch_first=True)
            self.up, self.down, self.drop = nn.Linear(12, 12), nn.Linear(12, 12), nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.drop(self.mix(x, x, x, need_weights=False)[0])
            return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.1, self.training))

    def model() -> nn.Module:
        return nn.Sequential(nn.Embedding(23, 12), nn.Sequential(Block(), Block(), Block()), nn.Linear(12, 23))

    return text_task(model=model)


def test_dropout_repeats_and_checkpointing_draws_it_again() -> None:
    """A second draw of other numbers in backward would give wrong gradients and no error."""
    config = replace(FP64, micro_batch=13, steps=2)
    found: list[Outcome] = [
        with_rung(deep_task, "dp2", replace(config, activation_checkpointing=mode))
        for mode in ("none", "none", "full", "selective")
    ]
    for other in found[1:]:
        assert largest_difference(found[0], other) < 1e-12
    assert not any("do not repeat" in note for note in found[0].notes)


@pytest.mark.parametrize("strategy", ["single", "dp2"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_that_is_off_stays_off_when_a_block_is_computed_again(strategy: str, mode: str) -> None:
    config = replace(FP64, dropout=False, steps=2)
    off = with_rung(deep_task, strategy, replace(config, activation_checkpointing=mode))
    assert largest_difference(with_rung(deep_task, "single", config), off) < 1e-9


class Sampling(TinyGPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.get_buffer("mask").add_(0.001)
        return super().forward(tokens) + torch.distributions.Beta(2.0, 2.0).sample()


def test_what_a_replica_alone_sees_is_noted() -> None:
    notes = with_rung(lambda: text_task(model=Sampling), "dp2", replace(FP64, steps=1)).notes
    assert any("forward changes mask: each replica" in note for note in notes)
    assert any("do not repeat from run to run" in note for note in notes)


class Idle(nn.Module):
    """A parameter that no sample uses, and one that samples of the first half use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle, self.some = (nn.Linear(36, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(1)
        return self.used(x) + (self.some(x) if x[0, 0] > 0 else 0.0)


def idle_task() -> Task:
    return image_task(model=Idle)


def test_unused_parameters_are_named_or_left_alone() -> None:
    with pytest.raises(
        ModelError, match=r"2 trainable parameters got no gradient in this step: idle\.weight, idle\.bias"
    ):
        with_rung(idle_task, "dp4", replace(FP64, batch_size=24))
    found = with_rung(idle_task, "dp4", replace(FP64, unused_parameters="allow"))
    torch.manual_seed(0)
    assert torch.equal(torch.as_tensor(found.state["idle.weight"]), Idle().idle.weight.double())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(precision: str) -> None:
    config = RunConfig(batch_size=25, steps=8, precision=precision, device="cpu", clip=1.0)
    found, single = (with_rung(text_task, name, config) for name in ("dp2", "single"))
    assert max(abs(a - b) for a, b in zip(found.losses, single.losses, strict=True)) < 0.05
    assert all(str(value.dtype) == "float32" for value in found.state.values())


def test_checkpoints_go_from_and_to_other_strategies(tmp_path: Path) -> None:
    config = replace(FP64, batch_size=10, steps=6, eval_every="never")
    plan = [("dp2", 1, 2), ("single", 1, 3), ("dp4", 1, 4), ("ddp", 2, 5), ("dp2", 1, 6)]
    losses, state = legs(gpt_task, config, tmp_path / "legs", plan)
    whole_losses, whole = legs(gpt_task, config, tmp_path / "whole", [("single", 1, 6)])
    assert losses == pytest.approx(whole_losses, abs=1e-9)
    assert all(float((state[name] - whole[name]).abs().max()) < 1e-9 for name in whole)


def test_a_run_that_was_stopped_is_bit_identical(tmp_path: Path) -> None:
    config = RunConfig(batch_size=10, steps=13, device="cpu", eval_every="never", micro_batch=4)
    losses, state = legs(dropping_task, config, tmp_path / "legs", [("dp2", 1, until) for until in (4, 11, 13)])
    whole_losses, whole = legs(dropping_task, config, tmp_path / "whole", [("dp2", 1, 13)])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_a_session() -> None:
    found = []
    for strategy in ("single", "dp2"):
        with rung.open_session(gpt_task(), strategy=strategy, total_steps=4, precision="fp64") as session:
            data = text_data(50)
            batches = [tuple(t[start : start + 13] for t in data.tensors) for start in range(0, 50, 13)]
            found.append([float(session.step(batch).loss) for batch in batches] + [session.evaluate()["loss"]])
    assert found[0] == pytest.approx(found[1], abs=1e-9)


def test_the_command_tells_what_was_exchanged(launcher: WarmLauncher, tmp_path: Path) -> None:
    settings = ["--steps", "3", "--set", "model.width=16", "--set", "model.layers=1", "--set", "device=cpu"]
    settings += ["--set", "train_data.characters=9000", "--set", "eval_data.characters=9000"]
    task = str(Path(__file__).parents[3] / "examples" / "gpt")
    done = launcher.call(tmp_path, "train", task, "--strategy", "dp2", *settings, "--out", "run", limit=120)
    assert done.code == 0, done.output
    assert "dp: 2 replicas on the CPU, a thread each" in done.output
    end = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    (traffic,), kept = end["traffic"], end["state_bytes"][0]
    sent = {name: (told["messages"], told["num_bytes"]) for name, told in traffic.items()}
    logits = 16 * 64 * 98 * 4
    assert sent["scatter inputs"] == (3, 3 * 8 * 64 * 8)
    assert sent["broadcast parameters"] == sent["reduce gradients"] == (3, 3 * kept["parameters"])
    assert sent["gather outputs"] == sent["scatter output gradients"] == (3, 3 * logits // 2)
    load = end["device_0_bytes"]
    assert load["outputs"] == load["output gradients"] == logits
    assert load["loss"] >= logits
    assert load["gradients"] == kept["parameters"]
    assert load["optimizer"] == kept["optimizer"] > 2 * kept["parameters"]
