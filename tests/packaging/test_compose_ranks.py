"""The services of compose.yaml, run from the file: workers are killed and added while they train."""

from __future__ import annotations

import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.faults.hosts import Hosts
from tests.launch.submit.test_kubernetes_ranks import assert_trained, hosts, hurry, known, task, wait_for_nap, worlds  # noqa: F401
from tests.marks import slow
from tests.pods import Cluster, Pod, PodPlan, can_run_pods

pytestmark = pytest.mark.skipif(not can_run_pods(), reason="containers need network namespaces, and so root")
ROOT = Path(__file__).parent.parent.parent
CHOSEN = {"RUNG_RUN": "run", "RUNG_TASK": "./small", "RUNG_RDZV_KEY": secrets.token_hex(32)}


def container_of(service: dict[str, Any], name: str, known_as: str | None) -> PodPlan:
    """A service as the containers that are run here are described. The image's entry and user are the Dockerfile's."""

    def fill_in(text: str) -> str:
        return re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda found: CHOSEN.get(found[1], found[2]), text)

    file = (ROOT / "Dockerfile").read_text()
    (entry,), (user,) = (
        set(re.findall(r'^ENTRYPOINT \["(\w+)"\]', file, re.M)),
        set(re.findall(r"^USER (\d+)", file, re.M)),
    )
    mounts, volumes = [], []
    for number, text in enumerate(service.get("volumes", [])):
        source, place, *_ = fill_in(text).split(":")
        mounts.append({"name": str(number), "mountPath": place})
        volumes.append({"name": str(number), "persistentVolumeClaim": {"claimName": Path(source).name}})
    for place in service["tmpfs"]:
        mounts.append({"name": place, "mountPath": place})
        volumes.append({"name": place, "emptyDir": {}})
    container = {
        "command": [entry],
        "args": [fill_in(word) for word in service["command"]],
        "env": [{"name": key, "value": fill_in(value)} for key, value in service.get("environment", {}).items()],
        "volumeMounts": mounts,
        "securityContext": {"readOnlyRootFilesystem": service["read_only"]},
    }
    rights = {"runAsUser": int(user)}
    return PodPlan(name, known_as, {"containers": [container], "volumes": volumes, "securityContext": rights}, {})


@pytest.mark.parametrize("loses", [False, slow(True)], ids=["all stay", "one is killed, and one comes"])
def test_the_services_train(
    tmp_path: Path,
    task: Path,  # noqa: F811
    known: dict[str, torch.Tensor],  # noqa: F811
    hosts: Hosts,  # noqa: F811
    loses: bool,
) -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    with Cluster(tmp_path, [], hosts) as cluster:
        shutil.copytree(task, cluster.claim("small"), dirs_exist_ok=True)
        # A setting of the task in place of a flag: the steps wait until the test has done what it does to them.
        path = cluster.claim("small") / "task.py"
        path.write_text(
            path.read_text().replace("nap=0.0", "nap=2.00")
        )  # of another size: Python compares size and second
        rendezvous = cluster.start(container_of(services["rendezvous"], "rung-rendezvous-1", "rendezvous"))
        workers = [_start(cluster, services, number) for number in range(services["worker"]["deploy"]["replicas"])]
        cluster.wait(lambda: 3 in worlds(cluster), "three workers")
        wait_for_nap(cluster)
        if loses:
            workers[1].kill()
            cluster.wait(lambda: worlds(cluster)[-1] == 2, "two workers")
            workers[1] = _start(cluster, services, 3)
            cluster.wait(lambda: worlds(cluster)[-1] == 3, "three workers again")
        hurry(cluster)
        cluster.wait(lambda: None not in [pod.exit_code() for pod in [*workers, rendezvous]], "the end")
        assert [pod.exit_code() for pod in [*workers, rendezvous]] == [0, 0, 0, 0], cluster.output()
        assert_trained(cluster, known)


def _start(cluster: Cluster, services: dict[str, Any], number: int) -> Pod:
    return cluster.start(container_of(services["worker"], f"rung-worker-{number + 1}", None))
