"""The parts of examples/imagenet: images that can be learnt, directories of files, groups, schedule and metrics."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rung.spec.config import read_toml, resolve
from rung.spec.task import load_task
from tests.tasks import EXAMPLES

TASK = load_task(EXAMPLES / "imagenet")
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed: pip install 'rung[models]'"
)


def folder_of_images(root: Path, parts: dict[str, list[str]]) -> Path:
    from PIL import Image

    for part, classes in parts.items():
        for number, name in enumerate(classes):
            folder = root / part / name
            folder.mkdir(parents=True)
            for shade in (0, 40):
                Image.new("RGB", (60, 45), (shade, 50 * number, 200)).save(folder / f"{shade}.jpg")
            (folder / "notes.txt").write_text("no image")
    return root


def stacked(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    samples = [data[index] for index in range(len(data))]
    return torch.stack([image for image, _ in samples]).float().flatten(1), torch.tensor(
        [label for _, label in samples]
    )


def test_generated_images_of_a_class_are_alike() -> None:
    """The nearest class mean tells the class of new images: there is something to learn."""
    images, labels = stacked(TASK.bind({"train_data.augment": False, "train_data.count": 400}).train_data())
    means = torch.stack([images[labels == label].mean(dim=0) for label in range(10)])
    others, expected = stacked(TASK.eval_data())  # type: ignore[misc]
    assert (torch.cdist(others, means).argmin(dim=1) == expected).float().mean() > 0.8


def test_augmentation_draws_from_the_generators_that_rung_seeds() -> None:
    data = TASK.train_data()
    torch.manual_seed(3)
    first = data[5][0]
    assert any(not torch.equal(first, data[5][0]) for _ in range(4))
    torch.manual_seed(3)
    assert torch.equal(first, data[5][0])
    fixed = TASK.bind({"train_data.augment": False}).train_data()
    assert torch.equal(fixed[5][0], fixed[5][0])


def test_images_are_normalised_as_imagenets_are() -> None:
    assert TASK.forward is not None
    image = torch.tensor([255, 0, 51], dtype=torch.uint8).view(1, 3, 1, 1)
    found = TASK.forward(nn.Identity(), (image, None))
    expected = [(1 - 0.485) / 0.229, (0 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_top_1_and_top_5() -> None:
    assert TASK.metrics is not None
    output = torch.arange(8.0).repeat(4, 1)
    found = TASK.metrics(output, torch.tensor([7, 3, 2, 6]))
    assert found["top1"].tolist() == [1, 0, 0, 0] and found["top5"].tolist() == [1, 1, 0, 1]
    few = TASK.metrics(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0]))
    assert few["top1"].tolist() == [0] and few["top5"].tolist() == [1]


def test_norms_and_biases_have_no_weight_decay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    decayed, plain = TASK.optimizer(model).param_groups
    assert {p.dim() for p in decayed["params"]} == {2, 4} and decayed["weight_decay"] > 0
    assert {p.dim() for p in plain["params"]} == {1} and plain["weight_decay"] == 0
    assert isinstance(TASK.bind({"optimizer.kind": "adamw"}).optimizer(model), torch.optim.AdamW)
    with pytest.raises(ValueError, match="sgd or adamw"):
        TASK.bind({"optimizer.kind": "lion"}).optimizer(model)


def test_the_rate_rises_along_a_line_and_falls_along_a_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    assert TASK.schedule is not None
    schedule = TASK.bind({"schedule.warmup": 0.2}).schedule(optimizer, 20)  # type: ignore[misc]
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[12] == pytest.approx(1.0) and 0 < rates[-1] < 0.05
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))


def test_the_recipe_has_settings_that_exist() -> None:
    resolved = resolve(TASK, file=EXAMPLES / "imagenet" / "resnet50.toml")
    assert resolved.config.memory_format == "channels_last" and resolved.arguments["model.arch"] == "resnet50"
    assert set(read_toml(EXAMPLES / "imagenet" / "resnet50.toml")) >= {"keep_best", "schedule.warmup"}


@needs_torchvision
def test_a_directory_of_images_is_read(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path, {"train": ["cat", "dog"], "val": ["cat", "dog"]})
    task = TASK.bind({"train_data.root": str(root), "eval_data.root": str(root), "eval_data.size": 16})
    train, held_out = task.train_data(), task.eval_data()
    assert (len(train), len(held_out)) == (4, 4)
    image, label = held_out[3]
    assert (image.dtype, tuple(image.shape), label) == (torch.uint8, (3, 16, 16), 1)
    assert image.float().mean(dim=(1, 2)).tolist() == pytest.approx([40, 50, 200], abs=4)
    assert tuple(train[0][0].shape) == (3, 32, 32)


@needs_torchvision
@pytest.mark.parametrize(
    ("parts", "changes", "told"),
    [
        ({}, {"root": "/nowhere"}, "there is no directory /nowhere"),
        ({"train": []}, {}, "each class of images should have one"),
        ({"train": ["a", "b", "c"]}, {"classes": 2}, "--set model.classes=3 --set train_data.classes=3"),
        ({"train": ["a", "b"], "val": ["a"]}, {}, r"different classes \(b\)"),
    ],
)
def test_a_directory_that_would_not_do_is_refused(
    tmp_path: Path, parts: dict[str, list[str]], changes: dict[str, Any], told: str
) -> None:
    folder_of_images(tmp_path, parts)
    function = "eval_data" if "val" in parts else "train_data"
    given = {"root": str(tmp_path), **changes}
    task = TASK.bind({f"{function}.{key}": value for key, value in given.items()})
    with pytest.raises(ValueError, match=told):
        getattr(task, function)()


@needs_torchvision
def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    folder_of_images(tmp_path, {"train": ["a", "b"]})
    with pytest.raises(ValueError, match=r"there is no directory \S+/val;"):
        TASK.bind({"eval_data.root": str(tmp_path)}).eval_data()  # type: ignore[misc]


@needs_torchvision
@pytest.mark.parametrize("arch", ["resnet18", "vit_b_16", "inception_v3", "timm/resnet18"])
def test_any_architecture_gives_a_logit_a_class(arch: str) -> None:
    if arch.startswith("timm/"):
        pytest.importorskip("timm")
    size = 96 if arch == "inception_v3" else 32
    task = TASK.bind({"model.arch": arch, "model.classes": 7, "model.size": size if arch == "vit_b_16" else 0})
    assert task.forward is not None
    with torch.device("meta"):
        model = task.model()
        assert task.forward(model, (torch.zeros(2, 3, size, size, dtype=torch.uint8), None)).shape == (2, 7)


@needs_torchvision
def test_an_unknown_architecture_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="near it: resnet18"):
        TASK.bind({"model.arch": "resnet19"}).model()
    with pytest.raises(ValueError, match="torchvision has no architecture 'fasterrcnn_resnet50_fpn'"):
        TASK.bind({"model.arch": "fasterrcnn_resnet50_fpn"}).model()
