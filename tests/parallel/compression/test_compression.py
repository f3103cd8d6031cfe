"""What is sent of a gradient: packing, choosing, quantising, and that nothing is lost on the way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rung.distributed.world import World
from rung.errors import ConfigError
from rung.parallel.compression import Slots, make_exchange, ring_bytes
from rung.parallel.compression.packing import (
    Positions,
    num_bit_bytes,
    num_trit_bytes,
    pack_bits,
    pack_trits,
    unpack_bits,
    unpack_trits,
)
from rung.parallel.compression.topk import largest, warm_ratio
from rung.spec.compatibility import validate_config
from rung.spec.config import RunConfig, check
from rung.spec.gradient_sync import Compression, parse_compression
from rung.spec.strategy import parse

_SIZES = (1, 2, 5, 7, 8, 9, 63, 1000, 4097)


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", Compression("none")),
        ("fp16", Compression("fp16")),
        ("powersgd", Compression("powersgd", rank=4)),
        ("powersgd:2", Compression("powersgd", rank=2)),
        ("topk", Compression("topk", ratio=0.01)),
        ("topk:1.0", Compression("topk", ratio=1.0)),
        ("topk:1e-3", Compression("topk", ratio=0.001)),
    ],
)
def test_the_text_of_compress_is_read(text: str, expected: Compression) -> None:
    assert parse_compression(text) == expected
    assert check("compress", text) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("topq", r"Did you mean 'topk'.*powersgd\[:rank\].*topk\[:ratio\]"),
        ("fp16:2", "fp16 takes no number"),
        ("powersgd:0", "whole number of at least 1, such as powersgd:4"),
        ("powersgd:x", "whole number of at least 1"),
        ("topk:0", "above 0 and at most 1, such as topk:0.01"),
        ("topk:1.5", "above 0 and at most 1"),
        ("topk:nan", "above 0 and at most 1"),
        ("topk:", "above 0 and at most 1"),
    ],
)
def test_a_wrong_text_of_compress_is_refused_with_what_is_right(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check("compress", text)


@pytest.mark.parametrize(
    ("settings", "strategy", "told"),
    [
        ({"compress": "topk"}, "zero1", "--compress topk changes how ddp synchronizes.*zero1.*--strategy ddp"),
        ({"local_steps": 4}, "fsdp", "--local-steps 4 changes how ddp"),
        ({"outer": "diloco"}, "ddp", "--outer diloco needs --local-steps"),
        ({"local_steps": 4, "outer_lr": 0.5}, "ddp", "outer_lr=0.5 is for --outer diloco"),
        ({"compress": "fp16"}, "single", "one process sends no gradients. Use --nproc 2"),
        ({"compress": "onebit", "local_steps": 4}, "ddp", "--compress onebit .* and --local-steps 4 synchronizes none"),
        ({"topk_values": "sign"}, "ddp", "topk_values=sign needs --compress topk"),
        ({"compress": "fp16", "compress_warmup": 3}, "ddp", "compress_warmup=3 is for --compress topk and powersgd"),
    ],
)
def test_contradictions_are_refused_by_name(settings: dict[str, Any], strategy: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate_config(RunConfig(**settings), parse(strategy, 1 if strategy == "single" else 2))


@pytest.mark.parametrize(("key", "value"), [("outer_lr", 0.0), ("outer_momentum", 1.0), ("compress_warmup", -1)])
def test_settings_have_limits(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        check(key, value)


# -- packing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", _SIZES)
def test_bits_and_trits_come_back_as_they_were(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    bits = torch.rand(count, generator=generator) < 0.5
    trits = torch.randint(-1, 2, (count,), generator=generator).to(torch.int8)
    assert torch.equal(unpack_bits(pack_bits(bits), count), bits)
    assert torch.equal(unpack_trits(pack_trits(trits), count), trits)
    assert pack_bits(bits).numel() == num_bit_bytes(count) == math.ceil(count / 8)
    assert pack_trits(trits).numel() == num_trit_bytes(count) == math.ceil(count / 5)


@pytest.mark.parametrize("size", _SIZES)
def test_positions_come_back_as_they_were(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for count in sorted({1, max(1, size // 100), max(1, size // 10), max(1, size // 3), max(1, size - 1), size}):
        form = Positions(size, count)
        for numbers in (
            torch.randperm(size, generator=generator)[:count].sort().values,
            torch.arange(count),
            torch.arange(size - count, size),
        ):
            packed = form.pack(numbers)
            assert packed.numel() == form.num_bytes
            assert torch.equal(form.unpack(packed), numbers)


def test_positions_take_little_more_than_they_must() -> None:
    size = 400_000
    for part in (0.001, 0.01, 0.1):
        entropy = -(part * math.log2(part) + (1 - part) * math.log2(1 - part)) / part
        assert 8 * Positions(size, int(part * size)).num_bytes / (part * size) < entropy + 0.7
    assert Positions(size, size).num_bytes == 0
    assert Positions(size, size // 2).num_bytes == size // 8


# -- choosing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 1000, 100_000])
@pytest.mark.parametrize("part", [0.001, 0.01, 0.3, 1.0])
def test_the_largest_values_are_chosen(size: int, part: float) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) ** 3
    count = max(1, int(part * size))
    expected = torch.topk(values.abs(), count).indices.sort().values
    assert torch.equal(largest(values, count), expected)


def test_as_many_are_chosen_where_values_are_equal() -> None:
    """A sample's threshold then lets nothing, or everything, pass."""
    for values in (torch.zeros(100_000), torch.ones(100_000), (torch.arange(100_000) % 67 == 0).float()):
        chosen = largest(values, 500)
        assert chosen.numel() == 500 == chosen.unique().numel()
        assert bool((chosen.diff() > 0).all())


