"""Creates manifests by the `kubernetes` client: all of them, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rung.errors import ConfigError, EnvironmentProblem

_OPERATORS = {
    "JobSet": "JobSet is not installed there. Use --form job, which needs no operator, or install it.",
    "TrainJob": "Kubeflow Trainer is not installed there. Use --form job, which needs no operator, or install it.",
}
# What else is made: the class of the client that knows the kind, and its name there.
_KINDS = {
    "ConfigMap": ("CoreV1Api", "config_map"),
    "Secret": ("CoreV1Api", "secret"),
    "ServiceAccount": ("CoreV1Api", "service_account"),
    "Service": ("CoreV1Api", "service"),
    "NetworkPolicy": ("NetworkingV1Api", "network_policy"),
    "Job": ("BatchV1Api", "job"),
}
_FORBIDDEN, _NOT_FOUND, _CONFLICT = 403, 404, 409


def apply(manifests: list[dict[str, Any]], namespace: str | None) -> str:
    """Create them in order. Returns the namespace that they are in.

    The cluster judges all of them before the first is made, and what was made goes again if one fails after all.
    """
    cluster, namespace = _connect(namespace)
    for manifest in manifests:
        _call(cluster, "create", manifest, namespace, dry_run="All")
    made: list[dict[str, Any]] = []
    for manifest in manifests:
        try:
            _call(cluster, "create", manifest, namespace)
        except BaseException:
            for older in reversed(made):
                _call(cluster, "delete", older, namespace)
            raise
        made.append(manifest)
    return namespace


def _connect(namespace: str | None) -> tuple[Any, str]:
    try:
        import kubernetes
    except ImportError:
        raise EnvironmentProblem(
            "submitting to Kubernetes needs its client: pip install 'rung[k8s]'. Without it, --dry-run prints what "
            "`kubectl apply -f -` takes."
        ) from None
    config: Any = kubernetes.config
    try:
        config.load_kube_config()
        return kubernetes.client, namespace or _own_namespace(config)
    except config.ConfigException as error:
        problem = error
    try:
        config.load_incluster_config()  # a pod may submit, too; it has no contexts
    except config.ConfigException:
        raise EnvironmentProblem(
            f"there is no cluster to submit to: {problem} Name one in ~/.kube/config or KUBECONFIG, or print the "
            "manifests with --dry-run."
        ) from None
    return kubernetes.client, namespace or "default"


def _own_namespace(config: Any) -> str:
    """That of the current context."""
    _, current = config.list_kube_config_contexts()
    return str(current["context"].get("namespace", "default"))


def _call(client: Any, verb: str, manifest: Mapping[str, Any], namespace: str, **options: Any) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        _method(client, verb, manifest, namespace)(**options)
    except client.ApiException as error:
        raise ConfigError(f"the cluster takes no {kind} {name}: {_why(error, kind, name)}") from None
    except Exception as error:
        if not type(error).__module__.startswith("urllib3"):
            raise
        raise EnvironmentProblem(f"the cluster does not answer: {error}") from None


def _method(client: Any, verb: str, manifest: Mapping[str, Any], namespace: str) -> Callable[..., Any]:
    """The client's function for what is to be done with a kind of manifest."""
    kind = manifest["kind"]
    is_new = verb == "create"
    what: dict[str, Any] = {"body": manifest, "field_validation": "Strict"} if is_new else {}
    if kind in _OPERATORS:
        group, _, version = manifest["apiVersion"].partition("/")
        what |= {"group": group, "version": version, "plural": f"{kind.lower()}s"}
        method = getattr(client.CustomObjectsApi(), f"{verb}_namespaced_custom_object")
    else:
        api, word = _KINDS[kind]
        method = getattr(getattr(client, api)(), f"{verb}_namespaced_{word}")
    if not is_new:
        what |= {"name": manifest["metadata"]["name"], "propagation_policy": "Background"}
    return lambda **options: method(namespace=namespace, **what, **options)


def _why(error: Any, kind: str, name: str) -> str:
    """What the cluster says, and what to do."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    if error.status == _CONFLICT:
        return f"there is one of this name. Delete it, or choose another: --name NAME. ({message})"
    if error.status == _NOT_FOUND and kind in _OPERATORS:
        return _OPERATORS[kind]
    if error.status == _FORBIDDEN:
        return f"{message}. If you may not make it yourself, let somebody apply what --dry-run prints."
    return str(message)
