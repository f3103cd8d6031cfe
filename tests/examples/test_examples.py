"""The examples' own parts: data files they can read, and the sizes they promise."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rung.data.batch_shard import BatchPartition
from rung.data.batches import Batches
from rung.spec.task import load_task
from tests.launcher import WarmLauncher
from tests.tasks import EXAMPLES


def test_babycnn_reads_mnist_files(tmp_path: Path) -> None:
    pixels = bytes(range(256)) * 49  # 16 images of 28 x 28
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\0" * 16 + pixels)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"\0" * 8 + bytes([7] * 16)))
    data = load_task(EXAMPLES / "babycnn").bind({"train_data.root": str(tmp_path)}).train_data()
    image, label = data[1]
    assert (len(data), tuple(image.shape), int(label)) == (16, (1, 28, 28), 7)
    assert image[0, 0, 0] == pytest.approx((28 * 28 % 256) / 255 - 0.5)


def test_babycnn_reads_cifar_files_and_takes_their_channels(tmp_path: Path) -> None:
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes((bytes([number]) + bytes(3072)) * 4)
    task = load_task(EXAMPLES / "babycnn").bind({"train_data.root": str(tmp_path), "model.channels": 3})
    data = task.train_data()
    assert len(data) == 20
    assert [int(data[i][1]) for i in (0, 4, 19)] == [1, 2, 5]
    assert task.model()(data[0][0][None]).shape == (1, 10)


def test_babycnn_holds_a_fifth_of_the_digits_out() -> None:
    task = load_task(EXAMPLES / "babycnn")
    assert (len(task.train_data()), len(task.eval_data())) == (1437, 360)


@pytest.mark.parametrize(
    ("size", "millions"),
    [("0.8m", 0.8), ("3m", 2.7), ("10m", 10.7), ("25m", 25.3), ("124m", 85), ("350m", 302), ("1.3b", 1209)],
)
def test_gpt_has_the_sizes_it_promises(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = load_task(EXAMPLES / "gpt").bind({"model.size": size}).model()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)
    assert model.head.weight is model.token.weight


def test_gpt_reads_text_that_every_python_has() -> None:
    task = load_task(EXAMPLES / "gpt").bind({"train_data.characters": 20_000})
    inputs, targets = task.train_data()[3]
    assert inputs.shape == targets.shape == (64,)
    assert torch.equal(inputs[1:], targets[:-1])
    assert int(inputs.max()) < 98


def test_vision_logs_its_accuracy_and_stops_at_its_goal(launcher: WarmLauncher, tmp_path: Path) -> None:
    if importlib.util.find_spec("torchvision") is None:  # its import may fail where the example's does not
        pytest.skip("torchvision is not installed")
    small = ("model.kind=vit", "model.layers=2", "model.width=24", "eval_every=2", "on_evaluation.goal=0.0")
    chosen = ("--strategy", "ddp", "--nproc", "2", "--no-check", *(w for one in small for w in ("--set", one)))
    outcome = launcher.call(tmp_path, "train", str(EXAMPLES / "vision"), "--out", "out", *chosen)
    assert outcome.code == 0, outcome.output
    assert "ends after step 2: 0." in outcome.output and "0.0 was the goal (state.stop in on_eval" in outcome.output
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["event"] == "step"]
    assert len(steps) == 2
    for row in steps:
        assert row["accuracy"] * 32 == pytest.approx(round(row["accuracy"] * 32), abs=1e-5)  # of 32 samples


def test_shards_are_read_by_their_ranks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, str(EXAMPLES / "shards" / "task.py"), str(tmp_path / "shards")], check=True)
    monkeypatch.chdir(tmp_path)
    task = load_task(EXAMPLES / "shards")
    data = task.train_data()
    single = list(Batches(data, BatchPartition(32, 1, 0), num_epochs=1))
    assert Batches(data, BatchPartition(32, 2, 1), exchange=lambda own: [own]).num_shards == (32, 16)
    labels = [sorted(label for m in w.micro_batches for label in m.data[1].tolist()) for w in single]
    assert sum(map(len, labels)) == sum(1 for _ in data)
    ranks = [list(Batches(data, BatchPartition(32, 2, rank), num_epochs=1)) for rank in (0, 1)]
    together = [
        [m.data[1].tolist() for w in pair for m in w.micro_batches if m.num_samples]
        for pair in zip(*ranks, strict=True)
    ]
    assert [sorted(label for one in found for label in one) for found in together] == labels
    with pytest.raises(FileNotFoundError, match=r"task.py empty writes some"):
        task.bind({"train_data.folder": "empty"}).train_data()


def test_each_cipher_gets_an_expert_of_its_own(tmp_path: Path) -> None:
    """In plain PyTorch, with few steps; then the picture of it."""
    task = load_task(EXAMPLES / "moe")
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    pairs, targets = task.train_data().tensors
    for step in range(60):
        rows = slice(64 * step, 64 * step + 64)
        optimizer.zero_grad()
        task.loss(model(pairs[rows]), targets[rows]).backward()
        optimizer.step()
    weights, picture = tmp_path / "model.safetensors", tmp_path / "routing.svg"
    save_file(model.state_dict(), weights)
    script = [sys.executable, str(EXAMPLES / "moe" / "picture.py"), str(weights), str(picture)]
    said = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    before, after = (int(share) for share in re.findall(r"(\d+)% of a cipher's", said))
    assert before < 80
    assert after > 95
    assert picture.read_text().count("<rect") == 2 * 64 + 1


def test_the_needle_is_found(tmp_path: Path) -> None:
    """In plain PyTorch, in short sequences; then the picture of it."""
    lengths = {"train_data.length": 64, "eval_data.length": 64}
    task = load_task(EXAMPLES / "long_context").bind(lengths)
    torch.manual_seed(0)
    model, run = task.model(), tmp_path / "run"
    optimizer, data, held_out = task.optimizer(model), task.train_data(), task.eval_data()
    rows = []
    for step in range(50):
        tokens, targets = map(torch.stack, zip(*[data[8 * step + row] for row in range(8)], strict=True))
        optimizer.zero_grad()
        value = task.loss(model(tokens), targets)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rows.append({"step": step + 1, "loss": value.item(), "event": "step"})
    tokens, targets = map(torch.stack, zip(*[held_out[row] for row in range(32)], strict=True))
    assert ((targets >= 0).sum(1) == 1).all() and (targets[:, -1] >= 0).all()  # the far question alone
    assert task.metrics(model(tokens), targets)["found"].mean() > 0.9
    run.mkdir()
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run / "config.toml").write_text('strategy = "cp2"\n[train_data]\nlength = 64\n')
    script = [sys.executable, str(EXAMPLES / "long_context" / "picture.py"), str(tmp_path / "needle.svg"), str(run)]
    subprocess.run(script, check=True)
    assert ">64 tokens, cp2</text>" in (tmp_path / "needle.svg").read_text()
