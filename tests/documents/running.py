"""Which commands of the documents are run and which are not, their exit codes, and what placeholders stand for."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from functools import cache

from rung.spec.template import TEMPLATE
from tests.documents.pages import Command, blocks, commands, page_names
from tests.faults import hosts

# Commands that are not run, and why. `test_blocks.py` holds that each row is still needed; all of them are parsed.
EXCEPTED = {
    r"^make (test|test-all|lint)$": "runs the tests, of which this is one",
    r"^make (bench|bench-[\w-]+|chaos|ladder)\b": "a benchmark: up to an hour, and needs an idle machine",
    r"^python -m benchmarks\.": "a benchmark: minutes to an hour, and some need a GPU",
    r"^(\S*/)?pip install": "installs into the reader's environment; the Makefile installs the same extras",
    r"^pre-commit install": "writes a hook into the reader's repository",
    r"^(?!rung (explain|plan|submit)).*--nproc(-per-node)? 8\b": "8 processes a machine",
    r"--config examples/imagenet/resnet50.toml": "90 epochs of ImageNet on GPUs",
    r"task.py --set train_data.root=IMAGES": "a directory of images; tests/examples/test_imagenet.py writes one",
    r"^rung train .*length=131072": "a sequence for a GPU",
    r"--sizes 1M:1G:2": "messages of a gigabyte among four processes",
    r"^rung submit k8s (?!.*--dry-run)": "needs a cluster; tests/launch/submit/test_kubernetes_ranks.py runs the pods",
    r"^kubectl ": "needs a cluster",
    r"^rung .*s3://": "needs a store; tests/checkpoint/test_stores_ranks.py has a server of S3",
    r"^srun ": "needs Slurm; tests/launch/submit/test_slurm_ranks.py has one of its own",
    r"^torchrun --nnodes 2": "torchrun knows its own machine by its name, which network namespaces share",
    r"^mpirun .*--host ": "mpirun starts processes on other machines by ssh",
    r"^docker ": "needs a Docker engine; tests/packaging/test_compose_ranks.py runs the services",
    r"^rung submit slurm (?!.*--dry-run)": "needs a cluster; tests/launch/submit/test_slurm_ranks.py has one",
}
# Those that are to end otherwise than with 0, as their page shows, and what they end with.
EXPECTED = {
    ("docs/elastic.md", "rung train task.py --strategy fdsp"): 2,
    ("docs/elastic.md", "rung train broken/task.py --nproc 2"): 1,
    ("docs/ladder.md", "wait $!"): 75,
    ("docs/start.md", "wait $!"): 137,
}
# These serve until somebody ends them.
SERVES = r"^(tensorboard|rung rdzv)\b"
# The tasks of the examples are trained for as long as it takes to see that the command is right, and no longer.
SHORTENED = {
    "examples/gpt/task.py": ('"steps": 400', '"steps": 20'),
    "examples/long_context/task.py": ('"steps": 150', '"steps": 2'),
    "examples/packed/task.py": ('"steps": 100', '"steps": 2'),
    "examples/gan/task.py": ('"steps": 1000, "eval_every": 200', '"steps": 4, "eval_every": 4'),
    "examples/moe/task.py": ('"steps": 200', '"steps": 4'),
    "examples/huggingface/task.py": ('"steps": 300', '"steps": 6'),
    "examples/babycnn/task.py": ('"epochs": 12', '"epochs": 12, "steps": 30'),
    "examples/recommender/task.py": ('"epochs": 4', '"epochs": 4, "steps": 30'),
    "examples/imagenet/task.py": ('"epochs": 2', '"epochs": 2, "steps": 4'),
    "examples/vision/task.py": ('"epochs": 2', '"epochs": 2, "steps": 4'),
}
_BROKEN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

defaults = {"batch_size": 16}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and torch.distributed.get_rank() == 1:
            raise ValueError("the third batch of rank 1 is bad")
        return self.linear(x)


def model():
    return Model()


def train_data():
    return TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


def _held_tasks() -> dict[str, str]:
    """Tasks that are no files of the project: the reader's own, those that pages show, those that `rung new` makes."""
    found = {"task.py": TEMPLATE.format(path="task.py"), "broken/task.py": _BROKEN}
    for page in page_names():
        found.update({block.name: block.text for block in blocks(page) if block.kind == "file"})
        for command in commands(page):
            made = re.match(r"rung new (\S+)", command.text)
            if made:
                found[f"{made.group(1)}/task.py"] = TEMPLATE.format(path=f"{made.group(1)}/task.py")
    return found


HELD_TASKS = _held_tasks()
_FIXED = {"TASK": "examples/gpt/task.py", "NAME": "own"}


def fill_in(word: str, page: str) -> str:
    """What a placeholder stands for wherever it is used; others depend on what ran before."""
    return _FIXED.get(word, word)


@cache
def reason_not_to_run(command: Command) -> str | None:
    return next((why for pattern, why in EXCEPTED.items() if re.search(pattern, command.text)), None)


def lack_of_this_machine(command: Command) -> str | None:
    """What a command needs that others have and this machine has not."""
    if "mlflow" in command.text and importlib.util.find_spec("mlflow") is None:
        return "mlflow is not installed"
    if re.search(r"examples/vision|train huggingface/", command.text) and not _has_torchvision():
        return "torchvision cannot be imported beside this torch"
    if "--nnodes" in command.text and not hosts.possible():
        return "network namespaces need root"
    return None


@cache
def _has_torchvision() -> bool:
    """Asked of another process, because a failed import leaves its traces in this one."""
    return subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True).returncode == 0
