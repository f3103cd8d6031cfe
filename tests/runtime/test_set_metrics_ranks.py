"""Metrics of a whole set: objects that merge, torchmetrics' as they are, with the figure of one process."""

from __future__ import annotations

import functools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from rung.errors import TaskError
from rung.runtime.set_metrics import merged, state_of, with_state
from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.harness import on_ranks
from tests.marks import slow
from tests.parity import with_rung
from tests.tasks import image_task, text_task

try:
    import torchvision  # noqa: F401 (torchmetrics imports it)
except ImportError:
    pass
except RuntimeError:  # a wheel made for CUDA beside a torch without: two operators for object detection are missing
    _missing = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _missing.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class Area:
    """The area under the curve of class 0 against the rest: the share of pairs in the right order. No mean of batches'
    areas gives it."""

    def __init__(self, scores: Tensor, is_positive: Tensor) -> None:
        self.scores, self.is_positive = [scores], [is_positive]

    def merge(self, other: Area) -> None:
        self.scores += other.scores
        self.is_positive += other.is_positive

    def compute(self) -> Tensor:
        return area(torch.cat(self.scores), torch.cat(self.is_positive))


class Counted:
    """A metric whose `merge` returns a new one, and which computes several figures."""

    def __init__(self, count: int) -> None:
        self.count = count

    def merge(self, other: Counted) -> Counted:
        return Counted(self.count + other.count)

    def compute(self) -> dict[str, float]:
        return {"samples": self.count, "half": self.count / 2}


def area(scores: Tensor, is_positive: Tensor) -> Tensor:
    above, below = scores[is_positive].double(), scores[~is_positive].double()
    apart = above[:, None] - below[None, :]
    return ((apart > 0).double() + 0.5 * (apart == 0)).mean()


def metrics(output: Tensor, target: Tensor) -> dict[str, Any]:
    from torchmetrics.classification import BinaryAUROC

    theirs = BinaryAUROC()
    theirs.update(output.softmax(1)[:, 0].float(), (target == 0).long())
    return {
        "area": Area(output.softmax(1)[:, 0], target == 0),
        "theirs": theirs,
        "seen": Counted(len(target)),
        "accuracy": (output.argmax(1) == target).float(),
    }


