"""`rung submit k8s`: a task as manifests, printed or applied. The default form needs no operator."""

from __future__ import annotations

import argparse
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from rung.errors import ConfigError
from rung.submit.flags import add_job, asked_of, pair_of
from rung.submit.names import refuse_names

if TYPE_CHECKING:
    from rung.submit.job import Job
    from rung.submit.pods import Cluster

_FORMS = ("job", "jobset", "trainjob")
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_LONGEST_NAME = 40  # names of pods are longer, and 63 letters are the end
_RUNTIME_SECONDS = 30  # that Kubernetes gives a pod to leave, if nobody says otherwise
_FILES = re.compile(r"[-._a-zA-Z0-9/]+")
_MAP_BYTES = 1_000_000  # of a ConfigMap, whose limit is one MiB


def add_kubernetes(kinds: Any) -> None:
    parser = kinds.add_parser(
        "k8s",
        help="as an Indexed Job, a JobSet or a TrainJob on Kubernetes",
        description="Train a task in pods, one for each node: an Indexed Job with a headless Service, which needs no "
        "operator, or the same as a JobSet or as a TrainJob of Kubeflow. The task's file goes along.",
        usage="rung submit k8s [flags] task",
    )
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--image", required=True, metavar="IMAGE", help="an image with Rung: see the Dockerfile")
    cluster.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM:/PATH",
        help="a persistent volume claim and where it is mounted; runs lie in the first one",
    )
    cluster.add_argument("--form", choices=_FORMS, default="job", help="what kind of job (default job)")
    cluster.add_argument("--namespace", metavar="NAME", help="default: that of the current context")
    for flag, told in {"cpus": "cores", "memory": "memory, as 64Gi", "shm-size": "size of /dev/shm, as 8Gi"}.items():
        cluster.add_argument(f"--{flag}", metavar="SIZE", help=f"{told}, of each pod")
    repeated = {
        "secret": ("NAME", "a Secret whose keys are variables of the environment"),
        "image-pull-secret": ("NAME", "a Secret for the registry"),
        "node-selector": ("KEY=VALUE", "a label that nodes must have"),
        "toleration": ("KEY[=VALUE][:EFFECT]", "a taint that nodes may have"),
        "label": ("KEY=VALUE", "a label of all that is made, as that of a queue"),
        "scratch": ("PATH", "a path that pods may write to beside /tmp and volumes; goes with its pod"),
        "ship": ("FILE", "a file that the task needs beside it; modules that it imports go along by themselves"),
    }
    for flag, (metavar, told) in repeated.items():
        cluster.add_argument(f"--{flag}", action="append", default=[], metavar=metavar, help=told)
    cluster.add_argument("--task-in-image", metavar="PATH", help="where the image has the task; nothing goes along")
    cluster.add_argument("--service-account", metavar="NAME", help="of the pods (default: none, and no key to the API)")
    cluster.add_argument(
        "--egress",
        choices=("any", "job"),
        default="any",
        help="what pods may reach: all that the cluster lets them, or one another and DNS alone (default any)",
    )
    cluster.add_argument("--backoff", type=int, metavar="N", help="failures that each pod has (default 3)")
    cluster.add_argument("--runtime", metavar="NAME", help="of a TrainJob (default torch-distributed)")
    add_job(parser)
    parser.set_defaults(call=_submit)


def _submit(options: argparse.Namespace) -> int:
    from rung.submit.forms import render
    from rung.submit.job import describe
    from rung.submit.yaml import write_documents

    cluster = _cluster_of(options)
    asked = asked_of(options)
    if asked.resume is not None:
        raise ConfigError(
            f"--resume {asked.resume} lies where this machine does not look. Name the run by its directory in the "
            f"pods, as in --out {cluster.volumes[0][1]}/RUN: what is there is gone on with."
        )
    job = describe(asked, is_elsewhere=True)
    _refuse(job, cluster)
    files = {} if options.task_in_image else _files_of(asked.task, asked.config_file, options.ship)
    job = _in_pods(job, cluster, asked.flags.get("out"), asked.config_file, options.task_in_image)
    manifests = render(job, cluster, files, key=secrets.token_hex(32))
    for note in _notes(job, cluster):
        sys.stderr.write(f"note: {note}\n")
    if options.dry_run:
        sys.stdout.write(write_documents(manifests, _comments(job, cluster, manifests)))
        return 0
    from rung.submit.apply import apply

    namespace = apply(manifests, cluster.namespace)
    sys.stdout.write(_farewell(job, cluster, namespace, manifests))
    return 0


