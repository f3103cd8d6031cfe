"""`rung submit k8s` without --dry-run: the real client, against a server that answers as the API does."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from rung.cli.main import main
from rung.spec.template import write_template


class Api(ThreadingHTTPServer):
    """Takes everything, but for what it is told to refuse."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, dict[str, list[str]], Any]] = []
        self.refusals: dict[
            tuple[str, bool], tuple[int, str]
        ] = {}  # by the last word of the path, and if it is a trial

    @property
    def made(self) -> list[str]:
        """What was created in earnest, and not deleted since."""
        found: list[str] = []
        for verb, path, query, body in self.requests:
            last = path.rpartition("/")[2]
            if verb == "POST" and "dryRun" not in query and (last, False) not in self.refusals:
                found.append(f"{last}/{body['metadata']['name']}")
            elif verb == "DELETE":
                found.remove("/".join(path.split("/")[-2:]))
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_DELETE(self) -> None:
        self._answer(None)

    def _answer(self, body: Any) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        self.server.requests.append((self.command, url.path, query, body))
        code, told = 201, body or {"kind": "Status", "status": "Success"}
        if refusal := self.server.refusals.get((url.path.rpartition("/")[2], "dryRun" in query)):
            code, told = refusal[0], {"kind": "Status", "code": refusal[0], "message": refusal[1]}
        payload = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


def write_kubeconfig(path: Path, port: int) -> None:
    context = {"cluster": "here", "user": "me", "namespace": "lab"}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "users": [{"name": "me", "user": {"token": "none"}}],
                "contexts": [{"name": "here", "context": context}],
            }
        )
    )


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        write_kubeconfig(tmp_path / "config", server.server_address[1])
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        # The client has read its path when it was imported.
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    task = write_template(tmp_path / "small")
    common = ["--image", "rung", "--volume", "runs:/runs", "--checkpoint-every", "5", "--out", "/runs/a"]
    return ["submit", "k8s", str(task), *common, "--name", "small"]


def test_all_manifests_are_judged_and_then_made(api: Api, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words, "--nodes", "1:3"]
    assert main([*words, "--dry-run"]) == 0
    rendered = list(yaml.safe_load_all(capsys.readouterr().out))
    assert not api.requests, "a dry run asks nobody"
    assert main(words) == 0
    kinds = ["configmaps", "secrets", "networkpolicies", "services", "jobs", "jobs"]
    roots = ["/api/v1", "/api/v1", "/apis/networking.k8s.io/v1", "/api/v1", "/apis/batch/v1", "/apis/batch/v1"]
    paths = [f"{root}/namespaces/lab/{kind}" for root, kind in zip(roots, kinds, strict=True)]
    assert [(verb, path) for verb, path, _, _ in api.requests] == [("POST", path) for path in paths * 2]
    assert ["dryRun" in query for _, _, query, _ in api.requests] == [True] * 6 + [False] * 6
    assert {query["fieldValidation"][0] for _, _, query, _ in api.requests} == {"Strict"}
    judged, made = ([body for _, _, _, body in requests] for requests in (api.requests[:6], api.requests[6:]))
    assert judged == made
    key, other = (manifests[1].pop("stringData")["RUNG_RDZV_KEY"] for manifests in (made, rendered))
    assert made == rendered and key != other, "each job has a key of its own"
    told = capsys.readouterr().out
    assert "submitted job small to the namespace lab; the run is /runs/a" in told
    assert key not in told
    every = "job,service,networkpolicy,secret,configmap"
    assert f"kubectl delete {every} -n lab -l app.kubernetes.io/instance=small" in told


def test_a_custom_kind_goes_to_its_own_group(api: Api, words: list[str]) -> None:
    assert main([*words, "--form", "jobset", "--namespace", "night"]) == 0
    assert api.requests[-1][1] == "/apis/jobset.x-k8s.io/v1alpha2/namespaces/night/jobsets"
    assert main([*words, "--form", "trainjob"]) == 0
    assert api.requests[-1][1] == "/apis/trainer.kubeflow.org/v1alpha1/namespaces/lab/trainjobs"
    assert api.requests[-2][1] == "/api/v1/namespaces/lab/serviceaccounts"


@pytest.mark.parametrize(
    ("form", "kind", "code", "message", "told"),
    [
        ("job", "jobs", 409, 'jobs.batch "small" already exists', "choose another: --name NAME"),
        ("job", "configmaps", 403, "configmaps is forbidden", "refused the ConfigMap small-task: configmaps is"),
        ("job", "networkpolicies", 403, "forbidden", "forbidden. If you may not create it, ask an administrator"),
        ("jobset", "jobsets", 404, "the server could not find", "JobSet is not installed there. Use --form job"),
        ("trainjob", "trainjobs", 404, "the server could not find", "Kubeflow Trainer is not installed there"),
    ],
)
def test_what_the_cluster_refuses_is_told_and_nothing_is_made(
    api: Api,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    form: str,
    kind: str,
    code: int,
    message: str,
    told: str,
) -> None:
    api.refusals[kind, True] = (code, message)
    assert main([*words, "--form", form]) == 2
    assert told in capsys.readouterr().err
    assert api.made == []


def test_what_was_made_goes_again_if_the_rest_cannot_be(
    api: Api, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    api.refusals["jobs", False] = (403, "exceeded quota")
    assert main([*words, "--nodes", "2"]) == 2
    assert "exceeded quota" in capsys.readouterr().err
    assert [verb for verb, *_ in api.requests if verb == "DELETE"] == ["DELETE"] * 4
    assert api.made == []


def test_a_cluster_that_does_not_answer_is_told(
    api: Api, words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_kubeconfig(tmp_path / "config", 9)  # nobody listens there
    assert main(words) == 2
    assert "the cluster does not answer" in capsys.readouterr().err


def test_without_a_cluster_or_its_client_the_way_out_is_told(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = str(tmp_path / "nowhere")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", nowhere)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(words) == 2
    assert "there is no cluster to submit to" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    assert main(words) == 2
    assert "pip install 'rung[k8s]'" in capsys.readouterr().err
