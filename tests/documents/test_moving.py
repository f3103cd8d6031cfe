"""docs/moving.md: each script of the page and the task beside it have the same losses, norms and learning rates.

Both sides are the page's own code. A script is changed where the page says so (the order of the samples), to compute in
float64, and to hand over its figures.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.spec.config import RunConfig, resolve
from rung.spec.task import Task, load_task
from tests.documents.pages import blocks
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import Outcome, with_rung
from tests.tasks import EXAMPLES

FILES = {block.name: block.text for block in blocks("docs/moving.md") if block.kind == "file"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the page, as a reader has them, in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (np.arange(4000) ** 2 % 61).astype("uint16").tofile(tmp_path / "nanogpt" / "tokens.bin")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("model", None)


def run_script(name: str, changes: dict[str, str], **names: Any) -> dict[str, Any]:
    """Execute a script of the page with `changes` to its text, each of which must be found once."""
    text = FILES[name]
    for old, new in changes.items():
        assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    exec(compile(text, name, "exec"), namespace)
    return namespace


def prepare_torchvision() -> None:
    """Lightning and transformers import it if it is installed; the example can where it lacks two operators."""
    if importlib.util.find_spec("transformers") is not None:
        load_task(EXAMPLES / "huggingface")


def make_task(name: str) -> Task:
    return load_task(Path(name))


def run_task(name: str, strategy: str, num_ranks: int, **flags: Any) -> Outcome:
    """What `rung train NAME --no-shuffle` computes."""
    flags = {"shuffle": False, "device": "cpu", "precision": "fp64", **flags}
    config: RunConfig = resolve(make_task(name), flags=flags).config
    make = functools.partial(make_task, name)
    if num_ranks == 1:
        return with_rung(make, strategy, config)
    outcome: Outcome = on_ranks(with_rung, num_ranks, make, strategy, config)[0]
    return outcome


def assert_same(ours: Outcome, theirs: Outcome, tolerance: float, clip: float) -> None:
    for key in ("losses", "norms", "rates"):
        expected = getattr(theirs, key)
        assert len(expected) >= 8
        assert getattr(ours, key) == pytest.approx(expected, rel=tolerance, abs=tolerance), key
    assert max(theirs.norms) > clip, "nothing was clipped"
    assert theirs.losses[-1] < theirs.losses[0] - 0.01, "nothing was trained"


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "micro_batch"),
    [("single", 1, 8), slow("zero3", 2, 4), slow("tp2", 2, 8), slow("pp2", 2, 8)],
)
def test_a_loop_like_nanogpt(strategy: str, num_ranks: int, micro_batch: int, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(folder / "nanogpt"))
    theirs = Outcome()
    changes = {
        "ix = torch.randint(len(data) - block_size, (batch_size,))": "ix = torch.tensor(positions.pop(0))",
        "model = GPT(block_size).to(device)": "model = GPT(block_size).to(device).double()",
        'print(f"iter {it}: loss {lossf:.4f}")': "record(lossf, norm, lr)",
    }
    positions = np.arange(12 * 2 * 8).reshape(-1, 8).tolist()

    def record(loss: float, norm: torch.Tensor, rate: float) -> None:
        theirs.losses.append(loss)
        theirs.norms.append(norm.item())
        theirs.rates.append(rate)

    run_script("nanogpt/train.py", changes, positions=positions, record=record)
    assert not positions
    ours = run_task("nanogpt/task.py", strategy, num_ranks, micro_batch=micro_batch)
    assert_same(ours, theirs, 1e-9, clip=1.0)


class StandInModule(nn.Module):
    """What the script uses of `lightning.LightningModule`."""

    def save_hyperparameters(self) -> None:
        frame = sys._getframe(1).f_locals
        self.hparams = types.SimpleNamespace(lr=frame["lr"], width=frame["width"])

    def log(self, name: str, value: torch.Tensor) -> None:
        self.logged[name] = value.item()


class StandInTrainer:
    """Lightning's documented loop: accumulate, clip, step, step the schedule; validate after each epoch."""

    def __init__(self, max_epochs: int, accumulate_grad_batches: int, gradient_clip_val: float, **rest: Any) -> None:
        self.epochs, self.accumulate, self.clip = max_epochs, accumulate_grad_batches, gradient_clip_val
        self.callbacks = rest["callbacks"]
        self.callback_metrics: dict[str, torch.Tensor] = {}

    def fit(self, module: Any, train: Any, evaluation: Any) -> None:
        module.trainer, module.logged = self, {}
        self.estimated_stepping_batches = self.epochs * len(train) // self.accumulate
        made = module.configure_optimizers()
        optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
        for _ in range(self.epochs):
            for index, batch in enumerate(train):
                loss = module.training_step(batch, index)
                (loss / self.accumulate).backward()
                self.callbacks[0].on_train_loss(loss.item())
                if (index + 1) % self.accumulate == 0:
                    self.callbacks[0].on_before_optimizer_step(self, module, optimizer)
                    nn.utils.clip_grad_norm_(module.parameters(), self.clip)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        sums: dict[str, float] = {}
        with torch.no_grad():
            for index, batch in enumerate(evaluation):
                module.validation_step(batch, index)
                for name in ("val_loss", "val_accuracy"):
                    sums[name] = sums.get(name, 0.0) + module.logged[name] * len(batch[0])
        self.callback_metrics = {name: torch.tensor(v / len(evaluation.dataset)) for name, v in sums.items()}


