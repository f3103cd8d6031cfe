from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rung.launch import run_folder
from rung.launch.rendezvous.elastic import ElasticPolicy, running_launcher
from rung.launch.resume import CONFIG
from rung.launch.run_folder import RunFolder


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path, said: list[str]) -> RunFolder:
    run = tmp_path / "run"
    run.mkdir()
    (run / CONFIG).write_text("steps = 3\n")
    made = RunFolder(run, run / ".state", ElasticPolicy((1, 1)), said.append)
    made.restore()
    return made


def test_a_directory_removed_while_the_job_runs_gets_its_settings_back(folder: RunFolder, said: list[str]) -> None:
    """Else a launcher that is started after this one was killed finds checkpoints there, and no run to resume."""
    folder.restore_if_removed()
    assert said == []
    shutil.rmtree(folder.path)
    folder._checked = 0.0
    folder.restore_if_removed()
    assert (folder.path / CONFIG).read_text() == "steps = 3\n"
    assert folder.logs.is_dir() and running_launcher(folder.state)
    assert len(said) == 1 and "was removed while the job runs" in said[0]


def test_a_removed_directory_that_cannot_be_made_again_is_tried_later(
    folder: RunFolder, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(folder.path)
    folder.path.touch()  # in its place
    folder._checked = 0.0
    folder.restore_if_removed()
    assert said == []
    folder.path.unlink()
    monkeypatch.setattr(run_folder, "_CHECK_SECONDS", 0.0)
    folder.restore_if_removed()
    assert (folder.path / CONFIG).exists() and len(said) == 1
