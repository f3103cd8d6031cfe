"""The forms that a job can have on Kubernetes, as lists of manifests: made of nothing but what is given.

An Indexed Job needs no operator. A fixed number of pods meets at pod 0. For a number that may change, the meeting place
is a pod of its own: else the loss of pod 0 would be that of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rung.submit.job import Job
from rung.submit.pods import (
    PORT,
    RENDEZVOUS,
    Cluster,
    container_rights,
    environment,
    key_secret,
    metadata,
    network_policy,
    own_labels,
    placement,
    pod_rights,
    rendezvous_job,
    resources,
    service,
    task_map,
    unexpanded,
    volume_mounts,
    volumes,
    worker_job,
)

_WORKERS = "workers"
# What the runtimes of Kubeflow Trainer call the pods that train, and their container.
_NODE = "node"


def render(job: Job, cluster: Cluster, files: Mapping[str, str], key: str) -> list[dict[str, Any]]:
    """The manifests of a job, in the order in which they are to be created. Several pods know each other by `key`."""
    task = [task_map(job, cluster, files)] if files else []
    secret = [key_secret(job, cluster, key)] if job.nodes[1] > 1 else []
    return [*task, *secret, network_policy(job, cluster), *FORMS[cluster.form](job, cluster, files)]


def _indexed_job(job: Job, cluster: Cluster, files: Mapping[str, str]) -> list[dict[str, Any]]:
    is_elastic, is_alone = job.nodes[0] < job.nodes[1], job.nodes[1] == 1
    subdomain = None if is_alone else job.name
    head = f"{job.name}-{RENDEZVOUS}-0" if is_elastic else f"{job.name}-0"
    words = _words(job, f"{head}.{job.name}")
    found = [] if is_alone else [service(job, cluster)]
    if is_elastic:
        name = f"{job.name}-{RENDEZVOUS}"
        found.append(_batch_job(metadata(job, cluster, name), rendezvous_job(job, cluster, subdomain)))
    training = worker_job(job, cluster, words, files, subdomain)
    return [*found, _batch_job(metadata(job, cluster, job.name), training)]


def _job_set(job: Job, cluster: Cluster, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """JobSet makes the Service, and knows that the job is over when those that train are."""
    is_elastic = job.nodes[0] < job.nodes[1]
    head = f"{job.name}-{RENDEZVOUS if is_elastic else _WORKERS}-0-0"
    training = worker_job(job, cluster, _words(job, f"{head}.{job.name}"), files, None)
    jobs = [_replicated(_WORKERS, training)]
    if is_elastic:
        jobs.insert(0, _replicated(RENDEZVOUS, rendezvous_job(job, cluster, None)))
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(job, cluster, job.name),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
                "successPolicy": {"operator": "All", "targetReplicatedJobs": [_WORKERS]},
                # Each pod has been tried as often as it may be when a Job of the set fails.
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": jobs,
            },
        }
    ]


def _train_job(job: Job, cluster: Cluster, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The runtime says to each pod how many there are and where they meet; Rung reads it there.

    A patch cannot say that a pod gets no key to the cluster's API. An account can, so the job has one of its own.
    """
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, cluster, job.name),
        "automountServiceAccountToken": False,
    }
    trainer: dict[str, Any] = {
        "image": cluster.image,
        "command": ["rung"],
        "args": [unexpanded(word) for word in job.words()],
        "env": environment(job, cluster)["env"],
        "numNodes": job.nodes[1],
        "numProcPerNode": job.num_processes,
    }
    if wanted := resources(job, cluster):
        trainer["resourcesPerNode"] = wanted
    pod: dict[str, Any] = {
        "securityContext": pod_rights(),
        **placement(cluster),
        "containers": [
            {"name": _NODE, "volumeMounts": volume_mounts(cluster, files), "securityContext": container_rights()}
        ],
        "volumes": volumes(job, cluster, files),
        "serviceAccountName": cluster.service_account or job.name,
    }
    if cluster.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in cluster.pull_secrets]
    patch = {"name": _NODE, "template": {"spec": {"template": {"metadata": {"labels": own_labels(job)}, "spec": pod}}}}
    return [
        *([account] if cluster.service_account is None else []),
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": metadata(job, cluster, job.name),
            "spec": {
                "runtimeRef": {"name": cluster.runtime},
                "trainer": trainer,
                "runtimePatches": [
                    {
                        "manager": "rung",
                        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                    }
                ],
            },
        },
    ]


FORMS: dict[str, Callable[[Job, Cluster, Mapping[str, str]], list[dict[str, Any]]]] = {
    "job": _indexed_job,
    "jobset": _job_set,
    "trainjob": _train_job,
}


def _words(job: Job, head: str) -> list[str]:
    return job.words(rdzv=f"{head}:{PORT}" if job.nodes[1] > 1 else None)


def _batch_job(named: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": named, "spec": spec}


def _replicated(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "replicas": 1, "template": {"spec": spec}}
