"""The command line as a user meets it: what is printed, what is left behind, what is refused before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rung.cli.main import main
from tests.launcher import Outcome, WarmLauncher
from tests.tasks import EXAMPLES

RUNG = [sys.executable, "-m", "rung"]

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 10, "epochs": 2, "device": "cpu"}

def data(count):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=g)
    return TensorDataset(x, (x.sum(1) > 0).long())

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)
        self.tied = nn.Linear(8, width)
        self.tied.weight = self.first.weight

    def forward(self, x):
        return self.last(self.norm(self.first(x) + self.tied(x)).relu())

def model(width=16): return Net(width)
def train_data(): return data(103)
def eval_data(): return data(41)
def loss(output, target): return F.cross_entropy(output, target)
def metrics(output, target): return {"accuracy": (output.argmax(1) == target).float()}
def optimizer(model, lr=0.05): return torch.optim.AdamW(model.parameters(), lr=lr)
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "task.py"
    path.parent.mkdir()
    path.write_text(TASK)
    return path


def rung(*arguments: str, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*RUNG, *arguments], cwd=cwd, capture_output=True, text=True, timeout=180, check=False)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def warm_rung(launcher: WarmLauncher, folder: Path, *arguments: str, check: bool = True) -> Outcome:
    done = launcher.call(folder, *arguments, apart=True, limit=180)
    if check:
        assert done.code == 0, done.output + (folder / "errors").read_text()
    return done


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def test_a_run_leaves_everything_behind(task: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("clip = 1.0\n[optimizer]\nlr = 0.02\n")
    flags = ["--strategy", "fsdp", "--nproc", "2", "--config", "run.toml", "--set", "model.width=24"]
    done = rung("train", "mine/task.py", *flags, cwd=tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mine-fsdp-")
    assert str(folder.relative_to(tmp_path)) in done.stdout
    assert "done: 22 steps" in done.stdout
    assert "batch norm: sync" in done.stdout
    config = (folder / "config.toml").read_text()
    for line in (
        "batch_size = 10  # task",
        "clip = 1.0  # file run.toml",
        "width = 24  # flag",
        "lr = 0.02  # file run.toml",
        "seed = 0  # default",
    ):
        assert line in config
    steps = events(folder, "step")
    assert [row["step"] for row in steps] == list(range(1, 23))
    assert [row["samples"] for row in steps][-1] == 2 * 103
    for key in (
        "epoch",
        "loss",
        "grad_norm",
        "lr",
        "step_seconds",
        "samples_per_second",
        "data_wait_seconds",
        "peak_memory_bytes",
    ):
        assert steps[-1][key] is not None
    assert [row["step"] for row in events(folder, "eval")] == [11, 22]
    assert len(events(folder, "end")[0]["state_bytes"]) == 2
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [round(event.value, 4) for event in board.Scalars("train/loss")] == [round(row["loss"], 4) for row in steps]
    assert [event.step for event in board.Scalars("eval/accuracy")] == [11, 22]

    # The weights load into the bare module, in a process that cannot import Rung.
    script = (
        "import sys; sys.modules['rung'] = None; sys.path.insert(0, 'mine'); import task\n"
        "from safetensors.torch import load_file\n"
        f"task.model(24).load_state_dict(load_file({str(folder / 'model.safetensors')!r}), strict=True)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)


def test_evaluation_and_losses_equal_those_of_one_process(launcher: WarmLauncher, task: Path, tmp_path: Path) -> None:
    found = {}
    for name, nproc in (("single", "1"), ("zero1", "2")):
        folder = tmp_path / name
        warm_rung(
            launcher,
            tmp_path,
            "train",
            str(task),
            "--strategy",
            name,
            "--nproc",
            nproc,
            "--precision",
            "fp64",
            "--out",
            str(folder),
        )
        found[name] = (
            [row["loss"] for row in events(folder, "step")],
            [(row["loss"], row["accuracy"]) for row in events(folder, "eval")],
        )
    assert found["zero1"][0] == pytest.approx(found["single"][0], abs=1e-9)
    for one, other in zip(found["zero1"][1], found["single"][1], strict=True):
        assert one == pytest.approx(other, abs=1e-9)


def test_verify_compares_complex_weights_by_their_values(launcher: WarmLauncher, tmp_path: Path) -> None:
    """In fp64 they are complex128, which the file of weights has as bytes: the last bit of a sum is no difference."""
    (tmp_path / "turned.py").write_text(
        """
