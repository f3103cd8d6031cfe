"""What the pods of a job are on Kubernetes: their container, volumes, limits and rights, and what their ends mean.

The forms that a job can have (`kubernetes.py`) put these parts together. Nothing here knows more of the cluster than
what its API's documentation says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rung.environment import KEY_VARIABLE
from rung.errors import RESUME_EXIT_CODE
from rung.submit.job import Job

PORT = 29400
TASK_FOLDER = "/task"
RENDEZVOUS = "rendezvous"
# Where every pod may write, though its root file system is read-only; also its home, for the caches of libraries.
SCRATCH = "/tmp"
# Beside what saving may take: to start the ranks' farewell, and to write the last lines.
_SPARE_SECONDS = 30
# The user of the image that the Dockerfile makes.
_USER = 1000
_MISTAKE_EXIT_CODE = 2
_GPU = "nvidia.com/gpu"
_DNS_PORT = 53


@dataclass(frozen=True)
class Cluster:
    """What is asked of the cluster, beside the job itself."""

    image: str
    volumes: tuple[tuple[str, str], ...]  # claims, and where they are mounted; runs lie in the first one
    form: str = "job"
    namespace: str | None = None
    cpus: str | None = None  # of each pod
    memory: str | None = None
    shm_size: str | None = None
    secrets: tuple[str, ...] = ()  # whose keys are variables of the environment
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[str, ...] = ()  # KEY[=VALUE][:EFFECT]
    labels: tuple[tuple[str, str], ...] = ()
    scratch: tuple[str, ...] = ()  # further paths that pods may write to
    egress: str = "any"  # what pods may reach: any, or those of the job alone
    backoff: int = 3  # how often each pod may fail
    runtime: str = "torch-distributed"  # of a TrainJob


def metadata(job: Job, cluster: Cluster, name: str) -> dict[str, Any]:
    """Names what belongs to a job, so that all of it can be listed and deleted together."""
    named: dict[str, Any] = {"name": name}
    if cluster.namespace is not None:
        named["namespace"] = cluster.namespace
    return {**named, "labels": {**dict(cluster.labels), **own_labels(job)}}


def own_labels(job: Job) -> dict[str, str]:
    return {"app.kubernetes.io/name": "rung", "app.kubernetes.io/instance": job.name}


def task_map(job: Job, cluster: Cluster, files: Mapping[str, str]) -> dict[str, Any]:
    """The task's files. Keys of a ConfigMap have no folders; where each file belongs is said where it is mounted."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, cluster, f"{job.name}-task"),
        "immutable": True,
        "data": {key_of(path): text for path, text in files.items()},
    }


def key_secret(job: Job, cluster: Cluster, key: str) -> dict[str, Any]:
    """The key by which the pods of a job know each other. Immutable: a pod that is replaced must get the same."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, cluster, f"{job.name}-key"),
        "immutable": True,
        "stringData": {KEY_VARIABLE: key},
    }


def network_policy(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Lets no pods in but those of the job. Of what they reach themselves, a training may need all: data, trackers."""
    own = [{"podSelector": {"matchLabels": own_labels(job)}}]
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": own_labels(job)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": own}],
    }
    if cluster.egress == "job":
        # Names are asked for at an address that differs between clusters, and may be one of the node.
        names = {"ports": [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]}
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": own}, names]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, cluster, job.name),
        "spec": spec,
    }


def service(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Gives each pod a name that stays when the pod is replaced, from its first moment on."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, cluster, job.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": own_labels(job),
            "ports": [{"name": RENDEZVOUS, "port": PORT}],
        },
    }


def worker_job(
    job: Job, cluster: Cluster, words: list[str], files: Mapping[str, str], subdomain: str | None
) -> dict[str, Any]:
    """The specification of the Job whose pods train, one for each node."""
    least, most = job.nodes
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        # A failure of the job is one of every pod: a limit for all together would be used up by the first one.
        "backoffLimitPerIndex": cluster.backoff,
        "maxFailedIndexes": most - least,
        "podFailurePolicy": pod_failure_policy(),
    }
    if least < most:
        # A pod ends well when the training has, whoever is still waiting for a node.
        spec["successPolicy"] = {"rules": [{"succeededCount": least}]}
    container = {
        "name": "rung",
        "image": cluster.image,
        "command": ["rung"],
        "args": [unexpanded(word) for word in words],
        **environment(job, cluster),
        **_some(resources=resources(job, cluster)),
        "securityContext": container_rights(),
        "volumeMounts": volume_mounts(cluster, files),
    }
    pod = {
        **_some(subdomain=subdomain),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds + _SPARE_SECONDS,
        **_account(cluster),
        "securityContext": pod_rights(),
        **placement(cluster),
        "containers": [container],
        "volumes": volumes(job, cluster, files),
    }
    return {**spec, "template": {"metadata": {"labels": {**dict(cluster.labels), **own_labels(job)}}, "spec": pod}}


