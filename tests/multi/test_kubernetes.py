"""The pods of `rung submit k8s`, run from the rendered manifests: they find each other, train and survive."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rung.cli import main
from rung.metrics import committed
from tests.faults.hosts import Hosts
from tests.pods import Cluster, can_run_pods

pytestmark = pytest.mark.skipif(not can_run_pods(), reason="pods need network namespaces, and so root")

TASK = """
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shapes

defaults = {"batch_size": 12, "steps": 24, "log_every": 1, "precision": "fp64", "eval_every": "never"}


class Net(nn.Module):
    def __init__(self, nap):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, shapes.WIDTH), nn.Tanh(), nn.Linear(shapes.WIDTH, 4))
        self.nap = nap

    def forward(self, x):
        time.sleep(self.nap)
        return self.layers(x)


def model(nap=0.0):
    return Net(nap)


def train_data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(103, 4, generator=g), torch.randn(103, 4, generator=g))


def loss(output, target):
    return ((output - target) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task with a module beside it, which must go along."""
    folder = tmp_path_factory.mktemp("tasks") / "small"
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "shapes.py").write_text("WIDTH = 6\n")
    return folder


@pytest.fixture(scope="module")
def known(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert main(["train", str(task), "--strategy", "single", "--out", str(out)]) == 0
    return dict(load_file(out / "model.safetensors"))


def render(task: Path, *arguments: str) -> list[dict[str, Any]]:
    """What the command prints."""
    words = ["submit", "k8s", str(task), "--dry-run", "--image", "rung", "--volume", "runs:/runs", "--out", "/runs/run"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*words, "--name", "small", *arguments]) == 0
    return list(yaml.safe_load_all(printed.getvalue()))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(6) as made:
        yield made


def assert_trained(cluster: Cluster, known: dict[str, torch.Tensor]) -> None:
    run = cluster.claim("runs") / "run"
    weights = load_file(run / "model.safetensors")
    assert weights.keys() == known.keys()
    for name, value in known.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)
    steps = [row["step"] for row in committed(run / "metrics.jsonl") if row["event"] == "step"]
    assert steps == list(range(1, 25))


def step_of(cluster: Cluster) -> int:
    path = cluster.claim("runs") / "run" / "metrics.jsonl"
    rows = committed(path) if path.exists() else []
    return max((row["step"] for row in rows if row["event"] == "step"), default=0)


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        ("job", "ddp"),
        pytest.param("jobset", "fsdp", marks=pytest.mark.slow),
        pytest.param("trainjob", "pp2", marks=pytest.mark.slow),
    ],
)
def test_two_pods_train_what_one_process_does(
    tmp_path: Path, task: Path, known: dict[str, torch.Tensor], hosts: Hosts, form: str, strategy: str
) -> None:
    manifests = render(task, "--form", form, "--nodes", "2", "--strategy", strategy, "--checkpoint-every", "10")
    with Cluster(tmp_path, manifests, hosts) as cluster:
        cluster.wait(cluster.step, "the end")
        assert [job.codes for job in cluster.jobs] == [{0: [0], 1: [0]}], cluster.output()
        assert_trained(cluster, known)
