"""A cross entropy in chunks, of an output layer whose classes ranks share out, is torch's own of the whole layer."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed.world import open_world
from rung.parallel.chunked_cross_entropy import VocabularyPart
from rung.parallel.chunked_loss import ChunkedLinear, HeadOutput
from rung.parallel.collectives import copy_for_parts
from rung.spec.strategy import parse
from rung.system.launcher_env import environment_size
from tests.harness import on_ranks
from tests.marks import slow
from tests.parallel.test_chunked_loss import LOSSES, OTHERS, Loss, chunked, flat, head, outcome


class Cut(nn.Module):
    """The output layer of `head`, of which this rank has its part."""

    def __init__(self, layer: nn.Linear, rows: int) -> None:
        super().__init__()
        self.layer, self.part = layer, VocabularyPart(dist.group.WORLD, layer.out_features)
        chunked(layer, rows)
        size, rank = dist.get_world_size(), dist.get_rank()
        self.weight = nn.Parameter(layer.weight.detach().chunk(size)[rank].clone())
        self.bias = nn.Parameter(layer.bias.detach().chunk(size)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.layer, ChunkedLinear)
        found = self.layer.in_chunks(copy_for_parts(x, self.part.group), self.weight, self.bias, self.part)
        assert isinstance(found, HeadOutput) and found.shape == (*x.shape[:-1], self.part.num_classes)
        return found


def _differences(rows: int) -> dict[str, float]:
    with open_world(parse("tp", environment_size()), device="cpu", timeout_seconds=60):
        size, rank = dist.get_world_size(), dist.get_rank()
        found = {}
        for name, loss in {**LOSSES, **OTHERS}.items():
            value, gradients = outcome(head(), loss)
            own, parts = outcome(Cut(head(), rows), loss)  # type: ignore[arg-type]
            whole = [gradients[0], *(each.chunk(size)[rank] for each in gradients[1:])]  # type: ignore[union-attr]
            apart = [(own - value).abs().max(), *((a - b).abs().max() for a, b in zip(parts, whole, strict=True))]
            near = 1e-12 if value.dtype == torch.float64 else 1e-6
            found[name] = max(float(one) for one in apart) / near
        return found


@pytest.mark.parametrize(("num_ranks", "rows"), [(4, 4), slow(2, 1), slow(3, 20)])
def test_value_and_gradients_are_those_of_the_whole_layer(num_ranks: int, rows: int) -> None:
    """11 classes: 3, 3, 3 and 2 of them on four ranks."""
    for found in on_ranks(_differences, num_ranks, rows):
        assert len(found) == len({**LOSSES, **OTHERS})
        assert {name: value for name, value in found.items() if not value < 1} == {}


def _large() -> tuple[float, float]:
    """4,099 classes in bf16 as under autocast, and a class that nobody has."""
    with open_world(parse("tp", environment_size()), device="cpu", timeout_seconds=60):
        torch.manual_seed(1)
        layer = nn.Linear(8, 4099)
        x, target = torch.randn(30, 8), torch.randint(4099, (30,))
        cut = Cut(layer, 7)
        value, whole = F.cross_entropy(cut(x), target), F.cross_entropy(F.linear(x, layer.weight, layer.bias), target)
        value.backward(), whole.backward()  # type: ignore[no-untyped-call]
        assert layer.weight.grad is not None and cut.weight.grad is not None
        apart = layer.weight.grad.chunk(dist.get_world_size())[dist.get_rank()] - cut.weight.grad
        with pytest.raises(RuntimeError, match=r"a target is not in \[0, 4099\)"):
            F.cross_entropy(cut(x), target + 4099)
        return float((value - whole).abs()), float(apart.abs().max())


def test_a_vocabulary_that_no_number_divides_and_a_class_that_is_none() -> None:
    for found in on_ranks(_large, 2):
        assert max(found) < 1e-6


# -- fp16 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [flat, LOSSES["sum"], LOSSES["rows"]])
def test_gradients_in_fp16_are_scaled_before_they_are_rounded(loss: Loss) -> None:
    """Classes that are very unlikely have gradients below the least number of fp16, until they are scaled."""

    def scaled(layer: nn.Linear) -> Tensor:
        with torch.no_grad():
            layer.bias[5:] = -19.0
        torch.manual_seed(2)
        x, target = torch.randn(3, 7, 5), torch.randint(5, (3, 7))
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(layer(x), target).sum()
        (2.0**16 * value).backward()  # type: ignore[no-untyped-call]
        assert layer.weight.grad is not None
        return layer.weight.grad[5:]

    expected, found = scaled(head(dtype=torch.float32)), scaled(chunked(head(dtype=torch.float32)))
    assert float(expected.abs().min()) > 1e-7
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-6)
