"""What a task or a run may have beside its model, under the strategies over RPC: all of it at once, as in one process.

docs/servers.md lists it, and `test_the_document_lists_what_is_compared` holds the list to this file and to the table
of abilities.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rung.spec.abilities import can
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import load_task
from rung.train.job import RankJob
from rung.train.worker import worker
from tests.harness import on_ranks
from tests.marks import slow

ROOT = Path(__file__).parent.parent.parent
OVER_RPC = {"ps": 4, "ddp+ps": 4, "rpc-pp": 2, "ps-async": 3}

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

remote = ["layers.2"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layers(x))


model = Model


def data(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, (x[:, :3] * 3 + x[:, 3:]).argmax(1))


class Broken:
    def __init__(self, bad):
        self.data, self.bad = data(53, 1), bad

    def __len__(self):
        return 53

    def __getitem__(self, n):
        if n in self.bad:
            raise OSError(f"file {n} is truncated")
        return self.data[n]


def train_data(bad=""):
    return Broken({int(n) for n in bad.split()})


def eval_data():
    return data(37, 2)


def sample_weights(data):
    return [1 + n % 5 for n in range(len(data))]


def loss(output, target):
    return F.cross_entropy(output, target)


class Area:
    def __init__(self, scores, is_positive):
        self.scores, self.is_positive = [scores], [is_positive]

    def merge(self, other):
        self.scores += other.scores
        self.is_positive += other.is_positive

    def compute(self):
        scores, is_positive = torch.cat(self.scores), torch.cat(self.is_positive)
        return (scores[is_positive].double()[:, None] > scores[~is_positive].double()[None, :]).double().mean()


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float(), "area": Area(output.softmax(1)[:, 0], target == 0)}


def optimizer(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, rest = [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() < 2]
    found = {"matrices": torch.optim.SGD(matrices, lr=0.3, momentum=0.9, weight_decay=0.01)}
    return {**found, "rest": torch.optim.SGD(rest, lr=0.1)} if rest else found


def schedule(optimizer, total_steps, name):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if name in ("matrices", "0") else None
"""

HOOKS = """

def on_step(state):
    state.log("step of mine", state.step, reduce="max")


def on_evaluation(state):
    name = [name for name, _ in state.model.named_parameters()][-1]
    state.log("norm", state.parameter(name).norm())
"""

# Rows of docs/servers.md: title, the ability of the table in rung/spec/presets.py if not every strategy has it.
FEATURES = {
    "`--init`": None,
    "`--lora`": "lora",
    "several optimizers": None,
    "`--ema`": "ema",
    "`--swa-start`": "swa",
    "metrics of a whole set": None,
    "`sample_weights`, `mixture`": None,
    "hooks and `log`": "hooks",
    "`--skip-bad-samples`": "skip_bad_samples",
    "`--patience`": "patience",
    "`--resume` from another strategy": "resume",
    "losses that take turns": "turns",
}


def finished(task: Path, strategy: str, ranks: int, name: str, config: RunConfig, **arguments: Any) -> Path:
    folder = task.parent / name
    folder.mkdir(exist_ok=True)
    given = replace(config, servers=2 if "ps" in strategy.split("+") else None)
    given = replace(given, staleness=0) if strategy == "ps-async" else given
    on_ranks(worker, ranks, RankJob(str(task), strategy, given, arguments, str(folder), resume=True))
    return folder


def rows(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in lines if row["event"] == event]


def compare(one: Path, many: Path, weights: list[str], keys: dict[str, list[str]]) -> None:
    for file in weights:
        expected, found = load_file(one / file), load_file(many / file)
        assert list(expected) == list(found)
        worst = max((found[n].double() - v.double()).abs().max() for n, v in expected.items())
        assert worst < 1e-9
    for event, names in keys.items():
        pairs = list(zip(rows(one, event), rows(many, event), strict=True))
        assert pairs
        worst = max(abs(a[key] - b[key]) for a, b in pairs for key in names)
        assert worst < 1e-9


