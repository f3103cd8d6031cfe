"""The parts of a job's manifests: containers, volumes, limits, permissions, and the policy for failed pods.

`forms.py` puts them together. Nothing here depends on a particular cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from rung.errors import RESUME_EXIT_CODE
from rung.launch.submit.job import SubmittedJob
from rung.system.launcher_env import KEY_VARIABLE

PORT = 29400
TASK_FOLDER = "/task"
RENDEZVOUS = "rendezvous"
# Writable in every pod, whose root file system is read-only; also HOME, for the caches of libraries.
SCRATCH = "/tmp"
# Added to the time that saving may take, for the ranks to exit and the launcher to write its last lines.
_SPARE_SECONDS = 30
_USER = 1000  # of the Dockerfile's image
_MISTAKE_EXIT_CODE = 2
_GPU = "nvidia.com/gpu"
_DNS_PORT = 53


@dataclass(frozen=True)
class PodOptions:
    """The options of `rung submit k8s` beside the job itself."""

    image: str
    volumes: tuple[tuple[str, str], ...]  # claims and mount paths; runs are stored in the first one
    form: str = "job"
    namespace: str | None = None
    cpus: str | None = None  # of each pod
    memory: str | None = None
    shm_size: str | None = None
    secrets: tuple[str, ...] = ()  # their keys become environment variables
    pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    node_selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[str, ...] = ()  # KEY[=VALUE][:EFFECT]
    labels: tuple[tuple[str, str], ...] = ()
    scratch: tuple[str, ...] = ()  # further paths that pods may write to
    egress: str = "any"  # what pods may reach: any, or only pods of the job
    backoff: int = 3  # how often each pod may fail
    runtime: str = "torch-distributed"  # of a TrainJob


def metadata(job: SubmittedJob, cluster: PodOptions, name: str) -> dict[str, Any]:
    """Name and labels, by which all objects of a job can be listed and deleted together."""
    named: dict[str, Any] = {"name": name}
    if cluster.namespace is not None:
        named["namespace"] = cluster.namespace
    return {**named, "labels": {**dict(cluster.labels), **own_labels(job)}}


def own_labels(job: SubmittedJob) -> dict[str, str]:
    return {"app.kubernetes.io/name": "rung", "app.kubernetes.io/instance": job.name}


def task_map(job: SubmittedJob, cluster: PodOptions, files: Mapping[str, str]) -> dict[str, Any]:
    """The task's files. Keys of a ConfigMap have no folders; `volumes` maps them to paths."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, cluster, f"{job.name}-task"),
        "immutable": True,
        "data": {key_of(path): text for path, text in files.items()},
    }


def key_secret(job: SubmittedJob, cluster: PodOptions, key: str) -> dict[str, Any]:
    """The key by which the pods authenticate each other. Immutable: a replaced pod must get the same key."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, cluster, f"{job.name}-key"),
        "immutable": True,
        "stringData": {KEY_VARIABLE: key},
    }


def network_policy(job: SubmittedJob, cluster: PodOptions) -> dict[str, Any]:
    """Allow connections only from pods of the job. Outgoing ones are limited on request: training may need data and
    trackers elsewhere."""
    own = [{"podSelector": {"matchLabels": own_labels(job)}}]
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": own_labels(job)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": own}],
    }
    if cluster.egress == "job":
        # DNS is allowed at any address: that of the server differs between clusters, and may be the node's.
        dns = {"ports": [{"protocol": protocol, "port": _DNS_PORT} for protocol in ("UDP", "TCP")]}
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": own}, dns]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job, cluster, job.name),
        "spec": spec,
    }


def service(job: SubmittedJob, cluster: PodOptions) -> dict[str, Any]:
    """A headless Service: gives each pod a DNS name at once, which stays when the pod is replaced."""
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
    job: SubmittedJob, cluster: PodOptions, words: list[str], files: Mapping[str, str], subdomain: str | None
) -> dict[str, Any]:
    """The specification of the Job whose pods train, one for each node."""
    least, most = job.nodes
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        # When the job fails, every pod fails: the first failure would use up a limit that all pods share.
        "backoffLimitPerIndex": cluster.backoff,
        "maxFailedIndexes": most - least,
        "podFailurePolicy": pod_failure_policy(),
    }
    if least < most:
        # The training is finished when the pods in it succeed; further pods may still wait for a node.
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
        "restartPolicy": "Never",  # podFailurePolicy requires it
        "terminationGracePeriodSeconds": job.grace_seconds + _SPARE_SECONDS,
        **_account(cluster),
        "securityContext": pod_rights(),
        **placement(cluster),
        "containers": [container],
        "volumes": volumes(job, cluster, files),
    }
    return {**spec, "template": {"metadata": {"labels": {**dict(cluster.labels), **own_labels(job)}}, "spec": pod}}


def rendezvous_job(job: SubmittedJob, cluster: PodOptions, subdomain: str | None) -> dict[str, Any]:
    """The specification of the Job that serves an elastic job's rendezvous, so that any worker pod may be lost."""
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
        **pull_secrets(cluster),
        "securityContext": pod_rights(),
        **placement(cluster),
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
    """Replace a pod that was evicted, or exited to be resumed, without counting it; do not retry a user's mistake."""

    def on_exit(code: int, action: str) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": "rung", "operator": "In", "values": [code]}}

    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            on_exit(RESUME_EXIT_CODE, "Ignore"),
            on_exit(_MISTAKE_EXIT_CODE, "FailJob"),
        ]
    }


