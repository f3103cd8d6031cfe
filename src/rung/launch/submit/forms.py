"""Renders a job as one of three forms of manifests: Indexed Job, JobSet or TrainJob. Pure functions.

An Indexed Job needs no operator. With a fixed number of pods, pod 0 serves the rendezvous. An elastic job has a pod of
its own for it, so that the job survives the loss of any worker pod.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rung.launch.submit.job import SubmittedJob
from rung.launch.submit.pods import (
    PORT,
    RENDEZVOUS,
    PodOptions,
    container_rights,
    environment,
    key_secret,
    metadata,
    network_policy,
    own_labels,
    placement,
    pod_rights,
    pull_secrets,
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
_NODE = "node"  # the name of the worker pods and their container in the runtimes of Kubeflow Trainer


def render(job: SubmittedJob, cluster: PodOptions, files: Mapping[str, str], key: str) -> list[dict[str, Any]]:
    """The manifests of a job in the order of their creation. Several pods authenticate each other by `key`."""
    task = [task_map(job, cluster, files)] if files else []
    secret = [key_secret(job, cluster, key)] if job.nodes[1] > 1 else []
    return [*task, *secret, network_policy(job, cluster), *FORMS[cluster.form](job, cluster, files)]


def _indexed_job(job: SubmittedJob, cluster: PodOptions, files: Mapping[str, str]) -> list[dict[str, Any]]:
    is_elastic, is_single = job.nodes[0] < job.nodes[1], job.nodes[1] == 1
    subdomain = None if is_single else job.name
    head = f"{job.name}-{RENDEZVOUS}-0" if is_elastic else f"{job.name}-0"
    words = _words(job, f"{head}.{job.name}")
    found = [] if is_single else [service(job, cluster)]
    if is_elastic:
        name = f"{job.name}-{RENDEZVOUS}"
        found.append(_batch_job(metadata(job, cluster, name), rendezvous_job(job, cluster, subdomain)))
    training = worker_job(job, cluster, words, files, subdomain)
    return [*found, _batch_job(metadata(job, cluster, job.name), training)]


def _job_set(job: SubmittedJob, cluster: PodOptions, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """JobSet creates the Service, and ends the job when the workers have succeeded."""
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
                # A Job of the set fails only after its pods have used up their own retries.
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": jobs,
            },
        }
    ]


def _train_job(job: SubmittedJob, cluster: PodOptions, files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The runtime puts the number of nodes and the rendezvous into each pod's environment, where Rung reads them.

    A patch cannot switch off a pod's token for the cluster's API. A service account can, so the job has its own.
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
    if requested := resources(job, cluster):
        trainer["resourcesPerNode"] = requested
    pod: dict[str, Any] = {
        "securityContext": pod_rights(),
        **placement(cluster),
        "containers": [
            {"name": _NODE, "volumeMounts": volume_mounts(cluster, files), "securityContext": container_rights()}
        ],
        "volumes": volumes(job, cluster, files),
        "serviceAccountName": cluster.service_account or job.name,
        **pull_secrets(cluster),  # those of the default account do not apply with an account of the job's own
    }
    labels = {**dict(cluster.labels), **own_labels(job)}
    patch = {"name": _NODE, "template": {"spec": {"template": {"metadata": {"labels": labels}, "spec": pod}}}}
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


FORMS: dict[str, Callable[[SubmittedJob, PodOptions, Mapping[str, str]], list[dict[str, Any]]]] = {
    "job": _indexed_job,
    "jobset": _job_set,
    "trainjob": _train_job,
}


def _words(job: SubmittedJob, head: str) -> list[str]:
    return job.words(rdzv=f"{head}:{PORT}" if job.nodes[1] > 1 else None)


def _batch_job(named: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": named, "spec": spec}


def _replicated(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "replicas": 1, "template": {"spec": spec}}