class Net(nn.Module):
    """Without a batch norm, whose statistics would depend on the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5)
        )

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.layers(images)
        return output


def make_task() -> Task:
    return image_task(model=Net, metrics=metrics)


CONFIG = RunConfig(batch_size=10, steps=3, precision="fp64", device="cpu", micro_batch=2)


@pytest.fixture(scope="module")
def alone() -> dict[str, float]:
    return with_rung(make_task, "single", CONFIG).evaluation


def test_one_process_computes_it_over_the_whole_set(alone: dict[str, float]) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(output: Tensor, target: Tensor) -> dict[str, Any]:
        kept.append((output.softmax(1)[:, 0], target == 0))
        return {}

    with_rung(lambda: image_task(model=Net, metrics=keep), "single", CONFIG)
    scores, positives = (torch.cat(parts) for parts in zip(*kept, strict=True))
    assert alone["area"] == pytest.approx(float(area(scores, positives)), abs=1e-12)
    assert alone["theirs"] == pytest.approx(alone["area"], abs=1e-6)
    assert (alone["seen/samples"], alone["seen/half"]) == (len(scores), len(scores) / 2)
    means = [float(area(one, other)) for one, other in kept]
    assert abs(sum(means) / len(means) - alone["area"]) > 1e-3 or any(mean != mean for mean in means)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "changes"),
    [
        slow("ddp", 2, {}),
        ("zero3", 4, {"batch_size": 3, "micro_batch": None}),  # a rank without a sample
        ("pp2", 2, {}),
        slow("tp2", 2, {}),
        slow("pp2,fsdp2", 4, {}),
        slow("dp", 1, {}),
        ("ps", 3, {}),
        slow("rpc-pp", 2, {}),
    ],
)
def test_any_cut_gives_the_figure_of_one_process(strategy: str, num_ranks: int, changes: dict[str, Any]) -> None:
    config = RunConfig(**{**vars(CONFIG), "steps": 1, **changes})
    expected = with_rung(make_task, "single", config).evaluation
    found = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    for outcome in found:
        assert outcome.evaluation.keys() == expected.keys()
        for name, value in expected.items():
            assert outcome.evaluation[name] == pytest.approx(value, abs=1e-6 if name == "theirs" else 1e-9)


class Bleu:
    """BLEU of a corpus, up to pairs of tokens: from the counts of all sentences, of which no mean of batches is one."""

    def __init__(self) -> None:
        self.hits, self.counts, self.lengths = [0, 0], [0, 0], [0, 0]

    def update(self, said: list[list[int]], meant: list[list[int]]) -> Bleu:
        for ours, theirs in zip(said, meant, strict=True):
            self.lengths = [self.lengths[0] + len(ours), self.lengths[1] + len(theirs)]
            for size in (1, 2):
                own, known = (Counter(zip(*(s[i:] for i in range(size)), strict=False)) for s in (ours, theirs))
                self.hits[size - 1] += (own & known).total()
                self.counts[size - 1] += own.total()
        return self

    def merge(self, other: Bleu) -> None:
        for name in ("hits", "counts", "lengths"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)])

    def compute(self) -> float:
        if not all(self.hits):
            return 0.0
        precisions = [math.log(hit / count) for hit, count in zip(self.hits, self.counts, strict=True)]
        return math.exp(min(0.0, 1 - self.lengths[1] / self.lengths[0]) + sum(precisions) / 2)


def sentences(output: Tensor, target: Tensor) -> dict[str, Any]:
    # Sentences of other lengths than what they are compared with.
    said = [row[: 3 + int(row[0]) % 4] for row in (target % 7 * 3 + output.argmax(-1) % 3).tolist()]
    meant = [row[: 3 + int(row[1]) % 4] for row in (target % 7 * 3).tolist()]
    return {"bleu": Bleu().update(said, meant)}


def text_metrics_task() -> Task:
    return text_task(metrics=sentences)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("zero3", 2), slow("pp2", 2), slow("ddp", 4)])
def test_bleu_under_any_cut(strategy: str, num_ranks: int) -> None:
    whole = {**vars(CONFIG), "steps": 1, "batch_size": 37, "micro_batch": None}
    expected = with_rung(text_metrics_task, "single", RunConfig(**whole)).evaluation
    assert 0 < expected["bleu"] < 1
    config = RunConfig(**{**whole, "batch_size": 37, "micro_batch": 3})
    for outcome in on_ranks(with_rung, num_ranks, text_metrics_task, strategy, config):
        assert outcome.evaluation["bleu"] == pytest.approx(expected["bleu"], abs=1e-12)


def test_torchmetrics_bleu_is_merged_by_its_sums() -> None:
    from torchmetrics.text import BLEUScore  # its own merge_state refuses, for what `forward` would do

    said = [[1, 2, 3], [4, 5], [1, 2, 9, 9], [7]]
    meant = [[1, 2, 4], [4, 5, 6], [1, 2, 9], [7, 7]]
    parts = [BLEUScore(n_gram=2) for _ in range(3)]
    for part, (start, stop) in zip(parts, [(0, 1), (1, 3), (3, 4)], strict=True):
        ours, theirs = ([" ".join(map(str, s)) for s in which[start:stop]] for which in (said, meant))
        part.update(ours, [[one] for one in theirs])
    found = functools.reduce(functools.partial(merged, "bleu"), parts).compute()
    assert found.item() == pytest.approx(Bleu().update(said, meant).compute(), abs=1e-6)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_states_that_no_merge_gives_exactly() -> None:
    from torchmetrics import Metric
    from torchmetrics.image import PeakSignalNoiseRatio
    from torchmetrics.regression import PearsonCorrCoef
    from torchmetrics.wrappers import MinMaxMetric

    class Mean(Metric):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.add_state("value", torch.tensor(value), dist_reduce_fx="mean")

        def update(self) -> None: ...
        def compute(self) -> Tensor:
            return self.value

    assert merged("m", merged("m", Mean(3.0), Mean(3.0)), Mean(3.0)).compute() == 3, "a setting"
    with pytest.raises(TaskError, match=r"metrics\(\)\['m'\]: Mean reduces its state 'value' by the mean"):
        merged("m", Mean(3.0), Mean(4.0))

    data = [torch.randn(2, n, generator=torch.Generator().manual_seed(n)) for n in (3, 8, 5)]
    parts = []
    for ours, theirs in data:
        parts.append(PeakSignalNoiseRatio(data_range=3.0))
        parts[-1].update(ours, theirs)
    together = PeakSignalNoiseRatio(data_range=3.0)
    together.update(*torch.cat(data, dim=1))
    assert functools.reduce(functools.partial(merged, "m"), parts).compute() == pytest.approx(together.compute().item())

    wrapped = [MinMaxMetric(PeakSignalNoiseRatio(data_range=3.0)) for _ in range(2)]
    for refused in (lambda: merged("m", *wrapped), lambda: state_of("m", wrapped[0])):
        with pytest.raises(TaskError, match="MinMaxMetric wraps a PeakSignalNoiseRatio"):
            refused()

    pairs = []
    for ours, theirs in data:
        pairs.append(PearsonCorrCoef())
        pairs[-1].update(ours, theirs)
    whole = PearsonCorrCoef()
    whole.update(*torch.cat(data, dim=1))
    halves = [merged("m", with_state(pairs[0], state_of("m", pairs[0]), torch.device("cpu")), pairs[1]), pairs[2]]
    assert merged("m", *halves).compute() == pytest.approx(whole.compute().item()), "its states are stacked"

    class Stacked(Mean):
        def __init__(self, value: float) -> None:
            Metric.__init__(self)
            self.add_state("value", torch.tensor(value), dist_reduce_fx=None)

    with pytest.raises(TaskError, match="Stacked reduces its state 'value' by stacking tensors"):
        merged("m", Stacked(1.0), Stacked(1.0))


class Wrong(Counted):
    def merge(self, other: Counted) -> Counted:
        return self

    def compute(self) -> Any:
        return torch.zeros(3)


def test_a_figure_that_is_no_number_is_refused_with_its_name() -> None:
    task = image_task(model=Net, metrics=lambda output, target: {"seen": Wrong(1)})
    with pytest.raises(TaskError, match=r"metrics\(\)\['seen'\].compute\(\) gives a tensor of shape \(3,\)"):
        with_rung(lambda: task, "single", CONFIG)


def test_evaluation_data_have_a_collate_of_their_own() -> None:
    """Mixed images have several classes each, with which no accuracy could be measured."""

    def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
        images, target = default_collate(samples)
        shares = functional.one_hot(target, 5).to(images.dtype)
        return (images + images.roll(1, 0)) / 2, (shares + shares.roll(1, 0)) / 2

    task = image_task(collate=mixed, eval_collate=default_collate)
    config = RunConfig(batch_size=10, steps=2, precision="fp64", device="cpu")
    found = with_rung(lambda: task, "single", config)
    model = task.model().double().eval()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in found.state.items()})
    held_out: Any = task.eval_data() if task.eval_data is not None else None
    images, target = default_collate([held_out[i] for i in range(len(held_out))])
    loss = task.loss(model(images.double()), target).item()
    assert found.evaluation["loss"] == pytest.approx(loss, abs=1e-9)
