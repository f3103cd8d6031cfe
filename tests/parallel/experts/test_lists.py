"""Which lists of experts are shared out, which cannot be, and what a module that runs twice leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rung.distributed.world import open_fake_world
from rung.errors import ModelError, StrategyError
from rung.parallel.experts.two_passes import ListCall, TwoPasses
from rung.planner.explain.explanation import explain
from rung.planner.explain.tables import describe_cut, parameter_rows
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from tests.parallel.experts.test_proof import Listed, shared_out
from tests.tasks import text_task

WIDTH, EXPERTS = 12, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, *others: Any) -> Tensor:
        return self.up(rows).relu()


class Layer(nn.Module):
    """Calls the experts with the rows that have chosen them."""

    def __init__(self, kind: Callable[[], nn.Module] = Expert) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([kind() for _ in range(EXPERTS)])

    def call(self, number: int, rows: Tensor) -> Tensor:
        return self.experts[number](rows)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        result = torch.zeros_like(x)
        for number in range(EXPERTS):
            mask = chosen == number
            if mask.any():
                result[mask] = self.call(number, x[mask])
        return result


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(23, WIDTH)
        self.blocks = nn.ModuleList([layer() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 23)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Mixing(Expert):
    """A row sees the others."""

    def forward(self, rows: Tensor, *others: Any) -> Tensor:
        return super().forward(rows - rows.mean(0))


class Counting(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))


class Hooked(Expert):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda *args: None)


class Chained(Layer):
    """An expert gets what another has computed."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = expert(x)
        return x


class Halting(Layer):
    """Whether experts are called depends on what others have computed."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.experts[0](x)
        return result if result.sum() > 0 else self.experts[1](x)


class Different(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1] = nn.Linear(WIDTH, WIDTH)


class Tied(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].up.weight = self.experts[0].up.weight


class Weighted(Layer):
    def call(self, number: int, rows: Tensor) -> Tensor:
        return self.experts[number](rows, rows)


class Numbered(Layer):
    def call(self, number: int, rows: Tensor) -> Tensor:
        return self.experts[number](rows, number)


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Reading(Layer):
    """Reads the weights of an expert."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.experts[0].up.weight.sum()


class Two(Layer):
    """The rows of a list are the results of another."""

    def __init__(self) -> None:
        super().__init__()
        self.more_experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def call(self, number: int, rows: Tensor) -> Tensor:
        return self.more_experts[number](self.experts[number](rows))