import torch
from torch import nn
from torch.utils.data import TensorDataset
defaults = {"batch_size": 9, "device": "cpu"}
class Turn(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(5, 5, dtype=torch.cfloat))
        self.last = nn.Linear(8, 3)
    def forward(self, x): return self.last(torch.fft.irfft(torch.fft.rfft(x) @ self.turn, n=8))
def model(): return Turn()
def train_data(): return TensorDataset(torch.randn(103, 8), torch.randint(0, 3, (103,)))
def loss(output, target): return nn.functional.cross_entropy(output, target)
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""
    )
    done = warm_rung(
        launcher, tmp_path, "verify", str(tmp_path / "turned.py"), "--nproc", "3", "--strategies", "ddp", "--json"
    )
    rows = json.loads(done.output)["rows"]
    assert [row["parameters"] < 1e-12 for row in rows] == [True, True]


def test_verify_proves_a_task_and_finds_a_wrong_one(launcher: WarmLauncher, task: Path, tmp_path: Path) -> None:
    done = warm_rung(
        launcher,
        tmp_path,
        "verify",
        str(task),
        "--nproc",
        "2",
        "--strategies",
        "ddp",
        "zero3",
        "--strategies",
        "hsdp1x2",
        "--steps",
        "3",
        "--json",
    )
    result = json.loads(done.output)
    assert result["passed"]
    assert [(row["strategy"], row["optimizer"]) for row in result["rows"]] == [
        (name, optimizer) for optimizer in ("sgd", "task") for name in ("ddp", "zero3", "hsdp1x2")
    ]
    assert all(row["parameters"] < 1e-9 for row in result["rows"])

    # Settings of one strategy are not held against the others, nor against the one process.
    served = ("--nproc", "3", "--strategies", "ps", "ddp", "--set", "servers=2", "--steps", "2", "--json")
    assert json.loads(warm_rung(launcher, tmp_path, "verify", str(task), *served).output)["passed"]

    # Its loss looks at the rank: no strategy can make that right, and verify must say so.
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        TASK.replace(
            "return F.cross_entropy(output, target)",
            "import os; return F.cross_entropy(output, target) * (1 + int(os.environ.get('RANK', 0)))",
        )
    )
    done = warm_rung(
        launcher, tmp_path, "verify", str(wrong), "--nproc", "2", "--strategies", "ddp", "--steps", "2", check=False
    )
    assert done.code == 1
    assert "DIFFERS" in done.output
    assert "the first differing tensor is first.weight" in done.output
    assert "0 of 2 agree" in done.output


