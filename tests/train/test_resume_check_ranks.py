"""A run that is resumed and has other losses than before says so, or ends."""

from __future__ import annotations

from pathlib import Path

from rung.train.resume_check import losses_after
from tests.launcher import WarmLauncher

# Where the file `changed` is, samples are twice as large. With `dies`, the ranks end in step 6, once, and leave
# it; neither is left to save the state before that step.
TASK = """
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

HERE = Path(__file__).parent
defaults = {"batch_size": 4, "steps": 8, "device": "cpu", "checkpoint_every": 4, "log_every": 1, "async_save": False}


class Samples(Dataset):
    def __init__(self):
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        self.scale = 2 if (HERE / "changed").exists() else 1

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.x[index] * self.scale, self.x[index]


def model():
    return nn.Linear(4, 4)


def train_data():
    return Samples()


def loss(output, target):
    return ((output - target) ** 2).mean()


def optimizer(model, dies=False):
    found, steps = torch.optim.SGD(model.parameters(), lr=0.01), []

    def end(*_):
        steps.append(1)
        if dies and len(steps) == 6 and not (HERE / f"died-{os.environ['RANK']}").exists():
            (HERE / f"died-{os.environ['RANK']}").touch()
            (HERE / "changed").touch()
            os._exit(3)

    found.register_step_post_hook(end)
    return found
"""


def test_a_restart_that_goes_on_with_other_losses_ends(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    flags = ["--strategy", "ddp", "--max-restarts", "2", "--set", "optimizer.dies=true"]
    outcome = launcher.run(tmp_path, *flags, checks=True)
    assert outcome.code != 0
    assert "step 5 had the loss" in outcome.output and "before the run was resumed" in outcome.output, outcome.output


def test_a_restart_with_the_same_losses_goes_on(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.replace('(HERE / "changed").touch()', "pass"))
    flags = ["--strategy", "ddp", "--max-restarts", "2", "--set", "optimizer.dies=true"]
    outcome = launcher.run(tmp_path, *flags, checks=True)
    assert outcome.code == 0 and "had the loss" not in outcome.output, outcome.output


def test_a_resume_by_hand_is_warned(launcher: WarmLauncher, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    assert launcher.run(tmp_path, "--strategy", "ddp", "--steps", "7", checks=True).code == 0
    for path in sorted((tmp_path / "out" / "checkpoints").iterdir())[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    (tmp_path / "changed").touch()
    flags = ["--resume", "out", "--strategy", "ddp", "--nproc", "2", "--steps", "8"]
    outcome = launcher.call(tmp_path, "train", "task.py", *flags)
    assert outcome.code == 0 and "step 5 had the loss" in outcome.output, outcome.output


def test_losses_are_read_from_the_end_of_the_file(tmp_path: Path) -> None:
    rows = [f'{{"step": {step}, "loss": {step + 0.5}}}' for step in range(1, 60_000)]
    again = ['{"event": "resume", "step": 59990}', '{"step": 59991, "loss": 7.0}', '{"step": 59992, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, *again]))
    found = losses_after(tmp_path / "metrics.jsonl", 59_990)
    assert found[59991] == 7.0 and found[59992] == 59992.5 and max(found) == 59_999
    assert losses_after(tmp_path / "none", 0) == {}
