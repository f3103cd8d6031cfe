"""`rung submit k8s`: what it renders is what the API takes, says what was asked, and reaches a cluster whole or not."""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from rung.cli.main import main
from rung.errors import RESUME_EXIT_CODE
from rung.launch.submit.manifest_yaml import write_documents
from tests.pods import expand

ROOT = Path(__file__).parent.parent.parent.parent
SCHEMAS = ROOT / "tests" / "schemas"
# The oldest Kubernetes whose Jobs have all that is used, and the newest that is known.
VERSIONS = ("1.33", kubernetes_validate.latest_version())

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shapes
from parts import layer

defaults = {"batch_size": 12, "steps": 4}


def model(width=shapes.WIDTH):
    return nn.Sequential(layer(4, width), nn.Tanh(), layer(width, 4))


def train_data():
    return TensorDataset(torch.zeros(24, 4), torch.zeros(24, 4))


def loss(output, target):
    return ((output - target) ** 2).mean()


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)
"""


@pytest.fixture
def task(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    (folder / "parts").mkdir(parents=True)
    (folder / "task.py").write_text(TASK)
    (folder / "shapes.py").write_text("WIDTH = 6\n")
    (folder / "unused.py").write_text("raise AssertionError\n")
    (folder / "parts" / "__init__.py").write_text("from torch.nn import Linear as layer\n")
    yield folder / "task.py"
    for name in ("shapes", "parts"):  # of another test, they would lie elsewhere
        sys.modules.pop(name, None)


def submit(task: Path, *arguments: str) -> int:
    words = ["submit", "k8s", str(task), "--image", "registry.example/rung:1", "--volume", "runs:/runs"]
    return main([*words, "--checkpoint-every", "2", *arguments])


def render(capsys: pytest.CaptureFixture[str], task: Path, *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert submit(task, "--dry-run", *arguments) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def refusal(capsys: pytest.CaptureFixture[str], task: Path, *arguments: str) -> str:
    assert submit(task, *arguments) == 2
    return capsys.readouterr().err


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job["spec"]["template"]["spec"]
    return found


def validate(manifest: dict[str, Any]) -> None:
    """By the schemas of the API, with every unknown field an error."""
    if manifest["kind"] in ("JobSet", "TrainJob"):
        schema = json.loads((SCHEMAS / f"{manifest['kind'].lower()}.json").read_text())
        jsonschema.validate(manifest, schema, jsonschema.Draft202012Validator)
    if manifest["kind"] == "JobSet":
        for job in manifest["spec"]["replicatedJobs"]:
            named = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
            validate({**named, "spec": job["template"]["spec"]})
    elif manifest["kind"] == "TrainJob":
        validate(_pod_of_train_job(manifest["spec"]))
    else:
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def _pod_of_train_job(spec: dict[str, Any]) -> dict[str, Any]:
    """The pod that its runtime would make of it: its parts have the types of Kubernetes."""
    trainer, (patch,) = spec["trainer"], spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    whole = {**container, **{key: trainer[key] for key in ("image", "command", "args", "env")}}
    whole["resources"] = trainer.get("resourcesPerNode", {})
    pod = {**template["spec"], "containers": [whole]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}, "spec": pod}


MUCH = (
    "--namespace", "lab", "--gpus-per-node", "8", "--cpus", "16", "--memory", "64Gi", "--shm-size", "8Gi",
    "--volume", "data:/data", "--env", "NCCL_DEBUG=INFO", "--service-account", "trainer", "--image-pull-secret", "key",
    "--node-selector", "gpu=h100", "--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=a",
    "--label", "kueue.x-k8s.io/queue-name=night", "--strategy", "fsdp",
)  # fmt: skip


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("nodes", ["1", "3", "1:4"])
def test_every_manifest_is_what_the_api_takes(
    capsys: pytest.CaptureFixture[str], task: Path, form: str, nodes: str
) -> None:
    if form == "trainjob" and ":" in nodes:
        assert "fixed number of nodes" in refusal(capsys, task, "--form", form, "--nodes", nodes)
        return
    for further in ((), MUCH):
        for manifest in render(capsys, task, "--form", form, "--nodes", nodes, *further):
            validate(manifest)


def test_validation_notices_what_is_wrong(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    for form, path in {"job": ("spec",), "jobset": ("spec", "network"), "trainjob": ("spec", "trainer")}.items():
        manifest = render(capsys, task, "--form", form)[-1]
        place = manifest
        for key in path:
            place = place[key]
        place["backoffLimits"] = 3
        with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
            validate(manifest)


def test_a_fixed_number_of_pods_meets_at_the_first(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    manifests = render(capsys, task, "--nodes", "3", "--nproc", "2", "--name", "alpha")
    kinds = ["ConfigMap", "Secret", "NetworkPolicy", "Service", "Job"]
    assert [manifest["kind"] for manifest in manifests] == kinds
    *_, service, job = manifests
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    pod = pod_of(job)
    assert pod["subdomain"] == service["metadata"]["name"] == "alpha"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 3, 3)
    words = pod["containers"][0]["args"]
    assert words[words.index("--nnodes") + 1] == "3" and words[words.index("--nproc") + 1] == "2"
    assert words[words.index("--rdzv") + 1] == "alpha-0.alpha:29400"
    assert "--resume-if-there" in words


def test_an_elastic_job_meets_in_a_pod_of_its_own(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    manifests = render(capsys, task, "--nodes", "2:4", "--name", "alpha")
    rendezvous, workers = of_kind(manifests, "Job")
    assert rendezvous["metadata"]["name"] == "alpha-rendezvous"
    assert pod_of(rendezvous)["containers"][0]["args"] == ["rdzv", "29400", "--once"]
    words = pod_of(workers)["containers"][0]["args"]
    assert words[words.index("--nnodes") + 1] == "2:4"
    assert words[words.index("--rdzv") + 1] == "alpha-rendezvous-0.alpha:29400"
    spec = workers["spec"]
    assert (spec["completions"], spec["parallelism"], spec["maxFailedIndexes"]) == (4, 4, 2)
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 2}]}
    (job_set,) = of_kind(render(capsys, task, "--nodes", "2:4", "--name", "alpha", "--form", "jobset"), "JobSet")
    first, second = job_set["spec"]["replicatedJobs"]
    assert (first["name"], second["name"]) == ("rendezvous", "workers")
    assert job_set["spec"]["successPolicy"]["targetReplicatedJobs"] == ["workers"]
    assert "alpha-rendezvous-0-0.alpha:29400" in second["template"]["spec"]["template"]["spec"]["containers"][0]["args"]


def test_one_pod_needs_no_meeting(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    manifests = render(capsys, task, "--nproc", "4")
    assert [manifest["kind"] for manifest in manifests] == ["ConfigMap", "NetworkPolicy", "Job"]
    assert "RUNG_RDZV_KEY" not in [variable["name"] for variable in pod_of(manifests[-1])["containers"][0]["env"]]
    assert "--rdzv" not in pod_of(manifests[-1])["containers"][0]["args"]


def test_what_a_pod_says_with_its_end(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    """Preemption and a wish to be resumed cost nothing, a mistake is final, all else is counted."""
    (job,) = of_kind(render(capsys, task, "--backoff", "5"), "Job")
    preempted, resumed, mistaken = job["spec"]["podFailurePolicy"]["rules"]
    assert preempted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert resumed["onExitCodes"]["values"] == [RESUME_EXIT_CODE] and mistaken["onExitCodes"]["values"] == [2]
    assert [rule["action"] for rule in (preempted, resumed, mistaken)] == ["Ignore", "Ignore", "FailJob"]
    assert resumed["onExitCodes"]["containerName"] == pod_of(job)["containers"][0]["name"]
    assert pod_of(job)["restartPolicy"] == "Never", "a policy for failures needs it"
    assert job["spec"]["backoffLimitPerIndex"] == 5


def test_pods_have_time_to_save_and_few_rights(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    (job,) = of_kind(render(capsys, task, "--set", "grace_seconds=100", "--shm-size", "2Gi"), "Job")
    pod = pod_of(job)
    assert pod["terminationGracePeriodSeconds"] > 100
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounts["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    assert mounts["volume-0"] == "/runs" and volumes["volume-0"]["persistentVolumeClaim"] == {"claimName": "runs"}


def pods_of(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pods of every form, the meeting place's among them."""
    found = [pod_of(job) for job in of_kind(manifests, "Job")]
    for manifest in of_kind(manifests, "JobSet"):
        found += [job["template"]["spec"]["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    return found + [_pod_of_train_job(manifest["spec"])["spec"] for manifest in of_kind(manifests, "TrainJob")]


FORMS = [("job", "2"), ("job", "1:3"), ("jobset", "2"), ("jobset", "1:3"), ("trainjob", "2")]


@pytest.mark.parametrize(("form", "nodes"), FORMS)
def test_no_pod_has_more_rights_than_it_needs(
    capsys: pytest.CaptureFixture[str], task: Path, form: str, nodes: str
) -> None:
    manifests = render(capsys, task, "--form", form, "--nodes", nodes, "--scratch", "/cache/")
    accounts = {manifest["metadata"]["name"]: manifest for manifest in of_kind(manifests, "ServiceAccount")}
    pods = pods_of(manifests)
    assert len(pods) == (2 if ":" in nodes else 1)
    for pod in pods:
        rights = pod["securityContext"]
        assert rights["runAsNonRoot"] and rights["runAsUser"] != 0
        assert rights["seccompProfile"] == {"type": "RuntimeDefault"}
        # A patch of a TrainJob has no word for it but the account's name.
        holder = accounts[pod["serviceAccountName"]] if form == "trainjob" else pod
        assert holder["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
        empty = {volume["name"] for volume in pod["volumes"] if volume.get("emptyDir") == {}}
        written = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in empty}
        assert written == ({"/tmp"} if "rdzv" in container["args"] else {"/tmp", "/cache"})
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
    named = render(capsys, task, "--form", form, "--nodes", nodes, "--service-account", "trainer")
    assert pods_of(named)[-1]["serviceAccountName"] == "trainer" and not of_kind(named, "ServiceAccount")


def test_a_claim_may_be_the_place_that_pods_write_to(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    (job,) = of_kind(render(capsys, task, "--volume", "data:/tmp", "--env", "HOME=/runs"), "Job")
    (container,) = pod_of(job)["containers"]
    assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"] == ["volume-1"]
    assert [v["value"] for v in container["env"] if v["name"] == "HOME"] == ["/runs"]


@pytest.mark.parametrize(("form", "nodes"), FORMS)
def test_pods_of_a_job_are_reached_by_one_another_alone(
    capsys: pytest.CaptureFixture[str], task: Path, form: str, nodes: str
) -> None:
    words = ("--form", form, "--nodes", nodes, "--name", "alpha")
    (policy,) = of_kind(render(capsys, task, *words), "NetworkPolicy")
    own = {"matchLabels": {"app.kubernetes.io/name": "rung", "app.kubernetes.io/instance": "alpha"}}
    assert policy["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": own}]}],
    }
    manifests = render(capsys, task, *words, "--egress", "job")
    for manifest in manifests:
        validate(manifest)
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    pods, names = policy["spec"]["egress"]
    assert pods == {"to": [{"podSelector": own}]}
    assert names == {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    for template in re.findall(r"'template': \{'metadata': \{'labels': (\{[^}]*\})", str(manifests)):
        assert own["matchLabels"].items() <= ast.literal_eval(template).items(), "the policy is for every pod"


@pytest.mark.parametrize(("form", "nodes"), FORMS)
def test_several_pods_know_each_other_by_a_key_of_their_own(
    capsys: pytest.CaptureFixture[str], task: Path, form: str, nodes: str
) -> None:
    keys = set()
    for _ in range(2):
        capsys.readouterr()
        assert submit(task, "--dry-run", "--form", form, "--nodes", nodes, "--name", "alpha") == 0
        text = capsys.readouterr().out
        manifests = list(yaml.safe_load_all(text))
        (secret,) = of_kind(manifests, "Secret")
        assert secret["metadata"]["labels"]["app.kubernetes.io/instance"] == "alpha" and secret["immutable"]
        ((name, key),) = secret["stringData"].items()
        assert name == "RUNG_RDZV_KEY" and re.fullmatch("[0-9a-f]{64}", key)
        assert text.count(key) == 1, "in the Secret alone"
        assert text.startswith("# The Secret alpha-key holds the key") and "-l app.kubernetes.io/instance=alpha" in text
        reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": name}}
        for pod in pods_of(manifests):
            assert {"name": name, "valueFrom": reference} in pod["containers"][0]["env"]
        order = [manifest["kind"] for manifest in manifests]
        assert order.index("Secret") < min(order.index(kind) for kind in order if kind in ("Job", "JobSet", "TrainJob"))
        keys.add(key)
    assert len(keys) == 2


HOSTILE = (
    "$(HOME)", "$$(HOME)", "$HOME", "a$", "$$", "$(", "yes", "NO", "null", "~", "1e3", "0x1f", "1_000", "1:30", ".inf",
    "2026-11-16", "a: b", "- a", "? a", "#a", " a ", "\ta\t", "a\n- b", "a\r\nb", "\u2028", "\x85", "\ufeffa",
    "\x1b[2J", "{{x}}", "&a", "*a", "!!int 1", "|", "> b", "%a", "@a", "`a`", "'", '"', "\\", "\\u0041", "---",
    "...", "é😀", "=", "<<",
)  # fmt: skip


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
def test_a_pod_gets_the_words_and_variables_as_they_were_given(
    capsys: pytest.CaptureFixture[str], task: Path, form: str
) -> None:
    """Through YAML, and through the kubelet, for which $(NAME) is a variable."""
    given = [word for number, text in enumerate(HOSTILE) for word in ("--env", f"V{number}={text}")]
    out = f"/runs/{'|'.join(HOSTILE)}"
    (pod,) = pods_of(render(capsys, task, "--form", form, f"--out={out}", *given))
    (container,) = pod["containers"]
    environment: dict[str, str] = {}
    for variable in container["env"]:
        environment[variable["name"]] = expand(variable["value"], environment)
    assert [environment[f"V{number}"] for number in range(len(HOSTILE))] == list(HOSTILE)
    words = [expand(word, environment) for word in container["args"]]
    assert words[words.index("--out") + 1] == out


def test_what_nodes_must_have_is_asked_for(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    manifests = render(capsys, task, "--nodes", "2", *MUCH, "--secret", "wandb")
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"lab"}
    assert {manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] for manifest in manifests} == {"night"}
    pod = pod_of(manifests[-1])
    container = pod["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "16", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": 8},
    }
    assert {"name": "NCCL_DEBUG", "value": "INFO"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    assert pod["imagePullSecrets"] == [{"name": "key"}] and pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "a"},
    ]
    words = container["args"]
    assert words[words.index("--nproc") + 1] == "8", "one for each GPU"


