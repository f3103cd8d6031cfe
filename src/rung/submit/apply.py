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
_NOT_FOUND, _CONFLICT = 404, 409


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
        words = {"ConfigMap": "config_map", "Service": "service", "Job": "job"}
        api = client.BatchV1Api() if kind == "Job" else client.CoreV1Api()
        method = getattr(api, f"{verb}_namespaced_{words[kind]}")
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
    return str(message)