# -- what was asked --------------------------------------------------------------------------------------------------


def _cluster_of(options: argparse.Namespace) -> Cluster:
    from rung.submit.pods import Cluster

    if not options.volume:
        raise ConfigError(
            "without a volume, checkpoints and results would go with the pods. Name a claim that all of them can write "
            "to, and where it is mounted: --volume CLAIM:/runs."
        )
    for flag in ("cpus", "memory", "shm_size"):
        value = getattr(options, flag)
        if value is not None and not _QUANTITY.fullmatch(value):
            raise ConfigError(f"--{flag.replace('_', '-')} {value} is no quantity of Kubernetes, as 8, 500m or 64Gi.")
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
        raise ConfigError("--ship sends files with the task, and --task-in-image says that it is there already.")
    if options.task_in_image and options.config:
        raise ConfigError(
            f"--config {options.config} would go along with the task, and --task-in-image says that it is there "
            "already. Give what the file says as flags or with --set."
        )
    cluster = Cluster(
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
        scratch=tuple(_without_end(path) for path in options.scratch),
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
    return claim, _without_end(path)


def _without_end(path: str) -> str:
    return f"/{path.strip('/')}" if path.startswith("/") else path


def _refuse(job: Job, cluster: Cluster) -> None:
    """What a job may be elsewhere, and not here."""
    if not _LABEL.fullmatch(job.name) or len(job.name) > _LONGEST_NAME:
        raise ConfigError(
            f"{job.name!r} cannot be the name of a job on Kubernetes: a letter, then letters, digits and hyphens, at "
            f"most {_LONGEST_NAME} of all. Give it another: --name NAME."
        )
    if cluster.form != "trainjob":
        return
    if job.nodes[0] < job.nodes[1]:
        raise ConfigError(
            f"a TrainJob has a fixed number of nodes, and --nodes {job.nodes[0]}:{job.nodes[1]} may change. Use --form "
            f"jobset or --form job, or --nodes {job.nodes[1]}."
        )
    if ":" in job.processes:
        raise ConfigError(
            f"a TrainJob has a fixed number of processes, and --nproc {job.processes} may change. Use --form jobset or "
            f"--form job, or --nproc {job.num_processes}."
        )
    if cluster.secrets:
        raise ConfigError(
            f"a TrainJob takes no whole Secret as its environment: {', '.join(cluster.secrets)}. Let its runtime name "
            "it, or use --form jobset or --form job."
        )


def _notes(job: Job, cluster: Cluster) -> list[str]:
    """What the user should know and did not ask."""
    found = list(job.notes)
    if cluster.form == "trainjob" and job.grace_seconds >= _RUNTIME_SECONDS:
        found.append(
            f"the pods of a TrainJob have {_RUNTIME_SECONDS} s to leave unless its runtime says otherwise, and saving "
            f"may take {job.grace_seconds} s here: --set grace_seconds=20 tells Rung to be quicker"
        )
    return found


# -- what goes along -------------------------------------------------------------------------------------------------


def _files_of(task: str, config_file: str | None, further: list[str]) -> dict[str, str]:
    """The texts of the task, of the modules beside it that it has imported, and of what else it needs."""
    file = _task_file(task)
    folder = file.parent
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    # torch has modules whose file is a name alone.
    paths = {file, *(Path(name).resolve() for name in modules if name is not None and Path(name).is_absolute())}
    found: dict[str, str] = {}
    origins: dict[str, Path] = {}
    for path in sorted(path for path in paths if path.is_relative_to(folder) and path.suffix == ".py"):
        if not {"site-packages", ".venv"} & set(path.parts):
            _take_along(path, path.relative_to(folder), folder.name, found, origins)
    for name in [*further, *([config_file] if config_file is not None else [])]:
        path = Path(name).resolve()
        inside = path.relative_to(folder) if path.is_relative_to(folder) else Path(path.name)
        _take_along(path, inside, folder.name, found, origins)
    _refuse_files(found)
    return found


def _take_along(path: Path, inside: Path, folder: str, found: dict[str, str], origins: dict[str, Path]) -> None:
    """`inside` is its place beside the task in the pods, where no other file may be."""
    from rung.submit.pods import key_of

    name = str(PurePosixPath(folder, inside))
    other = origins.setdefault(key_of(name), path)
    if other != path:
        raise ConfigError(f"{other} and {path} would be the same file beside the task. Give one of them another name.")
    found[name] = _text_of(path)


def _task_file(task: str) -> Path:
    path = Path(task).resolve()
    return path / "task.py" if path.is_dir() else path


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot go along: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} is no text, and only texts go along. Put it into the image, or onto a volume."
        ) from None


