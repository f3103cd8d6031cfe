"""The examples' own parts: data files they can read, and the sizes they promise."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from rung.spec.task import load_task
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
