"""What people write in ordinary models: the numbers of a plain loop in float64, or a refusal with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset, default_collate

from rung.spec.config import RunConfig
from rung.spec.task import Task
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import by_hand, largest_difference, shuffled, with_rung

CONFIG = RunConfig(batch_size=10, steps=4, precision="fp64", device="cpu")


def make_task(model: Callable[[], nn.Module], **changes: Any) -> Task:
    def data(count: int = 23) -> TensorDataset:
        inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))
        return TensorDataset(inputs, (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long())

    parts: dict[str, Any] = {
        "model": model,
        "train_data": data,
        "eval_data": lambda: data(7),
        "metrics": lambda output, target: {"rows": torch.ones(len(target))},
        "loss": F.cross_entropy,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "defaults": {},
    }
    return Task(**{**parts, **changes})


class Penalised(nn.Module):
    """A gradient penalty: forward differentiates itself, and backward differentiates that."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), norm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            output: Tensor = self.body(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            # Not a sum: a number added to all classes changes no cross-entropy.
            return output * (1 + (slope.norm(dim=-1, keepdim=True) - 1) ** 2)


class Adversarial(nn.Module):
    """A generator's step through a critic whose weights are held."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        held = {name: value.detach() for name, value in self.critic.named_parameters()}
        made: Tensor = functional_call(self.critic, held, (self.generator(x),))
        real: Tensor = self.critic(x)
        return made + real


class Regularised(nn.Module):
    """Reads all of its parameters in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x)
        total = torch.stack([p.pow(2).sum() for p in self.parameters()]).sum()
        return output * (1 + 0.01 * total)


class Listed(nn.Module):
    """Parameters in a list and a dict, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16) * (n + 1)) for n in range(3)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.zeros(16))})
        self.temperature = nn.Parameter(torch.tensor(1.3))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x)
        for scale in self.scales:
            hidden = torch.tanh(hidden * scale + self.shifts["a"])
        output: Tensor = self.last(hidden)
        return output * self.temperature


class Normed(nn.Module):
    """torch's old weight_norm, which keeps a computed weight as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Linear(8, 16))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.first(x)))
        return output


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 16, sparse=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.table((x[:, :3] > 0).long().sum(1))))
        return output


class TiedSparse(nn.Module):
    """An embedding with sparse gradients, whose weight is also that of the last layer, where gradients are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 16, sparse=True)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 4, bias=False)
        self.last.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.body(self.table((x[:, :3] > 0).long().sum(1))))
        return output


class IdleShared(nn.Module):
    """Blocks that share a layer which none of them uses: an optimizer must not decay it."""

    class Block(nn.Module):
        def __init__(self, shared: nn.Module) -> None:
            super().__init__()
            self.own, self.shared = nn.Linear(8, 8), shared

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.own(x))

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(self.Block(shared) for _ in range(4))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output


class Contrastive(nn.Module):
    """Two views of each sample, and a learnt temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.first(x), dim=-1), F.normalize(self.second(x), dim=-1), self.scale.exp().sum()


class Kept(nn.Module):
    """Hooks keep the outputs of layers, which forward uses later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.last = nn.Linear(8, 4)
        self.features: dict[str, Tensor] = {}
        for number in (0, 2):
            self.layers[number].register_forward_hook(self.keep(str(number)))
        self.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)

    def keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self.features[name] = output

        return hook

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        output: Tensor = self.last(x + self.features["0"] * self.features["2"])
        return output


class KeptForLoss(Kept):
    """What a hook keeps is read by the loss, past the output of the model."""

    features: dict[str, Tensor] = {}  # noqa: RUF012

    def keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            KeptForLoss.features[name] = output

        return hook

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        output: Tensor = self.last(x)
        return output


class Recomputed(nn.Module):
    """Checkpoints its own blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)])
        self.last = nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        output: Tensor = self.last(x)
        return output


