from __future__ import annotations

import pytest

from rung.errors import StrategyError
from rung.strategy import PRESETS, default_name, natural_num_ranks, parse


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
        ("dpp", 2, ["no strategy 'dpp'", "Did you mean 'ddp'"]),
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
        ("ddp2,fsdp2", 4, ["one name", "hsdpRxS"]),
        ("ddp", 0, ["at least one process"]),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_choice(text: str, size: int, words: list[str]) -> None:
    with pytest.raises(StrategyError) as error:
        parse(text, size)
    for word in words:
        assert word in str(error.value)


def test_a_sized_name_brings_its_number_of_processes() -> None:
    assert natural_num_ranks("hsdp2x3") == 6
    assert natural_num_ranks("zero1x4") == 4
    assert natural_num_ranks("ddp") is None
    assert natural_num_ranks("single") == 1


def test_the_lowest_rung_is_the_default() -> None:
    assert default_name(1) == "single"
    assert default_name(8) == "ddp"


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_describes_itself(name: str) -> None:
    assert name in parse(name, 1 if name == "single" else 4).describe()