def test_a_strategy_that_fails_is_a_row_with_its_reason(launcher: WarmLauncher, task: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "unused.py"
    wrong.write_text(
        TASK.replace("self.last(self.norm(self.first(x) + self.tied(x)).relu())", "self.last(self.first(x))")
    )
    done = warm_rung(
        launcher, tmp_path, "verify", str(wrong), "--nproc", "2", "--strategies", "ddp", "--steps", "2", check=False
    )
    assert done.code == 1
    assert "FAILED" in done.output
    assert "got no gradient" in done.output


def test_a_new_task_runs_as_it_is(launcher: WarmLauncher, tmp_path: Path) -> None:
    done = warm_rung(launcher, tmp_path, "new", "first")
    assert "wrote first/task.py" in done.output
    assert "import rung" not in (tmp_path / "first" / "task.py").read_text()
    done = warm_rung(launcher, tmp_path, "train", "first", "--nproc", "2", "--epochs", "2")
    assert "first-ddp-" in done.output
    assert warm_rung(launcher, tmp_path, "new", "first", check=False).code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--strateg", "ddp"], "there is no argument '--strateg'. Did you mean '--strategy'?"),
        (["--workers", "2"], "--set workers=VALUE"),
        (["--strategy", "fdsp"], "Did you mean 'fsdp'?"),
        (["--strategy", "single", "--nproc", "2"], "one process"),
        (["--strategy", "hsdp", "--nproc", "3"], "hsdp1x3"),
        (["--set", "model.widht=3"], "Did you mean 'width'?"),
        (["--set", "model.width=x"], "whole number"),
        (["--set", "width"], "KEY=VALUE"),
        (["--offload", "cpu", "--strategy", "ddp", "--nproc", "2"], "shards no parameters"),
        (["--precision", "fp4"], "one of: fp32, bf16, fp16, fp8, fp64"),
        (["--set", "device=cuda"], "no GPU"),
        (["--set", "backend=nccl", "--nproc", "2"], "backend=gloo"),
        (["--config", "nothing.toml"], "no settings file"),
        (["--batch-size", "4", "--micro-batch", "8"], "does not fit"),
    ],
)
def test_mistakes_are_one_clear_line_before_any_process_starts(
    task: Path,
    tmp_path: Path,
    arguments: list[str],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "device=cuda" in arguments:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rung.launch.train_command.start_fork_server", lambda: None)
    try:
        code = main(["train", str(task), *arguments])
    except SystemExit as left:
        code = int(left.code or 0)
    assert code == 2
    error = capfd.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_written_over(launcher: WarmLauncher, task: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    warm_rung(launcher, tmp_path, "train", str(task), "--steps", "1", "--out", str(folder))
    done = warm_rung(launcher, tmp_path, "train", str(task), "--steps", "1", "--out", str(folder), check=False)
    assert done.code == 2
    assert "holds a run already" in (tmp_path / "errors").read_text()


def test_slow_half_precision_is_told_before_the_first_step(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rung.launch import half_precision
    from rung.spec.config import RunConfig

    monkeypatch.setattr(
        half_precision, "_product_seconds", lambda dtype, size=160: 1.0 if dtype.itemsize == 4 else 283.0
    )
    warning = half_precision.half_precision_warning(RunConfig(precision="bf16", device="cpu"))
    assert warning is not None and "283 times" in warning
    assert half_precision.half_precision_warning(RunConfig(precision="fp32")) is None


@pytest.mark.parametrize("command", [[], ["train"], ["verify"], ["new"]])
def test_help_fits_a_screen(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 68
    assert max(map(len, lines)) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("rung 0.")


SESSION = """
import torch, rung
task = rung.Task(
    model=lambda: torch.nn.Linear(4, 2, dtype=torch.float64),
    train_data=lambda: [],
    loss=lambda output, target: torch.nn.functional.mse_loss(output, target),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)
with rung.open_session(task, strategy=STRATEGY, precision="fp64", device="cpu", micro_batch=2) as session:
    g = torch.Generator().manual_seed(0)
    for _ in range(4):
        batch = torch.randn(7, 4, generator=g), torch.randn(7, 2, generator=g)
        stats = session.step(batch)
    if session.world.is_main:
        print("LOSS", float(stats.loss), stats.step, stats.num_samples, float(stats.grad_norm))
"""


def test_a_loop_of_one_s_own_under_torchrun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(SESSION.replace("STRATEGY", "'single'"), {})
    alone = capsys.readouterr().out
    script = tmp_path / "zero3.py"
    script.write_text(SESSION.replace("STRATEGY", "'zero3'"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = [
        [float(word) for word in line.split()[1:]]
        for line in (alone + done.stdout).splitlines()
        if line.startswith("LOSS")
    ]
    assert outcomes[0] == pytest.approx(outcomes[1], abs=1e-12)
    assert outcomes[0][1:3] == [4, 7]


def test_the_readme_s_support_table_is_made_from_the_matrix() -> None:
    from tests.matrix import support_table

    readme = (EXAMPLES.parent / "README.md").read_text()
    table = readme.partition("<!-- support table: made from tests/matrix.py -->")[2].partition(
        "<!-- end of support table -->"
    )[0]
    assert table.strip() == support_table()


@pytest.mark.parametrize("name", ["babycnn", "gpt"])
def test_examples_import_torch_only(name: str) -> None:
    import ast

    tree = ast.parse((EXAMPLES / name / "task.py").read_text())
    imported = {alias.name.split(".")[0] for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module).split(".")[0] for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert imported <= {"torch", *sys.stdlib_module_names}
