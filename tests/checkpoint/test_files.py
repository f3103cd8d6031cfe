"""Files of tensors: what is written is what others read, and what others may have written is not believed."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rung.checkpoint
from rung.checkpoint.export import export, find_source, into_shards, parse_size
from rung.checkpoint.files import DTYPES, Entry, TensorFile, bytes_of, dtype_name, write_tensors
from rung.checkpoint.manifest import MANIFEST, newest, read_checkpoint
from rung.checkpoint.packing import NeedsPickleError, pack, unpack
from rung.checkpoint.plan import read_into, read_whole
from rung.checkpoint.survey import locate
from rung.cli.main import main
from rung.errors import CheckpointError, ConfigError
from tests.made_checkpoints import evil_bytes, make_checkpoint, replace_file, rewrite

VALUES = {
    "double": torch.tensor([1.0, float("nan"), -0.0], dtype=torch.float64),
    "count": torch.tensor(7),
    "matrix": torch.arange(6.0).view(2, 3),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "bf16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "half": torch.tensor([[0.5]], dtype=torch.float16),
    "empty": torch.empty(3, 0),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "ünï→": torch.tensor([2.0]),
}


def write(path: Path, values: dict[str, Tensor]) -> tuple[int, str]:
    return write_tensors(path, [Entry(k, v.dtype, tuple(v.shape)) for k, v in values.items()], list(values.values()))


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bytes_of(one), bytes_of(other))


def test_other_readers_open_what_is_written_here(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    size, _ = write(path, VALUES)
    assert path.stat().st_size == size
    found = load_file(path)
    assert set(found) == set(VALUES)
    assert all(same(found[name], value) for name, value in VALUES.items())


def test_what_other_writers_left_is_read_here(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({name: value.contiguous() for name, value in VALUES.items()}, path, {"format": "pt", "step": "3"})
    file = TensorFile(path)
    assert file.metadata["step"] == "3"
    for name, value in VALUES.items():
        assert file.dtype_and_shape(name) == (value.dtype, tuple(value.shape))
        with file.open(name) as found:
            assert same(found, value)


def test_types_without_a_name_in_the_format_come_back(tmp_path: Path) -> None:
    value = torch.tensor([[1 + 2j, -3j]], dtype=torch.complex128)
    write(tmp_path / "x.safetensors", {"z": value})
    with TensorFile(tmp_path / "x.safetensors").open("z", torch.complex128) as found:
        assert torch.equal(found, value)
    with pytest.raises(CheckpointError, match="cannot be saved"):
        dtype_name(torch.quint8)


def test_a_tensor_of_another_type_is_not_taken_for_the_one_wanted(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": torch.ones(4, dtype=torch.int32)})
    file = TensorFile(tmp_path / "x.safetensors")
    with (
        pytest.raises(CheckpointError, match=r"x\.safetensors is damaged: a is not of type"),
        file.open("a", torch.float32),
    ):
        pass
    with pytest.raises(CheckpointError, match="it has no tensor 'b'"), file.open("b"):
        pass


def _file(header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _one(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


BOMBS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "huge header": _file(_one(), length=2**63),
    "header as long as memory": _file(_one(), length=2**40),
    "header beyond the file": _file(_one(), length=10_000),
    "empty header": _file(b"", length=0),
    "not JSON": _file(b"{'a': 1}"),
    "not text": _file(b"\xff\xfe\xfd"),
    "a list": _file([]),
    "a number": _file(b"42"),
    "nested": _file(b'{"a":' * 50_000),
    "entry as list": _file({"a": []}),
    "no type": _file({"a": {"shape": [4], "data_offsets": [0, 16]}}),
    "unknown type": _file(_one(dtype="PICKLE")),
    "type as list": _file(_one(dtype=["F32"])),
    "negative shape": _file(_one(shape=[-4])),
    "shape that overflows": _file(_one(shape=[2**62, 2**62, 0])),
    "shape as text": _file(_one(shape="4")),
    "shape as float": _file(_one(shape=[4.0])),
    "shape with a truth": _file(_one(shape=[True, 4])),
    "a thousand dims": _file(_one(shape=[1] * 1000 + [4])),
    "negative offsets": _file(_one(data_offsets=[-16, 0])),
    "offsets turned": _file(_one(data_offsets=[16, 0])),
    "beyond the end": _file(_one(data_offsets=[16, 32])),
    "wrong size": _file(_one(shape=[3])),
    "three offsets": _file(_one(data_offsets=[0, 8, 16])),
    "overlap": _file({**_one(), "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "partial overlap": _file({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
                              "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
    "a gap": _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                    "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
    "data that nobody owns": _file(_one(shape=[2], data_offsets=[0, 8])),
    "metadata as number": _file({"__metadata__": 3, **_one()}),
}  # fmt: skip


@pytest.mark.parametrize("kind", BOMBS)
def test_headers_that_lie_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BOMBS[kind])
    with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged"):
        TensorFile(path)


@pytest.mark.parametrize("kind", BOMBS)
def test_so_are_they_behind_a_digest_that_fits(tmp_path: Path, kind: str) -> None:
    folder, whole = make_checkpoint(tmp_path, 4)
    replace_file(folder, "rank-00000.safetensors", BOMBS[kind])
    told = r"rank-00000\.safetensors is damaged|is larger than its file"
    with pytest.raises(CheckpointError, match=told):
        read_whole(read_checkpoint(folder), "model/body.weight")
    with pytest.raises(CheckpointError, match=told):
        read_into({name: torch.zeros_like(value) for name, value in whole.items()}, read_checkpoint(folder))


def test_a_file_that_fits_itself_but_not_the_manifest_is_refused(tmp_path: Path) -> None:
    for number, wrong in enumerate([torch.ones(20), torch.ones(4, 5, dtype=torch.float64), torch.ones(5, 4)]):
        folder, whole = make_checkpoint(tmp_path / str(number), 4)
        path = tmp_path / "wrong"
        write(path, {"model/body.weight@0,0": wrong, "model/head.weight": whole["model/head.weight"]})
        replace_file(folder, "rank-00000.safetensors", path.read_bytes())
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged: model/body\.weight@0,0 is"):
            read_whole(read_checkpoint(folder), "model/body.weight")


def test_a_type_that_is_not_known_is_said(tmp_path: Path) -> None:
    folder, _ = make_checkpoint(tmp_path, 4)
    tensors = dict(read_checkpoint(folder).manifest["tensors"])
    rewrite(folder, tensors={**tensors, "model/table": {**tensors["model/table"], "dtype": "F4"}})
    with pytest.raises(CheckpointError, match="model/table is of type F4, which this version of Rung cannot read"):
        read_whole(read_checkpoint(folder), "model/table")


# -- code in the clothes of data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
@pytest.mark.parametrize(
    "name", [MANIFEST, ".metadata", "rank-00000.safetensors", "rank-00009.safetensors", "model.pt"]
)
@pytest.mark.parametrize("digest", ["stale", "fitting"])
def test_a_pickle_in_a_checkpoint_is_never_executed(
    tmp_path: Path, kind: str, name: str, digest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, checkpoints = tmp_path / "mark", tmp_path / "run" / "checkpoints"
    make_checkpoint(checkpoints, 2)
    folder, whole = make_checkpoint(checkpoints, 4)
    evil = evil_bytes(mark, kind)
    if digest == "fitting" and name.startswith("rank-"):
        replace_file(folder, name, evil)
    else:
        (folder / name).write_bytes(evil)
    (tmp_path / "run" / "model.safetensors").write_bytes(evil)
    (checkpoints / ".metadata").write_bytes(evil)
    found, _ = newest(checkpoints)
    assert found is not None
    spoilt = found.step == 4 and name == "rank-00000.safetensors"
    for tensor in ("model/body.weight", "model/head.weight"):
        with pytest.raises(CheckpointError, match="is damaged") if spoilt else nullcontext():
            read_whole(found, tensor)
        with pytest.raises(CheckpointError, match="is damaged") if spoilt else nullcontext():
            read_into({tensor: torch.zeros_like(whole[tensor])}, found)
    main(["checkpoints", str(tmp_path / "run")])
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out.safetensors")])
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "out.pt")])
    assert not mark.exists()


def test_the_mark_is_real(tmp_path: Path) -> None:
    pickle.loads(evil_bytes(tmp_path / "mark", "pickle"))
    assert (tmp_path / "mark").is_dir()


def test_nothing_there_can_unpickle() -> None:
    """No module of the package imports what could, or calls torch.load."""
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "importlib.util"}
    for path in sorted(Path(rung.checkpoint.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name for alias in node.names} & forbidden, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in forbidden, path
                assert not (node.module == "torch" and "load" in {alias.name for alias in node.names}), path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, path
            if isinstance(node, ast.Attribute) and node.attr in {"load", "loads", "Unpickler"}:
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner == "json", f"{path}:{node.lineno} calls {owner}.{node.attr}"


def test_plain_values_come_back_and_objects_are_refused() -> None:
    value = {"a": [1, 2.5, None, "x"], 3: (True, {"deep": float("inf")}), "t": torch.tensor([1, 2], dtype=torch.int16)}
    back = unpack(json.loads(json.dumps(pack(value, "it"))))
    assert back["a"] == value["a"] and back[3] == value[3] and torch.equal(back["t"], torch.tensor([1, 2]))
    assert back["t"].dtype == torch.int16
    for thing in (object(), print, Path("x"), torch.device("cpu"), {1, 2}, lambda: None):
        with pytest.raises(NeedsPickleError, match="only pickle could save"):
            pack({"a": thing}, "the schedule")


@pytest.mark.parametrize("value", [{}, {"dict": 3}, {"dict": [[{"dict": []}, 1]]}, {"tensor": "x", "dtype": "F32"},
    {"tensor": [1], "dtype": "OBJECT"}, {"tuple": None}, {"tensor": [[1], [1, 2]], "dtype": "I64"}])  # fmt: skip
def test_values_that_no_save_writes_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="no save writes"):
        unpack(value)


# -- export ----------------------------------------------------------------------------------------------------------


def _run(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    run = tmp_path / "run"
    make_checkpoint(run / "checkpoints", 2)
    _, whole = make_checkpoint(run / "checkpoints", 4)
    head = whole["model/head.weight"]
    return run, {
        "tied": head,
        "body.weight": whole["model/body.weight"],
        "head.weight": head,
        "count": whole["model/count"],
    }


def test_an_export_has_the_keys_and_the_order_of_the_module(tmp_path: Path) -> None:
    run, expected = _run(tmp_path)
    source = find_source(locate(run))
    assert [entry.key for entry in source.entries] == list(expected)
    export(source, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(found) == list(expected)
    assert all(same(found[name], value) for name, value in expected.items())
    assert found["tied"].data_ptr() == found["head.weight"].data_ptr()
    export(source, tmp_path / "deep" / "er" / "out.safetensors")
    found = load_file(tmp_path / "deep" / "er" / "out.safetensors")
    assert set(found) == set(expected)
    assert all(same(found[name], value) for name, value in expected.items())


def test_large_models_are_written_in_shards_with_an_index(tmp_path: Path) -> None:
    run, expected = _run(tmp_path)
    output = tmp_path / "hub" / "model.safetensors"
    assert main(["export", str(run), "--output", str(output), "--max-shard-size", "150"]) == 0
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.numel() * v.element_size() for v in expected.values())
    assert sorted(set(index["weight_map"].values())) == sorted(p.name for p in output.parent.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)}
    assert list(index["weight_map"]) == list(expected)
    for name, file in index["weight_map"].items():
        assert same(load_file(output.parent / file)[name], expected[name])
    # Replaced as a whole: no shard of the old ones is left beside the new file.
    assert main(["export", str(run), "--output", str(output)]) == 2
    assert main(["export", str(run), "--output", str(output), "--force"]) == 0
    assert [path.name for path in output.parent.iterdir()] == ["model.safetensors"]
    assert main(["export", str(run), "--output", str(output), "--force", "--max-shard-size", "150"]) == 0
    assert len(list(output.parent.iterdir())) == 4 and not output.exists()


def test_a_shard_holds_what_fits_and_a_large_tensor_alone() -> None:
    entries = [Entry(str(n), torch.float32, (size,)) for n, size in enumerate([1, 1, 9, 1, 2, 1])]
    assert [[e.key for e in shard] for shard in into_shards(entries, 12)] == [["0", "1"], ["2"], ["3", "4"], ["5"]]


def test_sizes_are_read_as_hugging_face_reads_them() -> None:
    sizes = {"5GB": 5 * 10**9, "500mb": 5 * 10**8, "2GiB": 2**31, "1.5 KB": 1500, "77": 77}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "0", "-1GB", "GB", "5 apples", "1e9"):
        with pytest.raises(ConfigError, match="is not a size"):
            parse_size(text)


def test_damaged_checkpoints_are_passed_by_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = _run(tmp_path)
    file = run / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    output = tmp_path / "out.safetensors"
    assert main(["export", str(run), "--output", str(output)]) == 0
    told = capsys.readouterr().out.replace("\n", " ")
    assert f"{file} is damaged" in told and "exported the checkpoint of step 2" in told
    assert int(load_file(output)["count"]) == 2
    # Asked for by its number, or by its path, it is an error.
    for arguments in ([str(run), "--step", "4"], [str(file.parent)]):
        assert main(["export", *arguments, "--output", str(tmp_path / "other.pt")]) == 2
        assert f"{file} is damaged" in capsys.readouterr().err
    assert main(["export", str(run), "--step", "3", "--output", str(tmp_path / "other.pt")]) == 2
    assert "There are: 2, 4." in capsys.readouterr().err
    assert not (tmp_path / "other.pt").exists()


def test_the_end_of_a_run_counts_where_it_is_newer(tmp_path: Path) -> None:
    run, _ = _run(tmp_path)
    for step, expected in ((3, 4), (4, 4), (5, 55), (None, 4)):
        entries = [Entry("count", torch.int64, ())]
        write_tensors(
            run / "model.safetensors", entries, [torch.tensor(55)], {} if step is None else {"step": str(step)}
        )
        source = find_source(locate(run))
        assert int(source.read("count")) == expected
    for folder in (run / "checkpoints").iterdir():
        (folder / MANIFEST).unlink()
    assert int(find_source(locate(run)).read("count")) == 55  # there is nothing else


def test_what_cannot_be_exported_is_said_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = _run(tmp_path)
    for output, extra, told in (
        ("out", [], "must end in .safetensors, .pt or .pth, as in"),
        ("out.bin", [], "out.safetensors"),
        ("run", [], "is a directory"),
        ("out.pt", ["--max-shard-size", "5GB"], "always one file"),
        ("out.safetensors", ["--max-shard-size", "much"], "is not a size"),
    ):
        assert main(["export", str(run), "--output", str(tmp_path / output), *extra]) == 2
        assert told in capsys.readouterr().err.replace("\n", " ")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").touch()
    assert main(["export", str(tmp_path / "bare"), "--output", str(tmp_path / "out.pt")]) == 2
    assert "there are no whole weights in" in capsys.readouterr().err


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = _run(tmp_path)
    source = find_source(locate(run))

    def read(key: str) -> Tensor:
        if key == "count":
            raise OSError(28, "No space left on device")
        return source.read(key)

    broken = type(source)(source.label, source.step, source.entries, read, source.same)
    for name in ("out.safetensors", "out.pt"):
        with pytest.raises(CheckpointError, match=rf"{name} could not be written: No space left on device"):
            export(broken, tmp_path / "to" / name)
    assert list((tmp_path / "to").iterdir()) == []


def test_every_type_has_a_name_of_its_own() -> None:
    assert len(set(DTYPES.values())) == len(DTYPES)


def test_listing_checkpoints_needs_no_torch() -> None:
    script = "import sys; import rung.cli.checkpoints_view; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
