"""What is measured: the jobs, how many processes take part in them, and how long a block of steps is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rung.spec.task import Task, load_task

_TASKS = Path(__file__).parent / "tasks"
_EXAMPLES = Path(__file__).parents[1] / "examples"

_TEXT = {
    "model.context": 1024,
    "model.vocabulary": 50304,
    "train_data.context": 1024,
    "train_data.vocabulary": 50304,
    "train_data.stride": 128,
}
_GPT_124M = {"model.layers": 12, "model.width": 768, "model.heads": 12, **_TEXT}
_GPT_1_3B = {"model.layers": 24, "model.width": 2048, "model.heads": 16, **_TEXT}


@dataclass(frozen=True)
class Case:
    """One training job. Every contender does this one, and nothing else."""

    name: str
    task: str  # a file of benchmarks/tasks, or the folder of an example
    device: str
    batch_size: int  # over all ranks
    steps: int  # in one timed block
    num_ranks: int = 1
    strategy: str = "single"  # `single` has no process group; `ddp` has one, even for one rank
    arguments: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    compile: bool = False
    clip: float | None = 1.0
    memory_format: str = "contiguous"
    batch_norm: str = "sync"  # Rung's setting; the others' batch norms see one rank's part of the batch
    workers: int = 0  # data-loading processes of each rank
    seed: int = 0
    threads: int | None = None  # of each rank; by default the cores, shared out
    only_on_request: bool = False

    @property
    def rank_batch_size(self) -> int:
        return self.batch_size // self.num_ranks

    @property
    def is_distributed(self) -> bool:
        return self.strategy != "single"

    @property
    def is_ddp_of_one(self) -> bool:
        return self.is_distributed and self.num_ranks == 1

    def load_task(self) -> Task:
        """The functions that make model, data, loss and optimizer. Loaded anew at each call, so nothing is shared.

        Without a schedule: steps are taken for as long as it takes, so it would have no length.
        """
        file = _TASKS / f"{self.task}.py"
        task = load_task(file if file.exists() else _EXAMPLES / self.task)
        return replace(task.bind(self.arguments), schedule=None)

    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key not in ("threads", "only_on_request")}


def _cpu_cases() -> list[Case]:
    short = {"model.context": 64, "train_data.context": 64}
    gpt = Case("gpt", "gpt", "cpu", batch_size=8, steps=20, arguments=short)
    # One thread: a second would have nothing to do but wait, and it is the loop that is looked at.
    mlp = Case("mlp", "mlp", "cpu", batch_size=32, steps=500, threads=1)
    cases = []
    for case in (gpt, mlp):
        cases.append(case)
        cases.append(replace(case, name=f"{case.name}-ddp1", strategy="ddp", only_on_request=True))
        cases.append(replace(case, name=f"{case.name}-ddp2", strategy="ddp", num_ranks=2))
    cnn = Case("cnn-ddp2", "cnn", "cpu", batch_size=64, steps=20, num_ranks=2, strategy="ddp", threads=1)
    cnn = replace(cnn, only_on_request=True)
    return [*cases, cnn, replace(cnn, name="cnn-ddp2-local", batch_norm="local")]


def _cuda_cases() -> list[Case]:
    gpt = Case("gpt124m", "gpt", "cuda", batch_size=32, steps=30, arguments=_GPT_124M, precision="bf16")
    large = replace(gpt, name="gpt1.3b", batch_size=16, steps=20, arguments=_GPT_1_3B, only_on_request=True)
    return [gpt, replace(gpt, name="gpt124m-ddp1", strategy="ddp", only_on_request=True), large]


def find_cases(device: str, compile_choices: list[bool]) -> list[Case]:
    """All cases of a device, each with and without compile as asked for."""
    cases = _cpu_cases() if device == "cpu" else _cuda_cases()
    return [
        replace(case, name=f"{case.name}-compile", compile=True) if compiled else case
        for case in cases
        for compiled in compile_choices
    ]
