"""The pods of `rung submit k8s`, run from the rendered manifests: they find each other, train and survive."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import rung
from rung.cli.main import main
from rung.errors import RESUME_EXIT_CODE
from tests.faults.hosts import Hosts
from tests.marks import slow
from tests.metrics_file import committed
from tests.pods import Cluster, can_run_pods

pytestmark = pytest.mark.skipif(not can_run_pods(), reason="pods need network namespaces, and so root")

NUM_STEPS = 60
TASK = """
import os, pathlib, time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import shapes

defaults = {"batch_size": 12, "steps": 60, "log_every": 1, "precision": "fp64", "eval_every": "never"}
calls = []  # of this process


class Net(nn.Module):
    def __init__(self, nap):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, shapes.WIDTH), nn.Tanh(), nn.Linear(shapes.WIDTH, 4))
        self.nap = nap

    def forward(self, x):
        # Neither the check before the first step waits, which calls the model twice, nor the first few steps: a job is
        # soon where a test wants it, and then cannot end before the test has done what it does to it.
        calls.append(1)
        naps = self.nap > 0 and len(calls) > 5
        if naps and os.environ.get("RANK", "0") == "0":
            pathlib.Path("/runs/naps").touch()
        until = time.monotonic() + (self.nap if naps else 0)
        while time.monotonic() < until and not pathlib.Path("/runs/go").exists():
            time.sleep(0.02)
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
    file = tmp_path_factory.mktemp("one") / "model.safetensors"
    with rung.open_session(task, strategy="single") as session:
        for window in itertools.islice(session.batches(), NUM_STEPS):
            session.step(window)
        session.save(file)
    return dict(load_file(file))


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
    assert steps == list(range(1, NUM_STEPS + 1))


def rows_of(cluster: Cluster) -> list[dict[str, Any]]:
    path = cluster.claim("runs") / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def step_of(cluster: Cluster) -> int:
    return max((row["step"] for row in rows_of(cluster) if row["event"] == "step"), default=0)


def worlds(cluster: Cluster) -> list[int]:
    """How many ranks took part, from one start to the next."""
    return [row["ranks"] for row in rows_of(cluster) if row["event"] in ("start", "resume")]


def wait_for_nap(cluster: Cluster) -> None:
    """Until rank 0 waits in a step. Killed earlier, it could take the line of a step along that counts."""
    path = cluster.claim("runs") / "naps"
    path.unlink(missing_ok=True)
    cluster.wait(path.exists, "a step that waits")


def hurry(cluster: Cluster) -> None:
    """The steps need not wait any longer for what a test does to them."""
    (cluster.claim("runs") / "go").touch()


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        ("job", "ddp"),
        slow("jobset", "fsdp"),
        slow("trainjob", "pp2"),
    ],
)
def test_two_pods_train_what_one_process_does(
    tmp_path: Path, task: Path, known: dict[str, torch.Tensor], hosts: Hosts, form: str, strategy: str
) -> None:
    """The second waits for the first, which has no node yet."""
    manifests = render(task, "--form", form, "--nodes", "2", "--strategy", strategy, "--checkpoint-every", "10")
    with Cluster(tmp_path, manifests, hosts) as cluster:
        cluster.pending.add(cluster.jobs[0].plan.pod(0).name)
        cluster.wait(lambda: "waiting for its pod" in cluster.output(), "a pod that waits")
        cluster.pending.clear()
        cluster.wait(cluster.step, "the end")
        assert [job.codes for job in cluster.jobs] == [{0: [0], 1: [0]}], cluster.output()
        assert_trained(cluster, known)


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
def test_a_pod_writes_to_its_own_places_alone(tmp_path: Path, task: Path, hosts: Hosts, form: str) -> None:
    """With the key of the job in its environment. Arguments are those of the kubelet: $(HOME) would be a variable."""
    manifests = render(task, "--form", form, "--nodes", "2")
    script = (
        "for place in / /opt /usr/lib /etc /var; do touch $place/x 2>&1 | grep -c 'Read-only file system'; done; "
        "touch $HOME/x /tmp/y /dev/shm/x /runs/x && mkdir -p ~/.cache/a && echo ${#RUNG_RDZV_KEY} '$$(HOME)'"
    )
    with Cluster(tmp_path, manifests, hosts) as cluster:
        plan = cluster.jobs[0].plan.pod(0)
        container = {**plan.spec["containers"][0], "command": ["sh", "-c"], "args": [script]}
        pod = cluster.start(replace(plan, spec={**plan.spec, "containers": [container]}))
        deadline = time.monotonic() + 60
        while pod.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert pod.output().split() == ["1"] * 5 + ["64", "$(HOME)"]