class Translating(nn.Module):
    """torch's encoder and decoder, whose forward looks at the values of the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 8)
        self.body = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.first(x[:, :, None])
        mask = nn.Transformer.generate_square_subsequent_mask(steps.shape[1], dtype=steps.dtype)
        output: Tensor = self.last(self.body(steps.flip(1), steps, tgt_mask=mask).mean(1))
        return output


class Skipping(nn.Module):
    """A small U-Net with a layer that can be cut among layers that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 8, 3, stride=2, padding=1)])
        self.middle = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.up = nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.last = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = torch.tanh(self.down[0](x[:, None]))
        coarse = torch.tanh(self.down[1](fine))
        coarse = coarse + self.middle(coarse.mean(-1))[:, :, None]
        output: Tensor = self.last(torch.cat([self.up(coarse), fine], dim=1))
        return output.mean(-1)


class Branching(nn.Module):
    """Runs another branch on each rank, as one that depends on the samples may."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.branches[torch.distributed.get_rank()](x))
        return output


def contrast(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    first, second, scale = output
    logits, places = scale * first @ second.T, torch.arange(len(first))
    return (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2


class Late(nn.Module):
    """A part that gets its first gradient in the third step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.calls = nn.Linear(8, 4), nn.Linear(8, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.first(x) + self.late(x) if self.calls > 2 else self.first(x)


def late_task() -> Task:
    return make_task(Late, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def contrastive_task() -> Task:
    return make_task(Contrastive, loss=contrast, loss_scope="batch")


def penalised_task() -> Task:
    return make_task(Penalised)


def adversarial_task() -> Task:
    return make_task(Adversarial)


def regularised_task() -> Task:
    return make_task(Regularised)


def listed_task() -> Task:
    return make_task(Listed)


def penalised_batch_task() -> Task:
    return make_task(lambda: Penalised(nn.BatchNorm1d))


def normed_task() -> Task:
    return make_task(Normed)


def sparse_task() -> Task:
    return make_task(Sparse)


def tied_sparse_task() -> Task:
    return make_task(TiedSparse)


def idle_shared_task() -> Task:
    return make_task(IdleShared, optimizer=lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.5))


def kept_task() -> Task:
    return make_task(Kept)


def kept_for_loss_task() -> Task:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * KeptForLoss.features["0"].square().mean()

    return make_task(KeptForLoss, loss=loss)


def translating_task() -> Task:
    return make_task(Translating)


def skipping_task() -> Task:
    return make_task(Skipping)


def recomputed_task() -> Task:
    return make_task(lambda: Recomputed(reentrant=False))


def reentrant_task() -> Task:
    return make_task(lambda: Recomputed(reentrant=True))


def branching_task() -> Task:
    return make_task(Branching)


def loader_task() -> Task:
    whole = make_task(Penalised)
    return make_task(Penalised, train_data=lambda: DataLoader(whole.train_data(), batch_size=4))


def assert_same(task: Callable[[], Task], strategy: str, num_ranks: int, config: RunConfig, micro: int | None) -> None:
    expected = by_hand(task(), config, micro)
    if config.micro_batch is not None and task().loss_scope == "batch":
        expected.evaluation = {}  # by hand it is one batch, and its loss is no mean over micro-batches
    found = on_ranks(with_rung, num_ranks, task, strategy, config)
    assert largest_difference(expected, found[0]) < 1e-9


@pytest.mark.parametrize(
    ("task", "strategy", "changes"),
    [
        slow(penalised_task, "ddp", {}),
        (penalised_task, "tp2", {}),
        (penalised_task, "zero3", {"shard_by": "whole"}),
        (penalised_batch_task, "ddp", {}),
        (adversarial_task, "ddp", {}),
        slow(adversarial_task, "zero1", {}),
        (adversarial_task, "zero3", {"shard_by": "whole"}),
        slow(regularised_task, "ddp", {}),
        (regularised_task, "zero3", {"shard_by": "whole"}),
        (listed_task, "zero3", {}),
        slow(listed_task, "zero2", {"micro_batch": 2}),
        (listed_task, "pp2", {"micro_batch": 5}),
        slow(normed_task, "zero3", {}),
        (normed_task, "pp2", {"micro_batch": 5}),
        (sparse_task, "ddp", {}),
        (tied_sparse_task, "pp2", {"micro_batch": 5}),
        (idle_shared_task, "pp2", {"micro_batch": 5, "unused_parameters": "allow"}),
        (late_task, "ddp", {"unused_parameters": "allow"}),
        slow(late_task, "zero3", {"unused_parameters": "allow"}),
        (kept_task, "pp2", {"micro_batch": 5}),
        (kept_task, "tp2", {}),
        slow(kept_task, "zero3", {}),
        (kept_for_loss_task, "tp2", {}),
        (translating_task, "pp2", {"micro_batch": 5}),
        (translating_task, "tp2", {}),
        (skipping_task, "tp2", {}),
        (recomputed_task, "pp2", {"micro_batch": 5}),
        slow(recomputed_task, "tp2", {}),
        (reentrant_task, "pp2", {"micro_batch": 5}),
        slow(reentrant_task, "tp2", {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_numbers_are_those_of_a_plain_loop(
    task: Callable[[], Task], strategy: str, changes: dict[str, Any]
) -> None:
    config = RunConfig(batch_size=10, steps=4, precision="fp64", device="cpu", **changes)
    ranks = 1 if strategy in ("pp2", "tp2") else 2
    micro = None if config.micro_batch is None else config.micro_batch * ranks
    assert_same(task, strategy, 2, config, micro)


def test_the_replicas_of_dp_keep_features_of_their_own() -> None:
    assert_same(kept_task, "dp2", 1, CONFIG, None)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "micro_batch"),
    [
        slow("ddp", 2, None),
        ("ddp", 3, 2),
        ("zero3", 2, 3),
        slow("zero1", 2, None),
        ("tp2", 2, None),
        ("pp2", 2, 5),
        ("zero2x2,tp2", 4, 3),
    ],
)
def test_a_loss_of_the_whole_batch_is_that_of_one_process(
    strategy: str, num_ranks: int, micro_batch: int | None
) -> None:
    config = RunConfig(
        batch_size=10, steps=4, precision="fp64", device="cpu", micro_batch=micro_batch, eval_every="never"
    )
    data_ranks = {"tp2": 1, "pp2": 1, "zero2x2,tp2": 2}.get(strategy, num_ranks)
    assert_same(contrastive_task, strategy, num_ranks, config, micro_batch * data_ranks if micro_batch else None)


def keep(samples: list[Any]) -> list[Any]:
    return [sample for sample in samples if sample[1] != 3]


def dropping_task(**changes: Any) -> Task:
    """As many write it: samples that are of no use are left out when a batch is made of them."""
    whole = {"collate": lambda samples: default_collate(keep(samples)), "eval_collate": default_collate}
    return make_task(lambda: nn.Linear(8, 4), **whole, **changes)


def counting_task() -> Task:
    return dropping_task(loss_weight=len)


@pytest.mark.parametrize(("task", "strategy"), [(dropping_task, "single"), (counting_task, "ddp")])
def test_samples_that_collate_leaves_out(task: Callable[[], Task], strategy: str) -> None:
    kept = [keep(samples) for samples in shuffled(task(), CONFIG)]
    assert any(len(samples) % 10 not in (0, 3) for samples in kept)
    found = (
        with_rung(task, strategy, CONFIG) if strategy == "single" else on_ranks(with_rung, 2, task, strategy, CONFIG)[0]
    )
    wanted = by_hand(task(), CONFIG, steps=kept)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert largest_difference(found, wanted) < 1e-12


@pytest.mark.parametrize(
    ("task", "strategy", "reason"),
    [
        (dropping_task, "ddp", r"made \d rows of \d samples.*loss_weight\(target\) return how many"),
        (adversarial_task, "zero3", "other weights than its own"),
        (regularised_task, "zero3", "--shard-by whole"),
        (penalised_task, "zero3", "--shard-by whole"),
        (sparse_task, "zero3", "a sparse gradient, which cannot be sharded"),
        (penalised_task, "pp2", "a strategy without stages"),
        (branching_task, "zero3", "rank 0 runs branches.0, while rank 1 runs branches.1"),
        (loader_task, "ddp", "Return its data set"),
        (kept_for_loss_task, "pp2", "a tensor that an earlier stage computed and the model does not return"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_cannot_be_had_is_refused_with_the_reason(task: Callable[[], Task], strategy: str, reason: str) -> None:
    with pytest.raises(RankFailed, match=reason):
        on_ranks(with_rung, 2, task, strategy, CONFIG)
