"""A cluster of our own making: runs the pods of manifests as Kubernetes would, each on a machine of its own.

A pod has its own network address, name, processes and file system, runs as the user of its manifest, and finds the
others by names that are known only while a pod is there. When one ends, the manifest says whether another takes its
place. Images are not pulled: programs are those of this machine. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rung
from tests.faults.hosts import Hosts, possible

_LIMIT = 240.0
_PORT_OF_TRAINER = 29400
# The file system of a container: this machine's, and over it what belongs to the pod alone.
_ENTER = """
set -e
mount --make-rprivate /
mount -t tmpfs none {root}
for place in /*; do
  if [ -L $place ]; then cp -P $place {root}$place
  elif [ -d $place ]; then
    mkdir -p {root}$place
    case $place in /proc|/tmp|/root|/home) ;; *) mount --rbind $place {root}$place;; esac
  fi
done
mount -t proc proc {root}/proc
{mounts}
{programs}
mount --bind {hosts} {root}/etc/hosts
{seal}
hostname {name}
exec chroot {root} {rights} env -i {environment} {command}
"""
# Everything that is there before volumes are mounted: devices can be written to all the same.
_SEAL = """
mount -o remount,bind,ro {root}
for place in /*; do
  if [ -d $place ] && [ ! -L $place ]; then
    case $place in /proc|/tmp|/root|/home) ;; *) mount -o remount,bind,ro {root}$place;; esac
  fi
done
"""


def can_run_pods() -> bool:
    return possible() and all(shutil.which(tool) for tool in ("unshare", "chroot", "setpriv", "hostname"))


@dataclass(frozen=True)
class PodPlan:
    """A pod before it runs."""

    name: str
    known_as: str | None  # how others find it
    spec: Mapping[str, Any]
    environment: Mapping[str, str]  # what Kubernetes adds


@dataclass(frozen=True)
class JobPlan:
    """A Job before it runs."""

    name: str
    spec: Mapping[str, Any]
    subdomain: str | None
    is_target: bool = True  # whether it is the training, and not what serves it

    def pod(self, index: int) -> PodPlan:
        told = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        name = f"{self.name}-{index}"
        known_as = f"{name}.{self.subdomain}" if self.subdomain is not None else None
        return PodPlan(name, known_as, self.spec["template"]["spec"], told)


def jobs_of(manifests: list[dict[str, Any]]) -> list[JobPlan]:
    """The Jobs that controllers make of manifests."""
    found = []
    for manifest in manifests:
        name, spec = manifest["metadata"]["name"], manifest.get("spec", {})
        if manifest["kind"] == "Job":
            subdomain = spec["template"]["spec"].get("subdomain")
            found.append(JobPlan(name, spec, subdomain, is_target=not name.endswith("-rendezvous")))
        elif manifest["kind"] == "JobSet":
            targets = spec["successPolicy"]["targetReplicatedJobs"]
            for job in spec["replicatedJobs"]:
                plan = JobPlan(f"{name}-{job['name']}-0", job["template"]["spec"], name, job["name"] in targets)
                found.append(plan)
        elif manifest["kind"] == "TrainJob":
            found.append(_train_job(name, spec))
    return found


def _train_job(name: str, spec: Mapping[str, Any]) -> JobPlan:
    """What Kubeflow's torch runtime makes of a TrainJob: a JobSet with one Job, `node`, whose pods get PET_*."""
    trainer, (patch,) = spec["trainer"], spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    told = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": str(_PORT_OF_TRAINER),
    }
    env = [*trainer["env"], *({"name": key, "value": value} for key, value in told.items())]
    # The runtime asks for the pod's index by a reference to its annotation.
    env.append({"name": "PET_NODE_RANK", "value": "$(JOB_COMPLETION_INDEX)"})
    container = {**pod["containers"][0], "command": trainer["command"], "args": trainer["args"], "env": env}
    template = {"spec": {**pod, "containers": [container]}}
    count = trainer["numNodes"]
    return JobPlan(f"{name}-node-0", {"completions": count, "parallelism": count, "template": template}, name)


class Pod:
    """A running one."""

    def __init__(self, plan: PodPlan, prefix: list[str], folder: Path, script: str) -> None:
        self.plan = plan
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{plan.name}.log"
        with self._log.open("ab") as log:
            # The first process inside is the container's own: it gets the signals, and all others end with it.
            command = [*prefix, "unshare", "--mount", "--uts", "--pid", "--fork", "sh", "-c", script]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def exit_code(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        """As the kubelet asks it to leave."""
        for pid in self._children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def kill(self) -> None:
        """The first process of the container, and with it all others."""
        while self._process.poll() is None:
            for pid in self._children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _children(self) -> list[int]:
        pid = self._process.pid
        with contextlib.suppress(OSError):
            return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []


class Cluster:
    """Machines, volumes and files on which pods run. Use as a context manager."""

    def __init__(self, folder: Path, manifests: list[dict[str, Any]], hosts: Hosts) -> None:
        self._folder, self._hosts = folder, hosts
        self._maps = {m["metadata"]["name"]: m["data"] for m in manifests if m["kind"] == "ConfigMap"}
        self._secrets = {m["metadata"]["name"]: m["stringData"] for m in manifests if m["kind"] == "Secret"}
        self._names: dict[str, str] = {}
        self._file = folder / "hosts"
        self._file.write_text("127.0.0.1 localhost\n")
        self._next_host = 0
        self.pending: set[str] = set()  # pods for which there is no machine yet
        self.pods: dict[str, Pod] = {}
        self.jobs = [_Job(plan, self) for plan in jobs_of(manifests)]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods.values():
            pod.kill()

    def claim(self, name: str) -> Path:
        """The folder that a claim is here."""
        folder = self._folder / "claims" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start(self, plan: PodPlan) -> Pod:
        """On a machine of its own, with another address than any pod had before."""
        number, self._next_host = self._next_host, self._next_host + 1
        root = self._folder / "roots" / f"{number}"
        root.mkdir(parents=True)
        if plan.known_as is not None:
            self._names[plan.known_as] = self._hosts.address(number)
            self._publish()
        pod = Pod(plan, self._hosts.prefix(number), self._folder / "logs", self._script(plan, root))
        self.pods[plan.name] = pod
        return pod

    def forget(self, plan: PodPlan) -> None:
        if plan.known_as is not None:
            self._names.pop(plan.known_as, None)
            self._publish()

    def step(self) -> bool:
        """What controllers do now and then. Whether the training is over."""
        for job in self.jobs:
            job.look()
        return all(job.is_over for job in self.jobs if job.plan.is_target)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + _LIMIT
        while not condition():
            self.step()
            assert time.monotonic() < deadline, f"waited in vain for {what}:\n{self.output()}"
            time.sleep(0.05)

    def output(self) -> str:
        return "\n".join(f"== {name}\n{pod.output()[-1500:]}" for name, pod in self.pods.items())

    def _publish(self) -> None:
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._names.items())]
        self._file.write_text("\n".join(lines) + "\n")  # in place: containers have this very file

    def _script(self, plan: PodPlan, root: Path) -> str:
        (container,) = plan.spec["containers"]
        user = plan.spec["securityContext"]["runAsUser"]
        environment = {"PATH": f"{_programs()}:/usr/bin:/bin", "HOME": "/nowhere", "OMP_NUM_THREADS": "1"}
        environment |= {"HOSTNAME": plan.name, **plan.environment}
        for variable in container.get("env", []):
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                value = self._secrets[reference["name"]][reference["key"]]
            else:
                value = expand(variable["value"], environment)
            environment[variable["name"]] = value
        words = [expand(word, environment) for word in [*container["command"], *container["args"]]]
        is_sealed = container.get("securityContext", {}).get("readOnlyRootFilesystem", False)
        rights = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups", "--no-new-privs"]
        return _ENTER.format(
            root=root,
            hosts=self._file,
            name=plan.name,
            mounts="\n".join(self._mounts(plan, container, root, user)),
            programs="\n".join(_programs_at_home(root)),
            rights=shlex.join(rights),
            environment=shlex.join(f"{key}={value}" for key, value in environment.items()),
            command=shlex.join(words),
            seal=_SEAL.format(root=root) if is_sealed else "",
        )

    def _mounts(self, plan: PodPlan, container: Mapping[str, Any], root: Path, user: int) -> list[str]:
        lines = []
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem", False):
            lines.append(f"mount -t tmpfs -o mode=1777 none {shlex.quote(f'{root}/tmp')}")  # as an image has it
        volumes = {volume["name"]: volume for volume in plan.spec.get("volumes", [])}
        for mount in container.get("volumeMounts", []):
            volume, place = volumes[mount["name"]], shlex.quote(f"{root}{mount['mountPath']}")
            lines.append(f"mkdir -p {place}")
            if "persistentVolumeClaim" in volume:
                folder = self.claim(volume["persistentVolumeClaim"]["claimName"])
                os.chown(folder, user, user)
                lines.append(f"mount --bind {shlex.quote(str(folder))} {place}")
            elif "emptyDir" in volume:
                lines.append(f"mount -t tmpfs -o mode=1777 none {place}")
            else:
                lines.append(f"mount --bind -o ro {shlex.quote(str(self._map(volume['configMap'])))} {place}")
        return lines

    def _map(self, volume: Mapping[str, Any]) -> Path:
        folder = self._folder / "maps" / volume["name"]
        for item in volume["items"]:
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._maps[volume["name"]][item["key"]])
        return folder


def expand(text: str, environment: Mapping[str, str]) -> str:
    """What the kubelet makes of an argument or a variable: $(NAME) is a variable's value if there is one, $$ is $."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


class _Job:
    """The controller of an Indexed Job: replaces pods, counts failures, and knows when it is over."""

    def __init__(self, plan: JobPlan, cluster: Cluster) -> None:
        self.plan, self._cluster = plan, cluster
        self.failures: dict[int, int] = {}
        self.codes: dict[int, list[int]] = {index: [] for index in range(plan.spec["completions"])}
        self._running: dict[int, Pod] = {}
        self._succeeded: set[int] = set()
        self.is_over = self.has_failed = False

    def look(self) -> None:
        if self.is_over:
            return
        for index in self.codes:
            if index in self._succeeded:
                continue
            if index not in self._running:
                if self.plan.pod(index).name not in self._cluster.pending:
                    self._running[index] = self._cluster.start(self.plan.pod(index))
            elif (code := self._running[index].exit_code()) is not None:
                self._cluster.forget(self._running.pop(index).plan)
                self._judge(index, code)
        rules = self.plan.spec.get("successPolicy", {}).get("rules", [])
        wanted = min([len(self.codes), *(rule["succeededCount"] for rule in rules)])
        if self.has_failed or len(self._succeeded) >= wanted:
            self.is_over = True
            for pod in self._running.values():
                pod.terminate()

    def _judge(self, index: int, code: int) -> None:
        self.codes[index].append(code)
        if code == 0:
            self._succeeded.add(index)
            return
        action = "Count"
        for rule in self.plan.spec.get("podFailurePolicy", {}).get("rules", []):
            if code in rule.get("onExitCodes", {}).get("values", []):
                action = rule["action"]
                break
        if action == "FailJob":
            self.has_failed = True
        elif action == "Count":
            self.failures[index] = self.failures.get(index, 0) + 1
            limit = self.plan.spec.get("backoffLimitPerIndex", self.plan.spec.get("backoffLimit", 6))
            self.has_failed = self.has_failed or self.failures[index] > limit


def _programs_at_home(root: Path) -> list[str]:
    """Home directories and /tmp are no part of a container, but for programs that lie there."""
    lines = []
    for path in dict.fromkeys([sys.prefix, sys.base_prefix, str(Path(rung.__file__).parents[2])]):
        if any(Path(path).is_relative_to(place) for place in ("/root", "/home", "/tmp")):
            place = shlex.quote(f"{root}{path}")
            lines.append(f"mkdir -p {place} && mount --rbind {shlex.quote(path)} {place}")
    return lines


def _programs() -> str:
    return sysconfig.get_path("scripts")
