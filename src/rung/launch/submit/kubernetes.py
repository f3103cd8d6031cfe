"""`rung submit k8s`: renders a job as manifests, and prints or applies them. The default form needs no operator."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from rung.errors import ConfigError
from rung.launch.submit.apply import apply
from rung.launch.submit.forms import render
from rung.launch.submit.job import SubmittedJob, as_word, describe
from rung.launch.submit.manifest_yaml import write_documents
from rung.launch.submit.names import refuse_names
from rung.launch.submit.options import pair_of, submit_options
from rung.launch.submit.pods import SCRATCH, TASK_FOLDER, PodOptions, key_of
from rung.spec.task import files_of, task_file
from rung.system.launcher_env import STORE_CACHE_VARIABLE
from rung.system.store import is_store, masked

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_LONGEST_NAME = 40  # names of pods append to it, and may have 63 characters
_RUNTIME_SECONDS = 30  # the default grace period of a pod
_FILES = re.compile(r"[-._a-zA-Z0-9/]+")
_MAP_BYTES = 1_000_000  # the limit of a ConfigMap is one MiB


def submit(options: argparse.Namespace) -> int:
    cluster = _cluster_of(options)
    submitted = submit_options(options)
    if submitted.resume is not None:
        place = f"{cluster.volumes[0][1]}/RUN" if cluster.volumes else "s3://BUCKET/RUN"
        raise ConfigError(
            f"--resume {masked(submitted.resume)} would look for the run on this machine. Give its directory in the "
            f"pods, as in --out {place}: a run that is there is resumed."
        )
    job = describe(submitted, is_elsewhere=True)
    _refuse(job, cluster)
    files = {} if options.task_in_image else _files_of(submitted.task, submitted.config_file, options.ship)
    job = _in_pods(job, cluster, submitted.flags.get("out"), submitted.config_file, options.task_in_image)
    manifests = render(job, cluster, files, key=secrets.token_hex(32))
    for note in _notes(job, cluster):
        sys.stderr.write(f"note: {note}\n")
    if options.dry_run:
        sys.stdout.write(write_documents(manifests, _comments(job, cluster, manifests)))
        return 0
    namespace = apply(manifests, cluster.namespace)
    sys.stdout.write(_summary(job, cluster, namespace, manifests))
    return 0


# -- options ---------------------------------------------------------------------------------------------------------


def _cluster_of(options: argparse.Namespace) -> PodOptions:
    if not options.volume and not is_store(options.out):
        raise ConfigError(
            "without a volume, checkpoints and results would be lost with the pods. Name a claim that all pods can "
            "write to, and its mount path: --volume CLAIM:/runs. Or keep the run in a store: --out s3://BUCKET/RUN."
        )
    for flag in ("cpus", "memory", "shm_size"):
        value = getattr(options, flag)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ConfigError(f"--{flag.replace('_', '-')} {value} is no Kubernetes quantity, such as 8, 500m or 64Gi.")
    for text in options.toleration:
        effect = text.partition(":")[2]
        if effect and effect not in _EFFECTS:
            raise ConfigError(f"--toleration {text}: {effect!r} is none of the effects {', '.join(_EFFECTS)}.")
    if options.backoff is not None and options.form == "trainjob":
        raise ConfigError("--backoff counts failures of pods, which a TrainJob leaves to its runtime. Leave it out.")
    if options.runtime is not None and options.form != "trainjob":
        raise ConfigError(f"--runtime {options.runtime} is for --form trainjob, and this is a {options.form}.")
    if options.backoff is not None and options.backoff < 0:
        raise ConfigError(f"--backoff {options.backoff}: a pod may fail 0 times or more.")
    if options.task_in_image and options.ship:
        raise ConfigError("--ship sends files with the task, but with --task-in-image the task is there already.")
    if options.task_in_image and options.config:
        raise ConfigError(
            f"--config {options.config} would be sent with the task, but with --task-in-image the task is there "
            "already. Give the file's settings as flags or with --set."
        )
    cluster = PodOptions(
        image=options.image,
        volumes=tuple(_volume_of(text) for text in options.volume),
        form=options.form,
        namespace=options.namespace,
        cpus=options.cpus,
        memory=options.memory,
        shm_size=options.shm_size,
        secrets=tuple(options.secret),
        pull_secrets=tuple(options.image_pull_secret),
        service_account=options.service_account,
        node_selector=tuple(pair_of(text, "--node-selector") for text in options.node_selector),
        tolerations=tuple(options.toleration),
        labels=tuple(pair_of(text, "--label") for text in options.label),
        scratch=tuple(_normalised(path) for path in options.scratch),
        egress=options.egress,
        **({"backoff": options.backoff} if options.backoff is not None else {}),
        **({"runtime": options.runtime} if options.runtime is not None else {}),
    )
    refuse_names(cluster)
    return cluster


def _volume_of(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not claim or not colon:
        raise ConfigError(f"--volume takes CLAIM:/PATH, as in runs:/runs, not {text!r}.")
    return claim, _normalised(path)


def _normalised(path: str) -> str:
    return f"/{path.strip('/')}" if path.startswith("/") else path


def _refuse(job: SubmittedJob, cluster: PodOptions) -> None:
    """Refuse jobs that are valid elsewhere but not on Kubernetes."""
    if not _LABEL.fullmatch(job.name) or len(job.name) > _LONGEST_NAME:
        raise ConfigError(
            f"{job.name!r} cannot be the name of a job on Kubernetes: a letter, then letters, digits and hyphens, at "
            f"most {_LONGEST_NAME} in all. Choose another: --name NAME."
        )
    if is_store(job.out) and cluster.egress == "job":
        raise ConfigError(f"--egress job lets pods reach nothing but one another, and --out {job.out} is elsewhere.")
    if cluster.form != "trainjob":
        return
    if job.nodes[0] < job.nodes[1]:
        raise ConfigError(
            f"a TrainJob has a fixed number of nodes, but --nodes {job.nodes[0]}:{job.nodes[1]} is a range. Use --form "
            f"jobset or --form job, or --nodes {job.nodes[1]}."
        )
    if ":" in job.processes:
        raise ConfigError(
            f"a TrainJob has a fixed number of processes, but --nproc {job.processes} is a range. Use --form jobset or "
            f"--form job, or --nproc {job.num_processes}."
        )
    if cluster.secrets:
        raise ConfigError(
            f"a TrainJob takes no whole Secret as its environment: {', '.join(cluster.secrets)}. Name it in the "
            "runtime, or use --form jobset or --form job."
        )


def _notes(job: SubmittedJob, cluster: PodOptions) -> list[str]:
    found = list(job.notes)
    if cluster.form == "trainjob" and job.grace_seconds >= _RUNTIME_SECONDS:
        found.append(
            f"the pods of a TrainJob have {_RUNTIME_SECONDS} s to exit unless its runtime sets another time, and "
            f"saving may take {job.grace_seconds} s here: --set grace_seconds=20 limits it"
        )
    return found


# -- the task's files ------------------------------------------------------------------------------------------------


def _files_of(task: str, config_file: str | None, further: list[str]) -> dict[str, str]:
    """The contents of the task, of the modules beside it that it imports, of --config and of --ship, by path."""
    folder = task_file(task).resolve().parent
    found: dict[str, str] = {}
    origins: dict[str, Path] = {}
    for path in files_of(task):
        _add_file(path, path.relative_to(folder), folder.name, found, origins)
    for name in [*further, *([config_file] if config_file is not None else [])]:
        path = Path(name).resolve()
        inside = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
        _add_file(path, inside, folder.name, found, origins)
    _refuse_files(found)
    return found


def _add_file(path: Path, inside: Path, folder: str, found: dict[str, str], origins: dict[str, Path]) -> None:
    """Add a file at the path `inside` the task's folder in the pods; refuse two files of one path."""
    name = str(PurePosixPath(folder, inside))
    other = origins.setdefault(key_of(name), path)
    if other != path:
        raise ConfigError(f"{other} and {path} would be the same file beside the task. Give one of them another name.")
    found[name] = _text_of(path)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be sent: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is no text, and only text can be sent. Put it into the image, or onto a volume."
        ) from None