def test_what_topk_sends_shrinks_in_stages() -> None:
    ratios = [warm_ratio(step, 0.001, 8) for step in range(10)]
    assert ratios == [1 / 4] * 2 + [1 / 16] * 2 + [1 / 64] * 2 + [1 / 256] * 2 + [0.001] * 2
    assert [warm_ratio(step, 0.25, 8) for step in (0, 7, 8)] == [0.25] * 3
    assert warm_ratio(0, 0.01, 0) == 0.01


# -- errors are kept ----------------------------------------------------------------------------------------------


def _alone(parameters: list[tuple[str, nn.Parameter]], momentum: float = 0.0, **settings: Any) -> Any:
    world = World(parse("ddp", 1), 0, 1, 0, torch.device("cpu"), "none", None)
    optimizer = torch.optim.SGD([p for _, p in parameters], lr=1.0, momentum=momentum)
    return make_exchange(RunConfig(**settings), world, optimizer, parameters, None)


def _parameters() -> list[tuple[str, nn.Parameter]]:
    return [(f"p{n}", nn.Parameter(torch.zeros(shape))) for n, shape in enumerate([(7, 9), (5,), (), (3, 2, 2)])]


def _give(parameters: list[tuple[str, nn.Parameter]], seed: int) -> Tensor:
    """Gradients of few binary digits, so that sums of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in parameters:
        parameter.grad = torch.randint(-512, 513, parameter.shape, generator=generator) / 64
    return torch.cat([p.grad.reshape(-1).clone() for _, p in parameters if p.grad is not None])


@pytest.mark.parametrize(
    "settings",
    [
        {"compress": "topk:0.05"},
        {"compress": "topk:0.3"},
        {"compress": "topk:0.05", "topk_values": "full"},
        {"compress": "topk:0.05", "topk_values": "sign"},
        {"compress": "onebit"},
    ],
)
def test_what_was_sent_and_what_is_left_are_all_gradients(settings: dict[str, Any]) -> None:
    parameters = _parameters()
    exchange = _alone(parameters, **settings)
    given, sent = torch.zeros(exchange.slots.total), torch.zeros(exchange.slots.total)
    for step in range(20):
        given += _give(parameters, step)
        exchange.reduce()
        exchange.commit()
        sent += torch.cat([p.grad.reshape(-1) for _, p in parameters])
    left = exchange.vectors()["gradient"]
    exact = "sign" not in settings.values() and settings["compress"] != "onebit"
    torch.testing.assert_close(sent + left, given, rtol=0, atol=0 if exact else 1e-3)
    assert left.abs().sum() > 0


def test_nothing_is_taken_into_account_before_it_is_committed() -> None:
    """A rank that fails in the middle of an exchange can still save the state after the step before."""
    parameters = _parameters()
    for settings in ({"compress": "topk:0.05"}, {"compress": "onebit"}):
        exchange = _alone(parameters, momentum=0.9, **settings)
        before = {name: vector.clone() for name, vector in exchange.vectors().items()}
        _give(parameters, 1)
        exchange.reduce()
        assert all(torch.equal(exchange.vectors()[name], vector) for name, vector in before.items())
        exchange.commit()
        assert any(not torch.equal(exchange.vectors()[name], vector) for name, vector in before.items())


def test_momentum_of_a_sent_value_begins_anew() -> None:
    parameters = _parameters()
    exchange = _alone(parameters, momentum=0.9, compress="topk:0.05")
    _give(parameters, 1)
    exchange.reduce()
    exchange.commit()
    sent = torch.cat([p.grad.reshape(-1) for _, p in parameters]) != 0
    velocity = exchange.vectors()["velocity"]
    assert sent.sum() == math.ceil(0.05 * sent.numel())
    assert bool((velocity[sent] == 0).all()) and bool((velocity[~sent] != 0).sum() > 50)


def test_ternary_is_right_in_the_mean() -> None:
    parameters = [("p", nn.Parameter(torch.zeros(4)))]
    exchange = _alone(parameters, compress="ternary")
    gradient = torch.tensor([1.0, -0.5, 0.25, 0.0])
    total = torch.zeros(4)
    for _ in range(2000):
        parameters[0][1].grad = gradient.clone()
        exchange.reduce()
        exchange.commit()
        assert set((parameters[0][1].grad / 1.0).tolist()) <= {-1.0, 0.0, 1.0}
        total += parameters[0][1].grad
    torch.testing.assert_close(total / 2000, gradient, rtol=0, atol=0.05)


def test_each_rank_clips_its_own_part() -> None:
    parameters = [("p", nn.Parameter(torch.zeros(4)))]
    exchange = _alone(parameters, compress="topk:1.0", clip=1.0)
    parameters[0][1].grad = torch.full((4,), 10.0)
    exchange.reduce()
    assert parameters[0][1].grad.norm().item() == pytest.approx(1.0, abs=1e-5)


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    exchange = _alone([("table.weight", table.weight)], compress="topk:0.5")
    with pytest.raises(Exception, match=r"the gradient of table\.weight is sparse.*sparse=False"):
        exchange.reduce()


def test_adam_keeps_its_momentum_and_a_note_says_so() -> None:
    parameters = _parameters()
    world = World(parse("ddp", 1), 0, 1, 0, torch.device("cpu"), "none", None)
    adam = torch.optim.AdamW([p for _, p in parameters])
    exchange = make_exchange(RunConfig(compress="topk"), world, adam, parameters, None)
    assert exchange.notes == [
        "topk is plain error feedback: momentum stays with AdamW; it is taken over from SGD alone"
    ]
    assert list(exchange.vectors()) == ["gradient"]
    with_sgd = _alone(parameters, momentum=0.9, compress="topk")
    assert "takes over SGD's momentum" in with_sgd.notes[0]
    assert list(with_sgd.vectors()) == ["update", "velocity"]


def test_a_ring_sends_twice_what_is_not_a_ranks_own() -> None:
    assert [ring_bytes(1200, n) for n in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]


def test_wide_parameters_make_wide_sums() -> None:
    slots = Slots([("a", nn.Parameter(torch.zeros(2, dtype=torch.float64)))], torch.device("cpu"))
    assert slots.dtype == torch.float64
    assert Slots(_parameters(), torch.device("cpu")).dtype == torch.float32
