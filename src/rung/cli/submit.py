"""The flags of `rung submit`, with one command for each scheduler."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rung.launch.submit.flags import FORMS, NOTICE_SECONDS, SBATCH_OPTIONS, SUBMITTED
from rung.spec.flags import add_settings


def add(commands: Any) -> None:
    submit = commands.add_parser(
        "submit",
        help="train a task on a cluster",
        description="Submit a task to a scheduler, which starts it on its machines, and again after a preemption. "
        "Mistakes are reported now, not in the queue.",
    )
    kinds = submit.add_subparsers(title="where", metavar="WHERE", required=True, parser_class=type(submit))
    _add_slurm(kinds)
    _add_kubernetes(kinds)


def _add_slurm(kinds: Any) -> None:
    slurm = kinds.add_parser(
        "slurm",
        help="by sbatch",
        description="Write a script for sbatch and submit it: one launcher on each node, which starts its processes. "
        "Before the time limit and on a preemption the job saves its state; it is requeued and resumes from there. The "
        "run's directory must be on a disk that all nodes share.",
        usage="rung submit slurm [flags] task",  # argparse would list every flag here, and again below
    )
    _add_job(slurm, nodes="machines (default 1)", add_own=_add_sbatch)
    slurm.set_defaults(call=_submit_to_slurm)


def _add_sbatch(slurm: argparse.ArgumentParser) -> None:
    group = slurm.add_argument_group("Slurm")
    for key, (metavar, text) in SBATCH_OPTIONS.items():
        group.add_argument(f"--{key}", metavar=metavar, help=text)
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="KEY=VALUE", help="any other option of sbatch, as in exclusive"
    )
    group.add_argument(
        "--setup", action="append", default=[], metavar="LINE", help="shell before it starts: 'module load cuda/12.4'"
    )
    group.add_argument(
        "--notice",
        type=int,
        metavar="SECONDS",
        help=f"time to save and requeue before the time limit (default {NOTICE_SECONDS}, or grace_seconds + 30)",
    )
    group.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="an array of jobs, one for each strategy, for `rung report`",
    )


def _add_kubernetes(kinds: Any) -> None:
    parser = kinds.add_parser(
        "k8s",
        help="as an Indexed Job, a JobSet or a TrainJob on Kubernetes",
        description="Train a task in pods, one for each node: an Indexed Job with a headless Service, which needs no "
        "operator, or the same as a JobSet or as a TrainJob of Kubeflow. The task's file is sent along.",
        usage="rung submit k8s [flags] task",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--image", required=True, metavar="IMAGE", help="an image with Rung: see the Dockerfile")
    cluster.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="a persistent volume claim and its mount path; runs are stored in the first one",
    )
    cluster.add_argument("--form", choices=FORMS, default="job", help="what kind of job (default job)")
    cluster.add_argument("--namespace", metavar="NAME", help="default: that of the current context")
    for flag, text in {"cpus": "cores", "memory": "memory, as 64Gi", "shm-size": "size of /dev/shm, as 8Gi"}.items():
        cluster.add_argument(f"--{flag}", metavar="SIZE", help=f"{text}, of each pod")
    repeated = {
        "secret": ("NAME", "a Secret whose keys become environment variables"),
        "image-pull-secret": ("NAME", "a Secret for the registry"),
        "node-selector": ("KEY=VALUE", "a label that nodes must have"),
        "toleration": ("KEY[=VALUE][:EFFECT]", "a taint that nodes may have"),
        "label": ("KEY=VALUE", "a label of all created objects, as that of a queue"),
        "scratch": ("PATH", "a path that pods may write to beside /tmp and volumes; lost with its pod"),
        "ship": ("FILE", "a file that the task needs beside it; modules that it imports are sent in any case"),
    }
    for flag, (metavar, text) in repeated.items():
        cluster.add_argument(f"--{flag}", action="append", default=[], metavar=metavar, help=text)
    cluster.add_argument("--task-in-image", metavar="PATH", help="the task's path in the image; no file is sent")
    cluster.add_argument("--service-account", metavar="NAME", help="of the pods (default: none, without API access)")
    cluster.add_argument(
        "--egress",
        choices=("any", "job"),
        default="any",
        help="what pods may reach: whatever the cluster allows, or only one another and DNS (default any)",
    )
    cluster.add_argument("--backoff", type=int, metavar="N", help="how often each pod may fail (default 3)")
    cluster.add_argument("--runtime", metavar="NAME", help="of a TrainJob (default torch-distributed)")
    _add_job(parser)
    parser.set_defaults(call=_submit_to_kubernetes)


def _add_job(
    parser: argparse.ArgumentParser,
    nodes: str = "machines, or MIN:MAX (default 1)",
    add_own: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """Add the task, the machines, the scheduler's own flags, and the flags of `rung train`."""
    parser.add_argument("task", help="a task file, or a directory with a task.py")
    job = parser.add_argument_group("job")
    job.add_argument("--nodes", metavar="N", help=nodes)
    job.add_argument("--gpus-per-node", dest="gpus", type=int, default=0, metavar="N", help="default: none")
    job.add_argument("--name", metavar="NAME", help="of the job (default: of task and strategy)")
    job.add_argument("--resume", metavar="RUN", help="resume a run from its newest checkpoint")
    job.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an environment variable of the job; the script or manifest contains its value",
    )
    job.add_argument("--dry-run", action="store_true", help="print the script or manifests, and submit nothing")
    if add_own is not None:
        add_own(parser)
    add_settings(
        parser,
        SUBMITTED,
        strategy="how to parallelize the task; default: single, or ddp for several processes",
        nproc="processes on each machine; default: one per GPU, or 1",
        backend="auto, gloo or nccl; gloo lets processes share a GPU",
    )


def _submit_to_slurm(options: argparse.Namespace) -> int:
    from rung.launch.submit.slurm import submit

    return submit(options)


def _submit_to_kubernetes(options: argparse.Namespace) -> int:
    from rung.launch.submit.kubernetes import submit

    return submit(options)
