"""How dp cuts batches, joins outputs, draws random numbers and finds its devices."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rung.distributed.devices import choose_devices
from rung.distributed.world import open_fake_world
from rung.errors import ConfigError, DataError, EnvironmentProblem, ModelError, StrategyError
from rung.runtime.data_parallel.replicas import ReplicaSettings, ThreadReplicas, TransferCounts
from rung.runtime.data_parallel.rng_streams import RngStreams
from rung.runtime.data_parallel.scatter import Nested, cut_rows, piece_sizes, validate_same_form
from rung.spec.compatibility import validate_config
from rung.spec.config import RunConfig
from rung.spec.strategy import fit, parse
from rung.system.processes import num_cores


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


@dataclass
class Output:
    logits: torch.Tensor
    hidden: Any = None


class Named(OrderedDict[str, Any]):
    """As the outputs of Hugging Face's models: a dict with attributes."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 25, 103])
@pytest.mark.parametrize("num_pieces", [1, 2, 4, 7])
def test_pieces_are_those_of_torch(num_rows: int, num_pieces: int) -> None:
    expected = [len(chunk) for chunk in torch.arange(num_rows).chunk(num_pieces)]
    assert piece_sizes(num_rows, num_pieces) == expected


def test_rows_may_be_several_for_a_sample() -> None:
    assert [len(piece) for piece in cut_rows(torch.zeros(15, 2), [3, 2])] == [9, 6]