def test_the_task_goes_along_with_what_it_imports(
    capsys: pytest.CaptureFixture[str], task: Path, tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text("seed = 3\n")
    (task.parent / "words.txt").write_text("é: '#'\n\n  three\n")
    further = ("--config", str(tmp_path / "settings.toml"), "--ship", str(task.parent / "words.txt"))
    files, _, job = render(capsys, task, *further)
    (volume,) = [volume for volume in pod_of(job)["volumes"] if "configMap" in volume]
    found = {item["path"]: files["data"][item["key"]] for item in volume["configMap"]["items"]}
    assert found == {
        "small/task.py": TASK,
        "small/shapes.py": "WIDTH = 6\n",
        "small/parts/__init__.py": (task.parent / "parts" / "__init__.py").read_text(),
        "small/settings.toml": "seed = 3\n",
        "small/words.txt": "é: '#'\n\n  three\n",
    }
    words = pod_of(job)["containers"][0]["args"]
    assert words[:2] == ["train", "/task/small/task.py"]
    assert words[words.index("--config") + 1] == "/task/small/settings.toml"
    (job,) = of_kind(render(capsys, task, "--task-in-image", "/opt/tasks/small"), "Job")
    assert pod_of(job)["containers"][0]["args"][1] == "/opt/tasks/small"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--out", "runs/a"), "--out runs/a is on none of the volumes (/runs), and would be lost with its pod"),
        (("--resume", "runs/a"), "--out /runs/RUN: a run that is there is resumed"),
        (("--memory", "64 GB"), "--memory 64 GB is no Kubernetes quantity"),
        (("--volume", "data"), "--volume takes CLAIM:/PATH"),
        (("--volume", "data:/task/data"), "the task is mounted at /task"),
        (("--volume", "data:/runs"), "runs is mounted there"),
        (("--volume", "data:/data:ro"), "--volume takes CLAIM:/PATH"),
        (("--volume", "data://"), "--volume takes CLAIM:/PATH"),
        (("--volume", "data:/a/../b"), "--volume takes CLAIM:/PATH"),
        (("--volume", "My_Claim:/data"), "'My_Claim' cannot be a name"),
        (("--scratch", "cache"), "--scratch takes /PATH, as in /cache, not 'cache'"),
        (("--scratch", "/runs"), "runs is mounted there"),
        (("--scratch", "/dev/shm/x"), "shared memory is mounted at /dev/shm"),
        (("--env", "RUNG_RDZV_KEY=0123456789abcdef"), "a key of its own"),
        (("--env", "A=\udcff"), "is no text in UTF-8"),
        (("--secret", "My Secret"), "'My Secret' cannot be a name"),
        (("--namespace", "My NS"), "--namespace 'My NS'"),
        (("--label", "a b=c"), "'a b' is not valid on Kubernetes"),
        (("--node-selector", "a=" + "b" * 64), "at most 63"),
        (("--toleration", "=v:NoSchedule"), "'' is not valid on Kubernetes"),
        (("--out", "/runs/../etc"), "without '..'"),
        (("--config", "a.toml", "--task-in-image", "/a"), "as flags or with --set"),
        (("--backoff", "2", "--form", "trainjob"), "leaves to its runtime"),
        (("--runtime", "mine"), "is for --form trainjob"),
        (("--set", "keep_best=loss:min", "--set", "eval_every=never"), "eval_every=never turns them off"),
        (("--toleration", "gpu:Sometimes"), "'Sometimes' is none of the effects NoSchedule"),
        (("--backoff", "-1"), "0 times or more"),
        (("--name", "9lives"), "cannot be the name of a job on Kubernetes"),
        (("--name", "a" * 45), "at most 40"),
        (("--env", "DEBUG"), "--env takes KEY=VALUE"),
        (("--ship", "nowhere.txt"), "cannot be sent: No such file"),
        (("--ship", "a.txt", "--task-in-image", "/a"), "is there already"),
        (("--form", "trainjob", "--nproc", "1:2"), "fixed number of processes"),
        (("--form", "trainjob", "--secret", "wandb"), "takes no whole Secret"),
        (("--nodes", "2", "--strategy", "tp3"), "3"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], task: Path, arguments: tuple[str, ...], told: str
) -> None:
    assert told in refusal(capsys, task, "--dry-run", *arguments)