def _refuse_files(files: Mapping[str, str]) -> None:
    size = sum(len(text.encode()) for text in files.values())
    if size > _MAP_BYTES:
        raise ConfigError(
            f"the task's files have {size:,} bytes, and a ConfigMap takes {_MAP_BYTES:,}. Put them into the image and "
            "say where: --task-in-image PATH."
        )
    for name in files:
        if not _FILES.fullmatch(name):
            raise ConfigError(f"{name!r} cannot be the name of a file that goes along: letters, digits, '-', '_', '.'.")


def _in_pods(job: Job, cluster: Cluster, out: str | None, config_file: str | None, in_image: str | None) -> Job:
    """The job as its pods see it."""
    from rung.submit.job import as_word
    from rung.submit.pods import TASK_FOLDER

    paths = [path for _, path in cluster.volumes]
    if out is not None and ".." in PurePosixPath(out).parts:
        raise ConfigError(f"--out {out}: say where that is, without '..'.")
    if out is None:
        out = f"{paths[0]}/{PurePosixPath(job.out).name}"
    elif not any(PurePosixPath(out).is_relative_to(path) for path in paths):
        raise ConfigError(
            f"--out {out} is on none of the volumes ({', '.join(paths)}), and would go with its pod. Try --out "
            f"{paths[0]}/{PurePosixPath(out).name}."
        )
    if in_image is not None:
        return replace(job, task=as_word(in_image), out=out)
    file = _task_file(job.task)
    folder = f"{TASK_FOLDER}/{file.parent.name}"
    settings = list(job.settings)
    if config_file is not None:
        place, path = settings.index("--config") + 1, Path(config_file).resolve()
        inside = path.relative_to(file.parent) if path.is_relative_to(file.parent) else Path(path.name)
        settings[place] = f"{folder}/{inside}"
    return replace(job, task=f"{folder}/{file.name}", out=out, settings=tuple(settings))


def _comments(job: Job, cluster: Cluster, manifests: list[dict[str, Any]]) -> list[str]:
    """What somebody should know who applies the manifests by hand."""
    found = []
    if any(manifest["kind"] == "Secret" for manifest in manifests):
        found.append(
            f"The Secret {job.name}-key is the key by which the pods know each other: random, and another one whenever "
            "this is printed."
        )
        found.append("Keep this text to yourself, and apply all of it.")
    own = f"{f'-n {cluster.namespace} ' if cluster.namespace else ''}-l app.kubernetes.io/instance={job.name}"
    return [*found, f"Delete what it makes: kubectl delete {_kinds(manifests)} {own}"]


def _kinds(manifests: list[dict[str, Any]]) -> str:
    """The kinds of all that is made, the job first, as kubectl takes them."""
    return ",".join(dict.fromkeys(manifest["kind"].lower() for manifest in reversed(manifests)))


def _farewell(job: Job, cluster: Cluster, namespace: str, manifests: list[dict[str, Any]]) -> str:
    """What there is now, and what can be done with it."""
    own = f"-n {namespace} -l app.kubernetes.io/instance={job.name}"
    return (
        f"submitted {cluster.form} {job.name} to the namespace {namespace}; the run is {job.out}\n"
        f"  look:   kubectl get pods {own}\n"
        f"  follow: kubectl logs -f --prefix --max-log-requests {job.nodes[1] + 1} {own}\n"
        f"  stop:   kubectl delete {_kinds(manifests)} {own}\n"
    )