def test_a_nest_is_taken_apart_and_put_together() -> None:
    one, two, number = torch.zeros(3, 1), torch.ones(3), torch.tensor(7.0)
    named = Named()
    named["logits"] = one
    for data in ([one, (two, "text")], {"a": one, "b": {"c": two}}, Pair(one, [two]), Output(one, two), named):
        nested = Nested(data)
        again = nested.rebuild([t + 1 for t in nested.tensors])
        assert type(again) is type(data)
        assert torch.equal(Nested(again).tensors[0], one + 1)
    assert again.logits is again["logits"]
    nested = Nested((one, number))
    assert (len(nested.tensors), nested.num_scalars) == (1, 1)
    assert nested.rebuild([two])[1] == 7


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((torch.zeros(4, 2), torch.zeros(3)), ["(3,)", "4 samples", "ddp"]),
        ({"x": torch.tensor(1.0)}, ["no tensor"]),
        ([torch.zeros(4), ["a", "b", "c", "d"]], ["texts"]),
    ],
)
def test_what_has_no_rows_is_refused(data: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        Nested(data).validate_input(4, "dp2")
    assert all(word in str(error.value) for word in words)


def test_outputs_that_cannot_be_joined_are_refused() -> None:
    with pytest.raises(ModelError, match="single number"):
        Nested((torch.zeros(4, 2), torch.tensor(1.0))).validate_output(4, "dp2")
    with pytest.raises(ModelError, match=r"\(2, 4, 8\) for 4 samples"):
        Nested(torch.zeros(2, 4, 8)).validate_output(4, "dp2")
    Nested(torch.zeros(12, 8)).validate_output(4, "dp2")
    parts = [Nested(torch.zeros(4, 8)), Nested(torch.zeros(3, 7))]
    with pytest.raises(ModelError, match="shapes differ"):
        validate_same_form(parts, [4, 3], "dp2")


def test_a_replica_repeats_its_random_numbers() -> None:
    module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(3)
        streams = RngStreams(2, recomputes=False)
        found = []
        with streams.forward():
            for number in (0, 1, 0):
                with streams.of(number):
                    x = F.dropout(torch.ones(2, 3, 8), 0.5) + torch.randn(2, 3, 8)
                    attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
                    found.append(attended + module(x, x, x)[0] + torch.empty(8).uniform_())
        assert not streams.notes
        return found

    first, second = drawn(), drawn()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({tensor.sum().item() for tensor in first}) == 3


def test_the_process_s_generator_moves_by_the_seed_alone() -> None:
    torch.manual_seed(3)
    with RngStreams(2, recomputes=False).forward():
        pass
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    streams = RngStreams(2, recomputes=False)
    with streams.forward(), streams.of(0):
        F.dropout(torch.ones(3), 0.5)
    assert torch.equal(torch.get_rng_state(), expected)


def test_following_ends_where_nothing_is_drawn_and_begins_again_where_something_is() -> None:
    streams = RngStreams(1, recomputes=False)
    with streams.forward():
        pass
    assert streams.of(0) is not streams.each[0]
    with streams.forward(), streams.of(0):
        torch.rand(2)
    assert "do not repeat" in streams.notes[0]
    assert streams.of(0) is streams.each[0]


def test_numbers_that_cannot_be_drawn_again_are_refused_with_checkpointing() -> None:
    streams = RngStreams(1, recomputes=True)
    with pytest.raises(ModelError, match="activation checkpointing"), streams.forward():
        torch.rand(2)


def test_a_replica_fails_with_its_own_error() -> None:
    def compute(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
        if (given == 3).any():
            raise ValueError("row 3 is bad")
        return model(given)

    replicas = ThreadReplicas(nn.Linear(1, 1), compute, 2, TransferCounts(), ReplicaSettings("dp2"))
    with pytest.raises(ValueError, match="row 3 is bad"):
        replicas.outputs(torch.arange(4.0)[:, None], 4)
    assert replicas.outputs(torch.zeros(4, 1), 4).shape == (4, 1)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.cache = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(ModelError, match="cannot be copied"):
        ThreadReplicas(model, lambda m, x: m(x), 2, TransferCounts(), ReplicaSettings("dp2"))


def test_the_five_exchanges_are_counted() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    exchanges = TransferCounts()
    replicas = ThreadReplicas(model, lambda m, x: m(x), 4, exchanges, ReplicaSettings("dp4"))
    replicas.outputs(torch.randn(11, 3), 11).square().sum().backward()
    replicas.backward()
    told = {name: (sent.messages, sent.num_bytes) for name, sent in exchanges.traffic.items()}
    trained = 4 * (3 * 5 + 5 + 5 + 5)
    assert told == {  # pieces of 3, 3, 3 and 2 rows; two statistics and a counter
        "scatter inputs": (3, 4 * 8 * 3),
        "broadcast parameters": (3, 3 * (trained + 4 * 10 + 8)),
        "gather outputs": (3, 4 * 8 * 5),
        "scatter output gradients": (3, 4 * 8 * 5),
        "reduce gradients": (3, 3 * trained),
    }
    assert (exchanges.output_bytes, exchanges.output_gradient_bytes) == (220, 220)
    with torch.no_grad():
        replicas.outputs(torch.randn(11, 3), 11)
    assert exchanges.traffic["evaluation"].messages == 9
    assert exchanges.traffic["scatter inputs"].messages == 3


def test_plain_values_of_modules_reach_the_copies() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Dropout(0.5))
    replicas = ThreadReplicas(model, lambda m, x: m(x), 2, TransferCounts(), ReplicaSettings("dp2"))
    model.eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        assert torch.equal(replicas.outputs(torch.ones(4, 2), 4), torch.full((4, 2), 2.0))
    model.train()
    model[1].p = 0.0
    assert torch.equal(replicas.outputs(torch.ones(4, 2), 4), torch.full((4, 2), 2.0))


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(choose_devices(parse("dp3", 1), "cpu", "auto")) == 3
    assert len(choose_devices(parse("dp", 1), "cpu", "auto")) == max(2, num_cores())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, indices in (("dp", [0, 1]), ("dp1", [0]), ("dp2", [0, 1])):
        assert [device.index for device in choose_devices(parse(name, 1), "auto", "auto")] == indices
    with pytest.raises(EnvironmentProblem, match=r"4 GPUs, and torch sees 2. Use --strategy dp2, or --backend gloo"):
        choose_devices(parse("dp4", 1), "auto", "auto")
    assert [device.index for device in choose_devices(parse("dp4", 1), "auto", "gloo")] == [0, 1, 0, 1]


def test_one_process_holds_any_number_of_devices() -> None:
    assert fit("dp4", 1) == (parse("dp4", 1), 0)


def test_what_dp_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="Use ddp with --compile"):
        validate_config(RunConfig(compile=True), parse("dp2", 1))
    with pytest.raises(StrategyError, match="dp2 cannot be planned or explained"), open_fake_world(parse("dp2", 1)):
        pass