def test_a_run_in_a_store_needs_no_volume(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    pytest.importorskip("s3fs")
    words = ["submit", "k8s", str(task), "--image", "registry.example/rung:1", "--dry-run", "--nodes", "2"]
    assert main([*words, "--checkpoint-every", "2", "--out", "s3://bucket/run"]) == 0
    manifests = list(yaml.safe_load_all(capsys.readouterr().out))
    for manifest in manifests:
        validate(manifest)
    (job,) = of_kind(manifests, "Job")
    (container,) = pod_of(job)["containers"]
    assert container["args"][container["args"].index("--out") + 1] == "s3://bucket/run"
    assert "--resume-if-there" in container["args"]
    assert {"name": "RUNG_STORE_CACHE", "value": "/tmp/runs"} in container["env"]
    assert main([*words, "--egress", "job", "--out", "s3://bucket/run"]) == 2
    assert "--out s3://bucket/run is elsewhere" in capsys.readouterr().err
    assert main([*words, "--resume", "s3://bucket/run", "--out", "s3://bucket/run"]) == 2
    assert "in --out s3://BUCKET/RUN: a run that is there is resumed" in capsys.readouterr().err
    assert main(words) == 2
    assert "Or keep the run in a store: --out s3://BUCKET/RUN." in capsys.readouterr().err


def test_files_that_would_be_one_beside_the_task_are_refused(
    capsys: pytest.CaptureFixture[str], task: Path, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text("")
        (tmp_path / folder / "words.txt").write_text(folder)
    words = [str(tmp_path / folder / "words.txt") for folder in ("a", "b")]
    told = refusal(capsys, task, "--dry-run", "--ship", words[0], "--ship", words[1])
    assert all(path in told for path in words) and "the same file" in told
    assert "the same file" in refusal(capsys, task, "--dry-run", "--ship", str(tmp_path / "a" / "task.py"))


def test_a_task_is_submitted_from_its_own_directory(
    capsys: pytest.CaptureFixture[str], task: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where modules that name a file without a directory, as torch has, would seem to lie beside it."""
    monkeypatch.chdir(task.parent)
    odd = types.ModuleType("odd")
    odd.__file__ = "_odd.py"
    monkeypatch.setitem(sys.modules, "odd", odd)
    (job,) = of_kind(render(capsys, Path("task.py")), "Job")
    assert pod_of(job)["containers"][0]["args"][1] == "/task/small/task.py"


def test_a_volume_may_lie_inside_another(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    (job,) = of_kind(render(capsys, task, "--volume", "data:/runs/data"), "Job")
    mounts = [mount["mountPath"] for mount in pod_of(job)["containers"][0]["volumeMounts"]]
    assert {"/runs", "/runs/data"} <= set(mounts)


def test_a_run_is_looked_for_in_the_pods_and_not_here(
    capsys: pytest.CaptureFixture[str], task: Path, tmp_path: Path
) -> None:
    (tmp_path / "volume" / "run").mkdir(parents=True)
    (tmp_path / "volume" / "run" / "config.toml").write_text("")
    there = tmp_path / "volume"
    (job,) = of_kind(render(capsys, task, "--volume", f"here:{there}", "--out", f"{there}/run"), "Job")
    assert f"{there}/run" in pod_of(job)["containers"][0]["args"]


def test_results_need_a_volume(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    assert main(["submit", "k8s", str(task), "--image", "rung", "--dry-run"]) == 2
    assert "--volume CLAIM:/runs" in capsys.readouterr().err


def test_files_that_are_too_large_or_no_text_stay_here(
    capsys: pytest.CaptureFixture[str], task: Path, tmp_path: Path
) -> None:
    (tmp_path / "large").write_text("x" * 1_000_000)
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    assert "--task-in-image PATH" in refusal(capsys, task, "--dry-run", "--ship", str(tmp_path / "large"))
    assert "is no text" in refusal(capsys, task, "--dry-run", "--ship", str(tmp_path / "picture"))


def test_notes_are_told_beside_the_manifests(capsys: pytest.CaptureFixture[str], task: Path) -> None:
    words = ["submit", "k8s", str(task), "--image", "rung", "--volume", "runs:/runs", "--dry-run"]
    assert main([*words, "--form", "trainjob"]) == 0
    printed = capsys.readouterr()
    assert "without --checkpoint-every" in printed.err and "grace_seconds=20" in printed.err
    assert "note" not in printed.out


def test_yaml_means_what_was_written() -> None:
    chance = random.Random(0)
    words = [
        "true",
        "No",
        "null",
        "1",
        "1e3",
        "1:30",
        "-",
        "---",
        "--nnodes",
        "~",
        "=",
        "",
        "a: b",
        "a #b",
        "n:1",
        "a:",
    ]
    words += [
        "def f():\n\treturn 1\n\n\nx = 2\n",
        "no end\nof line",
        " indented\nfirst",
        "spaces\n  \n",
        "2026-11-15",
        "é😀",
    ]
    letters = "ab-:#~!&*|>%@`'\"{}[],? \n\t\\0.1eyn/_é\u2028\x85\x07😀"

    def value(depth: int) -> Any:
        kind = chance.random()
        if depth == 0 or kind < 0.4:
            made = "".join(chance.choices(letters, k=chance.randrange(9)))
            return chance.choice([chance.choice(words), made, chance.randrange(-9, 99), True, False])
        if kind < 0.7:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice(words): value(depth - 1) for _ in range(chance.randrange(4))}

    for _ in range(500):
        documents = [{"kind": value(3), "b": value(2)} for _ in range(2)]
        assert list(yaml.safe_load_all(write_documents(documents))) == documents


def test_words_that_kubectl_takes_for_other_things_are_quoted() -> None:
    words = ["y", "N", "yes", "on", "null", "1e3", "0o17", "12e5", "1:30"]  # some of which PyYAML would leave plain
    written = write_documents([dict.fromkeys(words, "x")]).splitlines()
    assert [line[0] for line in written] == [line[0] for line in written if line[0] in "\"'"] and len(written) == len(
        words
    )


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "containers.md").read_text()
    before, _, after = text.partition("<!-- manifest:")
    words = re.findall(r"^    rung (submit k8s .*)$", before, re.MULTILINE)[-1].split()
    shown = yaml.safe_load(after.split("```yaml\n")[1].split("```")[0])
    words[2] = str(ROOT / words[2])
    assert main(words) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out))[-1] == shown