def test_a_pod_that_had_to_leave_or_was_killed_is_replaced_and_goes_on(
    tmp_path: Path, task: Path, known: dict[str, torch.Tensor], hosts: Hosts
) -> None:
    """The successor of one that was killed has the same name, and its first process the same number: it is another one
    all the same."""
    manifests = render(task, "--strategy", "single", "--set", "model.nap=2", "--checkpoint-every", "2")
    with Cluster(tmp_path, manifests, hosts) as cluster:
        cluster.wait(lambda: step_of(cluster) >= 2, "step 2")
        cluster.pods["small-0"].terminate()
        cluster.wait(lambda: step_of(cluster) >= 4 and len(worlds(cluster)) == 2, "step 4 of the second pod")
        wait_for_nap(cluster)
        cluster.pods["small-0"].kill()
        hurry(cluster)
        cluster.wait(cluster.step, "the end")
        first, _, last = cluster.jobs[0].codes[0]
        assert (first, last) == (RESUME_EXIT_CODE, 0), cluster.output()
        assert_trained(cluster, known)


@pytest.mark.parametrize("lost", ["small-0", slow("small-1")])
def test_a_fixed_number_of_pods_survives_the_loss_of_one(
    tmp_path: Path, task: Path, known: dict[str, torch.Tensor], hosts: Hosts, lost: str
) -> None:
    """Also of the one where they meet: the others find its successor by the same name."""
    manifests = render(task, "--nodes", "2", "--set", "model.nap=2", "--checkpoint-every", "2")
    with Cluster(tmp_path, manifests, hosts) as cluster:
        cluster.wait(lambda: step_of(cluster) >= 3, "step 3")
        wait_for_nap(cluster)
        cluster.pods[lost].kill()
        hurry(cluster)
        cluster.wait(cluster.step, "the end")
        assert not cluster.jobs[0].has_failed, cluster.output()
        assert_trained(cluster, known)


@pytest.mark.parametrize("form", ["job", slow("jobset")])
def test_an_elastic_job_goes_on_while_pods_come_and_go(
    tmp_path: Path, task: Path, known: dict[str, torch.Tensor], hosts: Hosts, form: str
) -> None:
    """One pod comes late, one is killed, and the one where they meet has to leave; those that replace them join."""
    name = "small-workers-0" if form == "jobset" else "small"
    wanted = ("--nodes", "1:2", "--form", form, "--set", "model.nap=2", "--checkpoint-every", "2")
    with Cluster(tmp_path, render(task, *wanted), hosts) as cluster:
        rendezvous, workers = cluster.jobs
        cluster.pending.add(f"{name}-1")
        cluster.wait(lambda: step_of(cluster) >= 2, "step 2")
        cluster.pending.clear()
        cluster.wait(lambda: 2 in worlds(cluster), "two pods")
        before = len(worlds(cluster))
        wait_for_nap(cluster)
        cluster.pods[f"{name}-0"].kill()
        cluster.wait(lambda: 2 in worlds(cluster)[before:], "two pods again")
        cluster.pods[rendezvous.plan.pod(0).name].terminate()
        hurry(cluster)
        cluster.wait(cluster.step, "the end")
        assert workers.failures == {0: 1} and not workers.has_failed, cluster.output()
        assert_trained(cluster, known)
        cluster.wait(lambda: rendezvous.is_over, "the end of the meeting place")
        assert rendezvous.codes == {0: [RESUME_EXIT_CODE, 0]}