def _refuse_files(files: Mapping[str, str]) -> None:
    size = sum(len(text.encode()) for text in files.values())
    if size > _MAP_BYTES:
        raise ConfigError(
            f"the task's files have {size:,} bytes, but a ConfigMap takes {_MAP_BYTES:,}. Put them into the image and "
            "give their path: --task-in-image PATH."
        )
    for name in files:
        if not _FILES.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be sent under this name: use letters, digits, '-', '_' and '.'.")


def _in_pods(
    job: SubmittedJob, cluster: PodOptions, out: str | None, config_file: str | None, in_image: str | None
) -> SubmittedJob:
    """The job as its pods see it."""
    paths = [path for _, path in cluster.volumes]
    if is_store(out):  # its local part needs a place that pods may write to
        job = replace(job, environment=(*job.environment, (STORE_CACHE_VARIABLE, f"{SCRATCH}/runs")))
    if out is not None and ".." in PurePosixPath(out).parts:
        raise ConfigError(f"--out {out}: give the path without '..'.")
    if out is None:
        out = f"{paths[0]}/{PurePosixPath(job.out).name}"
    elif not is_store(out) and not any(PurePosixPath(out).is_relative_to(path) for path in paths):
        raise ConfigError(
            f"--out {out} is on none of the volumes ({', '.join(paths)}), and would be lost with its pod. Try --out "
            f"{paths[0]}/{PurePosixPath(out).name}."
        )
    if in_image is not None:
        return replace(job, task=as_word(in_image), out=out)
    file = task_file(job.task).resolve()
    folder = f"{TASK_FOLDER}/{file.parent.name}"
    settings = list(job.settings)
    if config_file is not None:
        index, path = settings.index("--config") + 1, Path(config_file).resolve()
        inside = path.relative_to(file.parent) if path.is_relative_to(file.parent) else Path(path.name)
        settings[index] = f"{folder}/{inside}"
    return replace(job, task=f"{folder}/{file.name}", out=out, settings=tuple(settings))


