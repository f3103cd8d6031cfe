"""Addresses of stores, and what is tried again, in the memory of this process and on its disk."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rung.cli.main import main
from rung.errors import ConfigError, EnvironmentProblem, StoreError
from rung.system.store import Store, check_address, is_store, masked
from tests.cli.test_commands_ranks import TASK

pytest.importorskip("fsspec")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_objects_are_put_listed_read_and_removed(tmp_path: Path, scheme: str) -> None:
    store = Store(f"{scheme}://{tmp_path}/place")
    assert store.sizes() == {}
    store.put("a/b.json", b"hello")
    (tmp_path / "file").write_bytes(b"x" * 10**6)
    store.put_file(tmp_path / "file", "a/c")
    assert store.sizes() == {"a/b.json": 5, "a/c": 10**6} and store.sizes("a") == store.sizes()
    assert store.get("a/b.json", 5) == b"hello"
    with pytest.raises(StoreError, match=r"a/b\.json is larger than 4 bytes"):
        store.get("a/b.json", 4)
    with pytest.raises(FileNotFoundError):
        store.get("a/d", 4)
    store.get_file("a/c", tmp_path / "there" / "c")
    assert (tmp_path / "there" / "c").stat().st_size == 10**6
    before = store.version("a/c")
    store.put("a/c", b"y" * 10**6)
    assert store.version("a/c") != before or scheme == "memory"
    store.remove(["a/c", "a/d"])
    assert store.sizes() == {"a/b.json": 5}


def test_a_failure_that_passes_is_tried_again_and_another_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    store = Store("memory://again", patience=5, touch=lambda: touched.append(1))
    files: Any = store._files
    errors: list[Exception] = [OSError("busy"), ConnectionError("gone")]
    right = files.pipe_file

    def pipe(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        right(*arguments)

    monkeypatch.setattr(files, "pipe_file", pipe)
    store.put("a", b"1")
    assert store.get("a", 1) == b"1" and len(touched) > 2
    errors = [OSError("busy"), PermissionError("not yours: https://me:secret@host/x?Signature=abc")]
    with pytest.raises(
        StoreError, match=r"memory://again/a could not be written: not yours: https://\*\*\*host/x\*\*\*\.$"
    ):
        store.put("a", b"2")
    assert len(errors) == 1  # it was not tried again
    hasty = Store("memory://again", patience=0.1)
    monkeypatch.setattr(hasty._files, "pipe_file", lambda *_: (_ for _ in ()).throw(OSError("busy")))
    with pytest.raises(StoreError, match=r"could not be written: busy\."):
        hasty.put("a", b"3")


def test_names_that_lead_out_of_their_folder_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store("memory://names")
    found = {f"/names/{name}": {"size": 1, "type": "file"} for name in ("good", "../bad", "a/../../bad", "a//b")}
    monkeypatch.setattr(store._files, "find", lambda *_, **__: found)
    assert store.sizes() == {"good": 1}


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3://user:verysecret@bucket/run", r"--out s3://\*\*\*bucket/run: an address must hold no user, password"),
        ("s3://bucket/run?X-Amz-Signature=verysecret", r"must hold no user, password or signature"),
        ("s3://", r"names no place in a store"),
        ("s3://bucket/../run", r"names no place in a store"),
        ("ftp://host/run", r"--out ftp://host/run: Rung knows the stores s3://, gs://, file://"),
    ],
)
def test_addresses_that_are_refused(address: str, problem: str) -> None:
    assert is_store(address)
    with pytest.raises(ConfigError, match=problem) as caught:
        check_address(address, "--out")
    assert "verysecret" not in str(caught.value) and "verysecret" not in masked(address)


def test_paths_are_no_addresses() -> None:
    assert not any(is_store(path) for path in ("runs/a", "/a/b", "a:b", "C:", "./s3:x", None, True))
    assert check_address("s3://bucket/run/", "--out") == "s3://bucket/run"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else found(name))
    with pytest.raises(EnvironmentProblem, match=r"needs the package gcsfs, .* pip install 'rung\[gs\]'"):
        check_address("gs://bucket/run", "--out")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--out", "memory://run"], "the memory of one process is not that of its ranks. Use file:///DIRECTORY."),
        (["--out", "s3://me:verysecret@bucket/run"], "must hold no user, password"),
        (["--init", "s3://me:verysecret@bucket/llama"], "--init s3://***bucket/llama: an address must hold no user"),
        (["--resume", "file://{0}/nothing"], "there is no run in file://{0}/nothing: it has no config.toml."),
        (["--out", "file://{0}/taken"], "--out file://{0}/taken holds a run already, or something else."),
        (["--resume", "file://{0}/a", "--out", "file://{0}/b"], "are two places, but a run is resumed in its own"),
    ],
)
def test_train_refuses_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rung.launch.train_command.start_fork_server", lambda: None)
    (tmp_path / "task.py").write_text(TASK)
    Store(f"file://{tmp_path}/taken").put("something", b"else")
    assert main(["train", "task.py", *(word.format(tmp_path) for word in words)]) == 2
    said = capsys.readouterr()
    assert problem.format(tmp_path) in said.err and "verysecret" not in said.out + said.err


def test_a_machine_without_rank_0_sends_no_file_of_an_earlier_time(tmp_path: Path) -> None:
    """Its metrics are those with which the run was resumed; rank 0's machine writes on."""
    from rung.launch.stored_run import FolderMirror

    url, here = f"file://{tmp_path}/store", tmp_path / "here"
    (here / "logs").mkdir(parents=True)
    (here / "metrics.jsonl").write_text("old\n")
    store = Store(url)
    store.put("metrics.jsonl", b"old\nnew\n")
    mirror = FolderMirror(here, url, patience=1, only_new=True)
    (here / "logs" / "rank-1.log").write_text("said")
    mirror.finish()
    assert store.get("metrics.jsonl", 100) == b"old\nnew\n"
    assert store.get("logs/rank-1.log", 100) == b"said"
    FolderMirror(here, url, patience=1).finish()
    assert store.get("metrics.jsonl", 100) == b"old\n"


def test_what_one_rank_finds_in_a_store_goes_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.launch.stored_run import StoredRun, find_stored_run

    monkeypatch.chdir(tmp_path)
    url = f"file://{tmp_path}/store"
    assert not find_stored_run(url, "--out", is_new=None).goes_on
    store = Store(url)
    for name, content in {"run": b"abc", "config.toml": b"steps = 3\n", "metrics.jsonl": b"{}\n"}.items():
        store.put(name, content)
    found = find_stored_run(url, "--resume", is_new=False)
    assert found.goes_on and not found.folder.exists(), "to look changes nothing here"
    other = StoredRun.from_json(found.to_json())
    assert other == found
    other.fetch()
    assert (other.folder / "config.toml").read_text() == "steps = 3\n"
    written = (other.folder / "config.toml").stat().st_mtime_ns
    other.fetch()
    assert (other.folder / "config.toml").stat().st_mtime_ns == written
    assert (other.folder / ".state" / "store").read_text() == url
