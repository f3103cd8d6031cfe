"""The Dockerfile and the compose file: what tools say of them, and what they promise."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from rung.cli.main import build_parser
from rung.spec.config import count_range
from rung.spec.version import VERSION

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(sysconfig.get_path("scripts"))


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, in one line each, with those of the stages that it is built upon."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            name = match.group(2)
            found[name] = list(found.get(match.group(1), []))
        elif name and line and not line.startswith("#"):
            found[name].append(line)
    return found


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def test_the_dockerfile_is_as_hadolint_wants_it() -> None:
    lint = subprocess.run([PROGRAMS / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (lint.returncode, lint.stdout) == (0, "")


def test_the_compose_file_is_as_its_specification_wants_it() -> None:
    words = [PROGRAMS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", ROOT / "compose.yaml"]
    check = subprocess.run(words, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_rung_as_nobody_special(target: str) -> None:
    lines = stages()[target]
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000:1000"]
    assert json.loads(lines[-2].removeprefix("ENTRYPOINT ")) == ["rung"]
    assert any("useradd --uid 1000" in line for line in lines)
    assert not any(line.startswith(("COPY", "ADD")) for line in lines), "no sources, and nothing else of this machine"
    assert all("rm -rf /var/lib/apt/lists" in line for line in lines if "apt-get install" in line)
    assert any("PIP_NO_CACHE_DIR=1" in line for line in lines if line.startswith("ENV"))


def test_the_build_sees_sources_and_nothing_secret() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*", "all is left out but what is named"
    assert {line for line in lines if line.startswith("!")} == {"!pyproject.toml", "!README.md", "!LICENSE", "!src"}


def test_the_image_has_a_torch_that_rung_takes() -> None:
    (torch,) = re.findall(r"^ARG TORCH=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    (limits,) = re.findall(r'"torch>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    least, end = (tuple(map(int, limit.split("."))) for limit in limits)
    assert least <= tuple(map(int, torch.split(".")))[:2] < end
    assert VERSION


def test_workers_may_come_and_go_and_have_time_to_save() -> None:
    services = compose()["services"]
    worker = services["worker"]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in worker["command"]]
    options = build_parser().parse_args(words)
    least, most = count_range(options.nnodes, "nnodes")
    assert least < worker["deploy"]["replicas"] < most
    host, _, port = options.rdzv.partition(":")
    assert build_parser().parse_args(services[host]["command"]).place == port
    assert options.resume_if_there and Path(options.out).is_relative_to("/runs") and "runs:/runs" in worker["volumes"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > 30, "what saving may take"
    assert worker["image"] == services[host]["image"] == "rung:cpu"
    assert services[host]["build"]["target"] in stages()


def test_containers_have_a_key_and_few_rights() -> None:
    """Compose refuses to start without a key. No file of the project has one."""
    for service in compose()["services"].values():
        assert service["environment"]["RUNG_RDZV_KEY"].startswith("${RUNG_RDZV_KEY:?"), "a refusal where it is missing"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "/tmp" in service["tmpfs"] and service["environment"]["HOME"] == "/tmp"
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
