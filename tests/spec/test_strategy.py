from __future__ import annotations

import pytest

from rung.errors import StrategyError
from rung.spec.abilities import describe_layout
from rung.spec.presets import PRESETS
from rung.spec.strategy import default_name, parse, required_num_ranks


@pytest.mark.parametrize(
    ("text", "size", "replicate", "shard", "zero"),
    [
        ("single", 1, 1, 1, 0),
        ("ddp", 4, 4, 1, 0),
        ("ddp4", 4, 4, 1, 0),
        ("zero1", 4, 1, 4, 1),
        ("zero1x4", 4, 1, 4, 1),
        ("zero2", 3, 1, 3, 2),
        ("zero3", 2, 1, 2, 3),
        ("fsdp", 2, 1, 2, 3),
        ("fsdp12", 12, 1, 12, 3),
        ("hsdp", 1, 1, 1, 3),
        ("hsdp", 8, 2, 4, 3),
        ("hsdp2x2", 4, 2, 2, 3),
        ("HSDP4x1", 4, 4, 1, 3),
    ],
)
def test_names_are_points_in_the_mesh(text: str, size: int, replicate: int, shard: int, zero: int) -> None:
    layout = parse(text, size)
    assert (layout.dp_replicate, layout.dp_shard, layout.zero) == (replicate, shard, zero)
    assert layout.num_ranks == size


def test_hsdp_shards_inside_a_host_when_there_are_several() -> None:
    layout = parse("hsdp", 32, ranks_per_host=8)
    assert (layout.dp_replicate, layout.dp_shard) == (4, 8)


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("dpp", 2, ["no strategy 'dpp'", "Did you mean"]),
        ("fdsp", 2, ["Did you mean 'fsdp'"]),
        ("single", 2, ["one process", "--nproc 1", "'ddp'"]),
        ("single1", 1, ["takes no size"]),
        ("ddp4", 2, ["4 processes", "the job has 2", "--nproc 4"]),
        ("hsdp", 3, ["two replicas of 3", "hsdp1x3, hsdp3x1"]),
        ("hsdp4", 4, ["two sizes", "hsdp2x2"]),
        ("ddp2x2", 4, ["one size"]),
        ("zero14", 4, ["no strategy 'zero14'"]),
        ("ddp0", 1, ["no strategy 'ddp0'"]),
        ("", 1, ["no strategy ''"]),
        ("ddp2,fsdp2", 4, ["set the same axis", "hsdpRxS"]),
        ("ddp", 0, ["at least one process"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_choice(text: str, size: int, words: list[str]) -> None:
    with pytest.raises(StrategyError) as error:
        parse(text, size)
    for word in words:
        assert word in str(error.value)


def test_a_sized_name_brings_its_number_of_processes() -> None:
    assert required_num_ranks("hsdp2x3") == 6
    assert required_num_ranks("zero1x4") == 4
    assert required_num_ranks("ddp") is None
    assert required_num_ranks("single") == 1


def test_the_lowest_rung_is_the_default() -> None:
    assert default_name(1) == "single"
    assert default_name(8) == "ddp"


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_describes_itself(name: str) -> None:
    assert name in describe_layout(parse(name, 1 if name in ("single", "dp") else 4))


@pytest.mark.parametrize(
    ("text", "size", "name", "axes"),
    [
        ("pp2,fsdp,tp2", 8, "pp2,fsdp2,tp2", (2, 1, 2, 2)),
        ("tp2,fsdp,pp2", 8, "pp2,fsdp2,tp2", (2, 1, 2, 2)),
        ("pp2,ddp2", 4, "pp2,ddp2", (2, 2, 1, 1)),
        ("cp4", 4, "cp4", (1, 4, 1, 1)),
        ("cp2,fsdp", 8, "fsdp4,cp2", (1, 1, 8, 1)),
        ("pp2,hsdp2x2,cp2,tp2", 32, "pp2,hsdp2x2,cp2,tp2", (2, 2, 4, 2)),
        ("pp2:zb,zero1", 8, "pp2:zb,zero1x4", (2, 1, 4, 1)),
        ("pp4:1f1b", 4, "pp4", (4, 1, 1, 1)),
        ("pp", 3, "pp3", (3, 1, 1, 1)),
        ("tp", 4, "tp4", (1, 1, 1, 4)),
        ("hsdp2x2,tp2", 8, "hsdp2x2,tp2", (1, 2, 2, 2)),
        ("hsdp,tp4", 32, "hsdp2x4,tp4", (1, 2, 4, 4)),
        ("pp2,tp", 6, "pp2,tp3", (2, 1, 1, 3)),
    ],
)
def test_compositions(text: str, size: int, name: str, axes: tuple[int, ...]) -> None:
    layout = parse(text, size)
    assert layout.name == name
    assert tuple(layout.axes.values()) == axes
    assert layout.num_ranks == size
    assert parse(layout.name, size) == layout, "the full name means the same"


def test_unsized_hsdp_shards_the_data_ranks_of_one_host() -> None:
    assert parse("hsdp,tp2", 16, ranks_per_host=8).axes == {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "tp": 2}


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("pp2,fsdp4", 4, ["8 processes", "the job has 4", "--nproc 8", "'pp2,fsdp'"]),
        ("pp3,fsdp", 4, ["take 3 processes", "does not divide 4"]),
        ("pp,fsdp", 4, ["pp and fsdp have no size"]),
        ("pp2,pp2", 4, ["set the same axis"]),
        ("pp2:gpip", 2, ["no schedule 'gpip'", "Did you mean 'gpipe'"]),
        ("ddp2:gpipe", 2, ["only pp has a schedule"]),
        ("single,tp2", 2, ["cannot be composed"]),
        ("pp2,fdsp2", 4, ["no strategy 'fdsp2'", "Did you mean 'fsdp'"]),
    ],
)
def test_compositions_that_cannot_be(text: str, size: int, words: list[str]) -> None:
    with pytest.raises(StrategyError) as error:
        parse(text, size)
    for word in words:
        assert word in str(error.value)


def test_the_schedule_is_named_once() -> None:
    assert parse("pp2", 2, schedule="gpipe").schedule == "gpipe"
    assert parse("pp2:zb", 2, schedule="zb").name == "pp2:zb"
    with pytest.raises(StrategyError, match="Keep one of them"):
        parse("pp2:zb", 2, schedule="gpipe")


def test_ranks_and_their_places() -> None:
    layout = parse("pp2,hsdp2x2,tp2", 16)
    assert layout.coordinates(13) == {"pp": 1, "dp_replicate": 1, "dp_shard": 0, "tp": 1}
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    telling = [rank for rank in range(16) if layout.counts_loss(rank)]
    assert telling == [8, 10, 12, 14], "the first of each tensor group on the last stage"
    assert sorted(layout.data_rank(rank) for rank in telling) == [0, 1, 2, 3]


def test_ranks_that_share_a_sequence_are_neighbours_with_one_loss() -> None:
    layout = parse("pp2,fsdp2,cp2,tp2", 16)
    assert layout.num_data_ranks == 2 and layout.num_gradient_ranks == 4
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [rank for rank in range(16) if layout.counts_loss(rank)] == [8, 12]
    assert describe_layout(layout).endswith("2 stages (1f1b) x 4 shards (sequences cut in 2) x tensors cut in 2")