def lightning_modules() -> tuple[types.ModuleType, bool]:
    """Lightning itself where it is installed, else a module with what the script uses of it."""
    if importlib.util.find_spec("lightning") is not None:
        prepare_torchvision()
        return importlib.import_module("lightning"), True
    stand_in = types.ModuleType("lightning")
    stand_in.LightningModule, stand_in.Trainer = StandInModule, StandInTrainer  # type: ignore[attr-defined]
    stand_in.Callback, stand_in.seed_everything = object, torch.manual_seed  # type: ignore[attr-defined]
    return stand_in, False


@pytest.mark.parametrize(("strategy", "num_ranks", "micro_batch"), [("single", 1, 16), slow("ddp", 2, 8)])
def test_a_lightning_module(
    strategy: str, num_ranks: int, micro_batch: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning, is_real = lightning_modules()
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    theirs, parts = Outcome(), []

    class Recorder(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_loss(self, loss: float) -> None:
            parts.append(loss)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            # Lightning hands over the loss divided for the accumulation.
            parts.append(outputs["loss"].item() * 2)

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            grads = [p.grad.norm() for p in module.parameters()]
            theirs.norms.append(torch.stack(grads).norm().item())
            theirs.rates.append(optimizer.param_groups[0]["lr"])

    changes = {
        "shuffle=True": "shuffle=False",
        "module = Circle()": "module = Circle().double()",
        "x = torch.rand(count, 2, generator=g) * 2 - 1": "x = torch.rand(count, 2, generator=g).mul(2).sub(1).double()",
        "gradient_clip_val=0.1,": "gradient_clip_val=0.1, callbacks=[Recorder()], accelerator='cpu', logger=False,"
        " enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,"
        " num_sanity_val_steps=0" + (", precision='64-true'," if is_real else ","),
    }
    made = run_script("module/train.py", changes, Recorder=Recorder)
    theirs.losses = [(a + b) / 2 for a, b in zip(parts[::2], parts[1::2], strict=True)]
    validation = made["trainer"].callback_metrics
    ours = run_task("module/task.py", strategy, num_ranks, micro_batch=micro_batch)
    assert_same(ours, theirs, 1e-9, clip=0.1)
    # Lightning sums in single precision what is logged.
    assert ours.evaluation["loss"] == pytest.approx(validation["val_loss"].item(), abs=1e-6)
    assert ours.evaluation["accuracy"] == pytest.approx(validation["val_accuracy"].item(), abs=1e-6)


def test_a_script_with_the_trainer_of_hugging_face(folder: Path) -> None:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers or accelerate not installed: pip install 'rung[bench]'")
    prepare_torchvision()
    changes = {
        'report_to="none",': 'report_to="none", train_sampling_strategy="sequential", use_cpu=True, disable_tqdm=True,'
        ' save_strategy="no",',
        "print(trainer.evaluate())": "evaluation = trainer.evaluate()",
    }
    made = run_script("huggingface/train.py", changes)
    lines = [line for line in made["trainer"].state.log_history if "grad_norm" in line]
    theirs = Outcome([x["loss"] for x in lines], [x["grad_norm"] for x in lines], [x["learning_rate"] for x in lines])
    ours = run_task("huggingface/task.py", "single", 1, precision="fp32")
    assert_same(ours, theirs, 2e-5, clip=1.0)


def test_samples_mixed_by_the_data_set_are_the_same_on_two_ranks(folder: Path) -> None:
    names = run_script("vision/mixed.py", {})
    images = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    data = names["Mixed"]([(image, int(label)) for image, label in images], 6)

    def rows(rank: int, ranks: int) -> torch.Tensor:
        (window,) = Batches(data, BatchPartition(6, ranks, rank, 6 // ranks), seed=0, num_steps=1)
        return torch.cat([*window.micro_batches[0].data], dim=1)

    alone = rows(0, 1)
    assert ((alone[:, 2:] > 0).sum(1) == 2).any(), "some have two labels"
    assert torch.equal(alone, torch.cat([rows(0, 2), rows(1, 2)]))
