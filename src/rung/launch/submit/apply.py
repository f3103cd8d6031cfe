"""Creates manifests with the `kubernetes` client: all of them, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rung.errors import ConfigError, EnvironmentProblem

_OPERATORS = {
    "JobSet": "JobSet is not installed there. Use --form job, which needs no operator, or install it.",
    "TrainJob": "Kubeflow Trainer is not installed there. Use --form job, which needs no operator, or install it.",
}
# Built-in kinds: the client's API class, and the kind's name in its methods.
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
    """Create the manifests in order. Returns their namespace.

    The cluster validates all of them in a dry run first. If one fails after all, those already created are deleted.
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
        import kubernetes  # optional package
    except ImportError:
        raise EnvironmentProblem(
            "submitting to Kubernetes needs its client: pip install 'rung[k8s]'. Without it, --dry-run prints "
            "manifests for `kubectl apply -f -`."
        ) from None
    config: Any = kubernetes.config
    try:
        config.load_kube_config()
        return kubernetes.client, namespace or _own_namespace(config)
    except config.ConfigException as error:
        problem = error
    try:
        config.load_incluster_config()  # inside a pod, which has no contexts
    except config.ConfigException:
        raise EnvironmentProblem(
            f"there is no cluster to submit to: {problem} Name one in ~/.kube/config or KUBECONFIG, or print the "
            "manifests with --dry-run."
        ) from None
    return kubernetes.client, namespace or "default"


def _own_namespace(config: Any) -> str:
    """The namespace of the current context."""
    _, current = config.list_kube_config_contexts()
    return str(current["context"].get("namespace", "default"))


def _call(client: Any, verb: str, manifest: Mapping[str, Any], namespace: str, **options: Any) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    try:
        _method(client, verb, manifest, namespace)(**options)
    except client.ApiException as error:
        raise ConfigError(f"the cluster refused the {kind} {name}: {_why(error, kind)}") from None
    except Exception as error:
        if not type(error).__module__.startswith("urllib3"):
            raise
        raise EnvironmentProblem(f"the cluster does not answer: {error}") from None


def _method(client: Any, verb: str, manifest: Mapping[str, Any], namespace: str) -> Callable[..., Any]:
    """The client's method for a verb and the manifest's kind."""
    kind = manifest["kind"]
    is_new = verb == "create"
    arguments: dict[str, Any] = {"body": manifest, "field_validation": "Strict"} if is_new else {}
    if kind in _OPERATORS:
        group, _, version = manifest["apiVersion"].partition("/")
        arguments |= {"group": group, "version": version, "plural": f"{kind.lower()}s"}
        method = getattr(client.CustomObjectsApi(), f"{verb}_namespaced_custom_object")
    else:
        api, word = _KINDS[kind]
        method = getattr(getattr(client, api)(), f"{verb}_namespaced_{word}")
    if not is_new:
        arguments |= {"name": manifest["metadata"]["name"], "propagation_policy": "Background"}
    return lambda **options: method(namespace=namespace, **arguments, **options)


def _why(error: Any, kind: str) -> str:
    """The cluster's reason, and what to do."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = str(error.reason)
    if error.status == _CONFLICT:
        return f"there is one with this name. Delete it, or choose another: --name NAME. ({message})"
    if error.status == _NOT_FOUND and kind in _OPERATORS:
        return _OPERATORS[kind]
    if error.status == _FORBIDDEN:
        return f"{message}. If you may not create it, ask an administrator to apply the output of --dry-run."
    return str(message)