class Beside(Layer):
    """Calls a list that cannot be shared out, too."""

    def __init__(self) -> None:
        super().__init__()
        self.experts_of_others = nn.ModuleList([Expert(), nn.Sequential(nn.Linear(WIDTH, WIDTH))])

    def call(self, number: int, rows: Tensor) -> Tensor:
        return self.experts[number](rows) + self.experts_of_others[number % 2](rows)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (partial(Layer, Mixing), "the result of a row depends on the other rows"),
        (partial(Layer, Counting), "its modules have buffers"),
        (partial(Layer, Hooked), "its modules have hooks"),
        (Chained, "the rows of one of them depend on the results of another"),
        (Halting, "its module fails on random numbers .*depends on what the experts"),
        (Different, "its modules are not alike"),
        (Tied, "its modules share parameters"),
        (Weighted, "not called with one tensor of rows alone"),
        (Numbered, "called with different arguments"),
        (InPlace, "changes its arguments, or the rows of its experts, in place"),
        (Reading, "its module fails on random numbers"),
        (Two, "the rows of one of them depend on the results of another"),
        (Beside, "also calls the modules of blocks.1.experts_of_others, which stay whole"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_lists_that_cannot_be_shared_out_are_refused(layer: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        shared_out(partial(Model, layer))
    assert "blocks.*.experts" in str(error.value)
    assert "Use a data-parallel strategy, or tp" in str(error.value)


def test_lists_are_shared_out() -> None:
    found = shared_out(partial(Model, Layer), "fsdp4,ep2", 4)
    assert "expert parallel: 2 layers with 4 experts shared out among 2 ranks: blocks.*.experts" in found.notes
    assert found.experts is not None
    assert found.experts.foreign == {f"blocks.{block}.experts.{number}" for block in range(2) for number in (2, 3)}


class Noting(Layer):
    """Keeps tensors on itself, which are put back between its two runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        self.balance = self.router(x).mean()
        return super().forward(x)


@pytest.mark.parametrize("layer", [Layer, Noting])
def test_explain_shows_the_experts_of_all_ranks(layer: Callable[[], nn.Module]) -> None:
    found = explain(
        text_task(model=partial(Model, layer)),
        parse("pp2,fsdp2,ep2", 4),
        RunConfig(batch_size=8, unused_parameters="allow"),
    )
    row = next(row for row in parameter_rows(found) if row.name == "blocks.*.experts.*.up.weight")
    assert (row.count, describe_cut(row.place)) == (2 * EXPERTS, "whole ones by ep")
    num_own = sum(place.local_shape == place.shape for place in found.ranks[0].parameters if "experts" in place.name)
    assert num_own == 2 * EXPERTS


def test_every_rank_has_an_expert_of_a_list() -> None:
    with pytest.raises(ModelError, match="its 4 experts, 2 on a rank, leave none for the last of 3 ranks"):
        shared_out(partial(Model, Layer), "ep3", 3)


def test_a_model_that_calls_experts_itself_has_no_block_to_recompute() -> None:
    config = RunConfig(batch_size=8, device="cpu", activation_checkpointing="full")
    with open_fake_world(parse("ep2", 2)) as world, pytest.raises(ModelError, match="there is no block in it"):
        build_runtime(text_task(model=Listed), world, config, total_steps=1)


def test_what_calls_experts_in_a_list_is_whole_on_the_ranks_of_a_tensor_group() -> None:
    parallel = shared_out(partial(Model, Layer), "ep2,tp2", 4)
    assert parallel.plan is not None and parallel.experts is not None
    caller = parallel.experts.lists[0].call.caller
    assert not any(name.startswith(caller) for name in parallel.plan.styles)
    assert any("ep shares out the experts that they call" in note for note in parallel.notes)


def test_a_list_that_the_model_itself_calls_is_not_shared_out_with_tp() -> None:
    with pytest.raises(ModelError, match="what calls them stays whole"):
        shared_out(Listed, "ep2,tp2", 4)


def test_a_list_that_ep_shares_out_is_not_within_cut_sequences() -> None:
    config = RunConfig(batch_size=8, device="cpu", sequence_parallel=True)
    with open_fake_world(parse("ep2,tp2", 4)) as world, pytest.raises(StrategyError, match="Leave it out"):
        build_runtime(text_task(model=partial(Model, Layer)), world, config, total_steps=1)


class Remembering(Layer):
    """Leaves a trace of each call, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.kept = 0, [0]
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.kept.append(self.num_calls)
        self.total += 1
        self.last = torch.rand(())
        return self.last * super().forward(x + torch.rand(()))


def test_a_module_that_runs_twice_leaves_behind_what_one_call_does() -> None:
    torch.manual_seed(1)
    layer, x = Remembering(), torch.randn(5, WIDTH)
    torch.manual_seed(2)
    expected, following = layer(x), torch.rand(())
    call = ListCall("experts", "", EXPERTS, 0, (), (WIDTH, WIDTH), (torch.float32, torch.float32))

    def compute(recorded: list[Any]) -> tuple[list[Tensor], Tensor]:
        with passes.computing():
            found = [layer.experts[one.number](one.rows) for one in recorded]
        return found, torch.cat(found)

    passes = TwoPasses(layer)
    passes.add(layer.experts, call, compute)
    passes.install()
    torch.manual_seed(2)
    assert torch.equal(layer(x), expected)
    assert torch.equal(torch.rand(()), following)
    assert (layer.num_calls, layer.kept, layer.total.item()) == (2, [0, 1, 2], 2.0)
    with pytest.raises(ModelError, match=r"experts\.0 is called outside of the model"):
        layer.experts[0](x)
    with pytest.raises(ModelError, match=r"with rows of 12 numbers in torch\.float64, where the trace"):
        layer.double()(x.double())
