"""Refuses names, labels and paths that the cluster's API server would refuse, before anything is sent to it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from rung.errors import ConfigError
from rung.launch.submit.pods import TASK_FOLDER, PodOptions

_WORD = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_WORD}(\.{_WORD})*")
_NAMESPACE = re.compile(rf"(?=.{{1,63}}$){_WORD}")
_MARK = "(?=[^/]{1,63}$)[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?"
_KEY = re.compile(rf"({_WORD}(\.{_WORD})*/)?{_MARK}")
_VALUE = re.compile(f"({_MARK})?")


def refuse_names(cluster: PodOptions) -> None:
    if not cluster.image or any(letter.isspace() for letter in cluster.image):
        raise ConfigError(f"--image {cluster.image!r} is no image name.")
    named = {
        "volume": [claim for claim, _ in cluster.volumes],
        "secret": cluster.secrets,
        "image-pull-secret": cluster.pull_secrets,
        "service-account": [cluster.service_account] if cluster.service_account is not None else [],
        "runtime": [cluster.runtime],
    }
    for flag, names in named.items():
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"--{flag}: {name!r} cannot be a name on Kubernetes: use lower-case letters, digits and hyphens."
                )
    if cluster.namespace is not None and not _NAMESPACE.fullmatch(cluster.namespace):
        raise ConfigError(f"--namespace {cluster.namespace!r}: use lower-case letters, digits and hyphens.")
    for flag, pairs in {"label": cluster.labels, "node-selector": cluster.node_selector}.items():
        for key, value in pairs:
            _refuse_label(f"--{flag} {key}={value}", key, value)
    for text in cluster.tolerations:
        key, equals, value = text.partition(":")[0].partition("=")
        if key or equals:  # an empty key tolerates all taints
            _refuse_label(f"--toleration {text}", key, value)
    _refuse_paths(cluster)


def _refuse_label(given: str, key: str, value: str) -> None:
    for text, form in ((key, _KEY), (value, _VALUE)):
        if not form.fullmatch(text):
            raise ConfigError(
                f"{given}: {text!r} is not valid on Kubernetes: use letters, digits, '-', '_' and '.', at most 63."
            )


def _refuse_paths(cluster: PodOptions) -> None:
    own = {PurePosixPath(TASK_FOLDER): "the task", PurePosixPath("/dev/shm"): "shared memory"}
    taken: dict[PurePosixPath, str] = {}
    volumes = [
        (claim, path, f"--volume {claim}:{path}", "CLAIM:/PATH, as in runs:/runs") for claim, path in cluster.volumes
    ]
    scratch = [("scratch", path, f"--scratch {path}", "/PATH, as in /cache") for path in cluster.scratch]
    for what, path, given, form in [*volumes, *scratch]:
        place = PurePosixPath(path)
        if not place.is_absolute() or place == PurePosixPath("/") or ".." in place.parts or ":" in path:
            flag, _, text = given.partition(" ")
            raise ConfigError(f"{flag} takes {form}, not {text!r}.")
        for other, name in own.items():
            if place.is_relative_to(other):
                raise ConfigError(f"{given}: {name} is mounted at {other}. Choose another path.")
        if place in taken:
            raise ConfigError(f"{given}: {taken[place]} is mounted there. Choose another path.")
        taken[place] = what
