"""Exports from every kind of strategy, loaded by processes that cannot import Rung."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from rung.checkpoint.hf_folder import copy_beside, folder_like
from rung.cli.main import main
from rung.distributed.world import open_world
from rung.errors import ConfigError
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from tests.checkpoints import legs
from tests.marks import slow
from tests.tasks import EXAMPLES, TinyCNN, image_task, text_data

# A plain module: what a user has who does not have Rung. It is also what is trained.
MODEL = '''
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    """Tied weights, a vocabulary that nothing divides, buffers of either kind."""

    def __init__(self, vocabulary=23, width=12, layers=4):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.register_buffer("ones", torch.ones(6), persistent=False)
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) * self.scale * self.ones[: tokens.shape[1], None]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
'''
_space: dict[str, Any] = {}
exec(MODEL, _space)

LOADER = """
import json, sys, types

class NoRung:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rung":
            raise ImportError("Rung is not here")

sys.meta_path.insert(0, NoRung())
try:
    import rung
except ImportError:
    pass
else:
    sys.exit("Rung can be imported")

import numpy, torch
from safetensors.torch import load_file
from model import Net
from pathlib import Path

for folder in map(Path, sys.argv[1:]):
    expected = numpy.load(folder / "expected.npz")
    index = json.loads((folder / "cut.safetensors.index.json").read_text())
    shards = {}
    for name in set(index["weight_map"].values()):
        shards.update(load_file(folder / name))
    found = {
        "safetensors": load_file(folder / "one.safetensors"),
        "pt": torch.load(folder / "one.pt", weights_only=True),
        "shards": {name: shards[name] for name in index["weight_map"]},
    }
    for kind, state in found.items():
        where = f"{folder.name}, {kind}"
        net = Net()
        net.load_state_dict(state, strict=True)
        assert sorted(state) == sorted(expected.files), where
        for name, tensor in state.items():
            assert torch.equal(tensor, torch.from_numpy(expected[name])), f"{where}: {name}"
        assert net.head.weight is net.token.weight
        assert torch.isfinite(net(torch.arange(12).view(2, 6))).all(), where
    assert list(found["pt"]) == list(found["shards"]) == list(Net().state_dict()), folder
print("all of them load")
"""

CONFIG = RunConfig(batch_size=8, steps=2, device="cpu", eval_every="never")
STRATEGIES = {
    "single": 1, "ddp": 2, "zero1": 2, "zero3": 2, "pp2": 2, "pp2:interleaved": 2, "tp2": 2, "fsdp2,tp2": 4,
    "pp2,fsdp2": 4,
}  # fmt: skip


def plain_task() -> Task:
    return Task(
        model=_space["Net"],
        train_data=text_data,
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        name="plain",
    )


def rung(*arguments: object) -> None:
    assert main([str(word) for word in arguments]) == 0


def keep_expected(state: dict[str, torch.Tensor], folder: Path) -> None:
    np.savez(folder / "expected.npz", **{name: value.numpy() for name, value in state.items()})


@pytest.mark.parametrize("strategies", [["ddp", "fsdp2,tp2"], slow(list(STRATEGIES))], ids=["some", "all"])
def test_exports_of_every_strategy_load_where_rung_is_not(tmp_path: Path, strategies: list[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "loader.py").write_text(LOADER)
    folders = []
    for strategy in strategies:
        run = tmp_path / "runs" / strategy
        _, state = legs(plain_task, CONFIG, run, [(strategy, STRATEGIES[strategy], 2)])
        folder = tmp_path / "exported" / strategy
        rung("export", run, "--output", folder / "one.safetensors")
        rung("export", run / "checkpoints", "--output", folder / "one.pt")
        rung("export", run / "checkpoints" / "step-00000002", "--output", folder / "cut.safetensors",
             "--max-shard-size", "5KB")  # fmt: skip
        keep_expected(state, folder)
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "loader.py"), *folders],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of them load" in done.stdout


def test_statistics_of_batch_norm_are_exported(tmp_path: Path) -> None:
    _, state = legs(image_task, replace(CONFIG, activation_checkpointing="full"), tmp_path, [("zero3", 2, 2)])
    rung("export", tmp_path, "--output", tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    TinyCNN().load_state_dict(found, strict=True)
    assert list(found) == list(TinyCNN().state_dict())
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert int(found["first.1.num_batches_tracked"]) == 2


class _Odd(nn.Module):
    """A parameter without elements, and a state dict with something computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 5)
        self.none = nn.Parameter(torch.empty(0, 3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(1))

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None: ...


def _odd_task() -> Task:
    return image_task(model=_Odd, optimizer=lambda m: torch.optim.SGD(m.layer.parameters(), 0.1), schedule=None)


def test_empty_tensors_and_computed_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    legs(_odd_task, CONFIG, tmp_path, [("ddp", 2, 1), ("zero3", 2, 2)])
    rung("export", tmp_path, "--output", tmp_path / "out.safetensors")
    assert "_extra_state: the module computes this" in capsys.readouterr().out
    found = load_file(tmp_path / "out.safetensors")
    assert found["none"].shape == (0, 3)
    missing, unexpected = _Odd().load_state_dict(found, strict=False)
    assert (missing, unexpected) == (["_extra_state"], [])


def _hugging_face_task() -> Task:
    small = {"model.layers": 2, "model.width": 32, "model.heads": 2, "model.context": 16, "model.vocabulary": 128,
             "train_data.context": 16}  # fmt: skip
    return replace(load_task(EXAMPLES / "huggingface").bind(small), eval_data=None)


@pytest.mark.parametrize("limit", ["1GB", "40KB"])
def test_hugging_face_loads_the_folder(tmp_path: Path, limit: str) -> None:
    pytest.importorskip("transformers")
    task = _hugging_face_task()
    _, state = legs(_hugging_face_task, replace(CONFIG, steps=1), tmp_path / "run", [("fsdp", 2, 1)])
    folder = tmp_path / "hub"
    model = task.model()
    config = tmp_path / "config"
    model.half().config.save_pretrained(config)
    (config / "tokenizer.json").write_text("{}")
    (config / "model.safetensors.index.json").write_text("of other files")
    flags = ("--max-shard-size", limit, "--format", "hf", "--like", config)
    rung("export", tmp_path / "run", "--output", folder, *flags)
    assert (folder / "model.safetensors").exists() == (limit == "1GB")
    assert (folder / "tokenizer.json").exists()
    loaded, told = type(model).from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    found = loaded.state_dict()
    assert list(found) == list(state)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    if limit != "1GB":
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(state)
    with open_world(parse("single", 1), device="cpu") as world:  # and so does Rung
        again = build_runtime(task, world, replace(CONFIG, init=str(folder))).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_a_folder_of_hugging_face_needs_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "begin").mkdir()
    with pytest.raises(ConfigError, match="did not begin with a Hugging Face folder"):
        folder_like(None, tmp_path)
    (tmp_path / "config.toml").write_text(f'init = "{tmp_path / "begin"}"\n')
    with pytest.raises(ConfigError, match=r"no config\.json"):
        folder_like(None, tmp_path)
    (tmp_path / "begin" / "config.json").write_text('{"torch_dtype": "bfloat16", "width": 3}')
    found = folder_like(None, tmp_path)
    assert found == tmp_path / "begin"
    (tmp_path / "out").mkdir()
    assert copy_beside(found, tmp_path / "out", "float32") == ["config.json"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "float32", "width": 3}