@pytest.mark.parametrize("strategy", [slow("ps"), "ddp+ps", slow("rpc-pp"), "ps-async"])
@pytest.mark.parametrize("form", ["whole", slow("adapters")])
def test_all_of_it_at_once(strategy: str, form: str, tmp_path: Path) -> None:
    """Weights of a file, two optimizers of which one has a schedule, an average, a metric of the whole set, weighted
    draws; hooks that log and samples that cannot be read where steps are common. Begun under ddp."""
    task, common = tmp_path / "task.py", strategy != "ps-async"
    task.write_text(TASK + (HOOKS if common else ""))
    torch.manual_seed(7)
    state = load_task(str(task)).model().double().state_dict()
    save_file(state, tmp_path / "begin.safetensors")
    config = RunConfig(
        batch_size=11, precision="fp64", device="cpu", log_every=1, steps=7, clip=0.5, eval_every="3", ema=0.8,
        init=str(tmp_path / "begin.safetensors"), micro_batch=2 if common else None, checkpoint_every=3, check=False,
        lora="r=2,targets=layers.*+head" if form == "adapters" else None, skip_bad_samples=9 if common else 0,
    )  # fmt: skip
    arguments = {"train_data.bad": "3 4 17 33"} if common else {}
    one = finished(task, "single", 1, "one", config, **arguments)
    begun = finished(task, "ddp", 2, "many", replace(config, steps=3), **arguments)
    many = finished(task, strategy, OVER_RPC[strategy], "many", config, **arguments)
    assert begun == many and rows(many, "resume")[-1]["step"] == 3
    steps = ["loss", "grad_norm", "lr", "samples", *(["step of mine"] if common else [])]
    evaluations = ["step", "loss", "accuracy", "area"]
    late = [row for row in rows(one, "eval") if row["step"] > 3]
    assert late[-1]["loss"] != late[0]["loss"]
    compare(one, many, ["model.safetensors", "average.safetensors"], {"step": steps})
    found = {row["step"]: row for row in rows(many, "eval")}
    for row in rows(one, "eval"):
        assert all(abs(row[key] - found[row["step"]][key]) < 1e-9 for key in evaluations)


@pytest.mark.parametrize("strategy", ["ps", slow("ddp+ps"), slow("rpc-pp")])
def test_a_run_ends_when_nothing_gets_better(strategy: str, tmp_path: Path) -> None:
    """`--patience`, with the equal average of the weights."""
    task = tmp_path / "task.py"
    task.write_text(TASK)
    config = RunConfig(
        batch_size=11, precision="fp64", device="cpu", log_every=1, steps=40, eval_every="1", swa_start=2, check=False,
        keep_best="area:min", patience=2, checkpoint_every=50,
    )  # fmt: skip
    one = finished(task, "single", 1, "one", config)
    many = finished(task, strategy, OVER_RPC[strategy], "many", config)
    assert 3 <= len(rows(one, "step")) < 40
    compare(one, many, ["model.safetensors", "average.safetensors"], {"step": ["loss"], "eval": ["loss", "area"]})


def test_the_document_lists_what_is_compared() -> None:
    text = (ROOT / "docs" / "servers.md").read_text()
    table = re.search(r"<!-- features[^>]*-->\n(.*?)\n<!-- end of features -->", text, flags=re.DOTALL)
    assert table is not None
    header, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
    names = [name.strip("`") for name in header[1:]]
    assert names == list(OVER_RPC) and [line[0] for line in lines] == list(FEATURES)
    for title, *cells in lines:
        for name, cell in zip(names, cells, strict=True):
            assert cell.startswith("no" if is_refused(FEATURES[title], name) else "yes"), (title, name)


def is_refused(ability: str | None, strategy: str) -> bool:
    return ability is not None and not can(parse(strategy, OVER_RPC[strategy]), ability)