def environment(job: SubmittedJob, cluster: PodOptions) -> dict[str, Any]:
    """Environment variables by value and from the cluster's Secrets."""
    secrets = [{"secretRef": {"name": name}} for name in cluster.secrets]
    return {"env": [*_variables(dict(job.environment)), *_key_variable(job)], **_some(envFrom=secrets)}


def _variables(further: Mapping[str, str]) -> list[dict[str, Any]]:
    pairs = {"PYTHONUNBUFFERED": "1", "HOME": SCRATCH, **further}
    return [{"name": name, "value": unexpanded(value)} for name, value in pairs.items()]


def _key_variable(job: SubmittedJob) -> list[dict[str, Any]]:
    if job.nodes[1] == 1:  # a single pod has no peers to authenticate
        return []
    return [{"name": KEY_VARIABLE, "valueFrom": {"secretKeyRef": {"name": f"{job.name}-key", "key": KEY_VARIABLE}}}]


def unexpanded(text: str) -> str:
    """Escape a text for the kubelet, which expands $(NAME) and $$."""
    return text.replace("$", "$$")


def resources(job: SubmittedJob, cluster: PodOptions) -> dict[str, Any]:
    """Memory and GPUs are limits; cores are only requested, because a CPU limit throttles the pod."""
    limits = _some(memory=cluster.memory)
    if job.gpus:
        limits[_GPU] = job.gpus
    requests = _some(cpu=cluster.cpus, memory=cluster.memory)
    return _some(requests=requests, limits=limits)


def volumes(job: SubmittedJob, cluster: PodOptions, files: Mapping[str, str]) -> list[dict[str, Any]]:
    memory = {"medium": "Memory", **_some(sizeLimit=cluster.shm_size)}  # without it, the pod's memory is the limit
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


def volume_mounts(cluster: PodOptions, files: Mapping[str, str]) -> list[dict[str, Any]]:
    claims = [{"name": f"volume-{number}", "mountPath": path} for number, (_, path) in enumerate(cluster.volumes)]
    task = {"name": "task", "mountPath": TASK_FOLDER, "readOnly": True}
    scratch = [{"name": name, "mountPath": path} for name, path in _scratch(cluster)]
    return [{"name": "shared-memory", "mountPath": "/dev/shm"}, *scratch, *claims, *([task] if files else [])]


def _scratch(cluster: PodOptions) -> list[tuple[str, str]]:
    """Names and mount paths of a pod's empty folders, except where a claim is mounted."""
    taken = [path for _, path in cluster.volumes]
    paths = [path for path in dict.fromkeys([SCRATCH, *cluster.scratch]) if path not in taken]
    return [(f"scratch-{number}", path) for number, path in enumerate(paths)]


def placement(cluster: PodOptions) -> dict[str, Any]:
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


def _account(cluster: PodOptions) -> dict[str, Any]:
    """Training does not use the cluster's API: a pod gets no token for it unless the user names an account."""
    named = _some(serviceAccountName=cluster.service_account)
    return {
        **(named or {"automountServiceAccountToken": False}),
        "enableServiceLinks": False,
        **pull_secrets(cluster),
    }


def pull_secrets(cluster: PodOptions) -> dict[str, Any]:
    return _some(imagePullSecrets=[{"name": name} for name in cluster.pull_secrets])


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    match = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **match, **_some(effect=effect)}


def key_of(path: str) -> str:
    return "__".join(PurePosixPath(path).parts)


def _some(**values: Any) -> dict[str, Any]:
    """The values that are set."""
    return {name: value for name, value in values.items() if value}