def _comments(job: SubmittedJob, cluster: PodOptions, manifests: list[dict[str, Any]]) -> list[str]:
    """Comments for users who apply the manifests by hand."""
    found = []
    if any(manifest["kind"] == "Secret" for manifest in manifests):
        found.append(
            f"The Secret {job.name}-key holds the key by which the pods authenticate each other: random, and a new one "
            "whenever this is printed."
        )
        found.append("Keep this text to yourself, and apply all of it.")
    own = f"{f'-n {cluster.namespace} ' if cluster.namespace else ''}-l app.kubernetes.io/instance={job.name}"
    return [*found, f"Delete what it creates: kubectl delete {_kinds(manifests)} {own}"]


def _kinds(manifests: list[dict[str, Any]]) -> str:
    """The kinds of the manifests as kubectl takes them, the job first."""
    return ",".join(dict.fromkeys(manifest["kind"].lower() for manifest in reversed(manifests)))


def _summary(job: SubmittedJob, cluster: PodOptions, namespace: str, manifests: list[dict[str, Any]]) -> str:
    """What was submitted, and the kubectl commands for it."""
    own = f"-n {namespace} -l app.kubernetes.io/instance={job.name}"
    return (
        f"submitted {cluster.form} {job.name} to the namespace {namespace}; the run is {job.out}\n"
        f"  look:   kubectl get pods {own}\n"
        f"  follow: kubectl logs -f --prefix --max-log-requests {job.nodes[1] + 1} {own}\n"
        f"  stop:   kubectl delete {_kinds(manifests)} {own}\n"
    )