def rendezvous_job(job: Job, cluster: Cluster, subdomain: str | None) -> dict[str, Any]:
    """The specification of the Job that keeps the meeting place of an elastic one, so that no pod is indispensable."""
    container = {
        "name": "rung",
        "image": cluster.image,
        "command": ["rung"],
        "args": ["rdzv", str(PORT), "--once"],
        "env": [*_variables({}), *_key_variable(job)],
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": container_rights(),
        "volumeMounts": [{"name": "scratch-0", "mountPath": SCRATCH}],
    }
    pod = {
        **_some(subdomain=subdomain),
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_pull_secrets(cluster),
        "securityContext": pod_rights(),
        "containers": [container],
        "volumes": [{"name": "scratch-0", "emptyDir": {}}],
    }
    return {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": cluster.backoff,
        "podFailurePolicy": pod_failure_policy(),
        "template": {"metadata": {"labels": {**dict(cluster.labels), **own_labels(job)}}, "spec": pod},
    }


def pod_failure_policy() -> dict[str, Any]:
    """A pod that had to go, or asks to be resumed, is replaced without being counted; a mistake is not tried again."""

    def on_exit(code: int, action: str) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": "rung", "operator": "In", "values": [code]}}

    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            on_exit(RESUME_EXIT_CODE, "Ignore"),
            on_exit(_MISTAKE_EXIT_CODE, "FailJob"),
        ]
    }


def environment(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Variables by value, and those that only the cluster's Secrets know."""
    secrets = [{"secretRef": {"name": name}} for name in cluster.secrets]
    return {"env": [*_variables(dict(job.environment)), *_key_variable(job)], **_some(envFrom=secrets)}


def _variables(further: Mapping[str, str]) -> list[dict[str, Any]]:
    pairs = {"PYTHONUNBUFFERED": "1", "HOME": SCRATCH, **further}
    return [{"name": name, "value": unexpanded(value)} for name, value in pairs.items()]


def _key_variable(job: Job) -> list[dict[str, Any]]:
    """One pod alone needs no key."""
    if job.nodes[1] == 1:
        return []
    return [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-key", "key": KEY_VARIABLE}}}]


def unexpanded(text: str) -> str:
    """A text that the kubelet gives a container as it is: $(NAME) in it would be a variable's value, and $$ a $."""
    return text.replace("$", "$$")


def resources(job: Job, cluster: Cluster) -> dict[str, Any]:
    """Memory and GPUs are what a pod may have, cores what it has at least: a limit would make it pause."""
    limits = _some(memory=cluster.memory)
    if job.gpus:
        limits[_GPU] = job.gpus
    requests = _some(cpu=cluster.cpus, memory=cluster.memory)
    return _some(requests=requests, limits=limits)


def volumes(job: Job, cluster: Cluster, files: Mapping[str, str]) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", **_some(sizeLimit=cluster.shm_size)}
    claims = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(cluster.volumes)
    ]
    task = {
        "name": "task",
        "configMap": {"name": f"{job.name}-task", "items": [{"key": key_of(path), "path": path} for path in files]},
    }
    scratch: list[dict[str, Any]] = [{"name": name, "emptyDir": {}} for name, _ in _scratch(cluster)]
    return [{"name": "shared-memory", "emptyDir": memory}, *scratch, *claims, *([task] if files else [])]


def volume_mounts(cluster: Cluster, files: Mapping[str, str]) -> list[dict[str, Any]]:
    claims = [{"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(cluster.volumes)]
    task = {"name": "task", "mountPath": TASK_FOLDER, "readOnly": True}
    scratch = [{"name": name, "mountPath": path} for name, path in _scratch(cluster)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *scratch, *claims, *([task] if files else [])]


def _scratch(cluster: Cluster) -> list[tuple[str, str]]:
    """Empty folders of a pod, and where they are mounted. A claim may take the place of one."""
    taken = [path for _, path in cluster.volumes]
    paths = [path for path in dict.fromkeys([SCRATCH, *cluster.scratch]) if path not in taken]
    return [(f"scratch-{number}", path) for number, path in enumerate(paths)]


def placement(cluster: Cluster) -> dict[str, Any]:
    """Which nodes the pods may run on."""
    return _some(
        nodeSelector=dict(cluster.node_selector), tolerations=[_toleration(text) for text in cluster.tolerations]
    )


def pod_rights() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_rights() -> dict[str, Any]:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def _account(cluster: Cluster) -> dict[str, Any]:
    """Training asks nothing of the cluster's API, so a pod gets no key to it unless somebody names an account."""
    named = _some(serviceAccountName=cluster.service_account)
    return {
        **(named or {"automountServiceAccountToken": False}),
        "enableServiceLinks": False,
        **_pull_secrets(cluster),
    }


def _pull_secrets(cluster: Cluster) -> dict[str, Any]:
    return _some(imagePullSecrets=[{"name": name} for name in cluster.pull_secrets])


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    told = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **told, **_some(effect=effect)}


def key_of(path: str) -> str:
    return "__".join(PurePosixPath(path).parts)


def _some(**values: Any) -> dict[str, Any]:
    """Those that are there."""
    return {name: value for name, value in values.items() if value}
