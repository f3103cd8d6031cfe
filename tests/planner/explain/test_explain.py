"""`rung explain` without a model: the chart of a pipeline, the folding of names and messages, text and picture."""

from __future__ import annotations

import io
import itertools
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.stage import PipelineStage

from rung.planner.explain.command import chart_bands, chart_cells, chart_lines, show
from rung.planner.explain.explanation import Explanation, ParameterPlace, RankView, idle_share, lay_out
from rung.planner.explain.svg import draw
from rung.planner.explain.tables import (
    describe_idle,
    fold_names,
    fold_stage_notes,
    groups_of,
    message_rows,
    most_held,
    parameter_rows,
    ranges,
    textbook_idle,
)
from rung.planner.recorder import Message
from rung.spec.strategy import Layout, parse
from rung.system.units import human_bytes

Order = list[list[tuple[str, int, int]]]


def order_of(name: str, num_ranks: int, num_chunks: int) -> Order:
    """Each rank's order of actions: the simple schedules by hand, the others from torch."""
    if name in ("interleaved", "zb"):
        schedule, per_rank = (
            (ScheduleInterleaved1F1B, 2) if name == "interleaved" else (ScheduleInterleavedZeroBubble, 1)
        )
        return torch_order(schedule, num_ranks, num_chunks, per_rank)
    order = []
    for rank in range(num_ranks):
        forwards, backwards = ([(kind, rank, chunk) for chunk in range(num_chunks)] for kind in "FB")
        ahead = num_chunks if name == "gpipe" else num_ranks - rank
        actions = forwards[:ahead]
        for backward, forward in itertools.zip_longest(backwards, forwards[ahead:]):
            actions += [backward, forward] if forward is not None else [backward]
        order.append(actions)
    return order


def torch_order(schedule: Any, num_ranks: int, num_chunks: int, per_rank: int) -> Order:
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, num_ranks, None
    stage.num_stages = num_ranks * per_rank
    made = schedule([stage] * per_rank, num_chunks).pipeline_order
    return [
        [
            (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made[rank]
            if action is not None and action.computation_type.name in kinds
        ]
        for rank in range(num_ranks)
    ]


def explained(name: str = "1f1b", num_ranks: int = 4, num_chunks: int = 8, **changes: Any) -> Explanation:
    """An explanation of a pipeline with equal stages, made by hand."""
    order = order_of(name, num_ranks, num_chunks)
    layout = parse(f"pp{num_ranks}:{name}", num_ranks)
    views = []
    for rank, actions in enumerate(order):
        stages = tuple(sorted({stage for _, stage, _ in actions}))
        last = layout.num_stages - 1
        places = [place(f"blocks.{stage}.weight", stages=(stage,)) for stage in stages]
        places += [place("token.weight", stages=(0, last))] if {0, last} & set(stages) else []
        kept = {"parameters": 4096, "gradients": 4096, "optimizer": 8192, "buffers": 0}
        sent = Counter({Message("forward", "send", 2048, "pp", num_ranks): num_chunks})
        views.append(RankView(rank, rank, stages, places, kept, sent, actions))
    chart = lay_out(order, [1] * layout.num_stages)
    made = Explanation("made", layout, "fp32", 32, num_chunks, 4, [], views, [1] * layout.num_stages, chart)
    return replace(made, **changes)


def place(name: str, **changes: Any) -> ParameterPlace:
    known: dict[str, Any] = {"shape": (8, 4), "local_shape": (4, 4), "dtype": "float32", "cut": {}, "stages": (0,)}
    return ParameterPlace(name, **{**known, "is_trained": True, **changes})


# -- the chart -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 4), (4, 4), (4, 8), (8, 32)])
def test_equal_stages_are_idle_as_the_textbook_says(name: str, num_ranks: int, num_chunks: int) -> None:
    chart = lay_out(order_of(name, num_ranks, num_chunks), [7] * num_ranks)
    assert idle_share(chart, num_ranks) == pytest.approx((num_ranks - 1) / (num_chunks + num_ranks - 1), abs=1e-12)


@pytest.mark.parametrize("name", ["interleaved", "zb"])
@pytest.mark.parametrize(("num_ranks", "num_chunks"), [(2, 4), (4, 8), (8, 32)])
def test_interleaved_and_zero_bubble_are_idle_for_less(name: str, num_ranks: int, num_chunks: int) -> None:
    made = explained(name, num_ranks, num_chunks)
    assert 0 < made.bubble < (num_ranks - 1) / (num_chunks + num_ranks - 1)
    assert made.bubble == pytest.approx(textbook_idle(made)[1], abs=1e-9)


def test_a_costly_stage_makes_the_others_wait() -> None:
    order = order_of("1f1b", 2, 4)
    assert idle_share(lay_out(order, [1, 3]), 2) > idle_share(lay_out(order, [2, 2]), 2)


def test_nothing_starts_before_what_it_needs() -> None:
    for name in ("gpipe", "1f1b", "interleaved", "zb"):
        made = explained(name)
        ends = {(slot.kind, slot.stage, slot.chunk): slot.stop for slot in made.chart}
        for slot in made.chart:
            if slot.kind == "F" and slot.stage > 0:
                assert slot.start >= ends["F", slot.stage - 1, slot.chunk]
            if slot.kind in "BI":
                assert slot.start >= ends["F", slot.stage, slot.chunk]
        for rank in range(4):
            own = sorted((s for s in made.chart if s.rank == rank), key=lambda slot: slot.start)
            assert all(a.stop <= b.start for a, b in itertools.pairwise(own))


def test_recomputing_makes_backward_longer_and_leaves_the_idle_share() -> None:
    order = order_of("1f1b", 4, 8)
    plain, recomputed = lay_out(order, [1] * 4), lay_out(order, [1] * 4, 3.0)
    assert max(s.stop for s in recomputed) == pytest.approx(max(s.stop for s in plain) * 4 / 3)
    assert idle_share(recomputed, 4) == pytest.approx(idle_share(plain, 4))


def test_held_micro_batches() -> None:
    assert [most_held(view) for view in explained("gpipe").ranks] == [8, 8, 8, 8]
    assert [most_held(view) for view in explained("1f1b").ranks] == [4, 3, 2, 1]
    assert all(most_held(view) >= 1 for view in explained("zb").ranks)


def test_text_chart_tells_forward_from_backward_without_colour() -> None:
    rows = chart_cells(explained("1f1b", 2, 2).chart, 2, 18)
    assert ["".join(letter for letter, _ in row) for row in rows] == ["0>1>····0<<<··1<<<", "··0>0<<<1>1<<<····"]


def test_text_chart_marks_second_stages_and_weights() -> None:
    interleaved = "".join(letter for row in chart_cells(explained("interleaved").chart, 4, 90) for letter, _ in row)
    assert {">", "<", "»", "«"} <= set(interleaved)
    apart = chart_cells(explained("zb").chart, 4, 90)
    assert {kind for row in apart for _, kind in row} == {"F", "I", "W", "."}
    assert "0w" in "".join(letter for letter, _ in apart[-1])


@pytest.mark.parametrize("num_chunks", [4, 8, 32, 128])
@pytest.mark.parametrize("num_ranks", [2, 8, 32])
def test_text_chart_fits_its_width(num_ranks: int, num_chunks: int) -> None:
    lines = chart_lines(explained("1f1b", num_ranks, max(num_chunks, num_ranks)), 100)
    assert max(len(line.plain) for line in lines) <= 100
    assert len(lines) < 45


def test_long_charts_keep_beginning_and_end() -> None:
    assert chart_bands(80, 90) == [(0, 80)]
    assert chart_bands(100, 90) == [(0, 90), (90, 100)]
    assert chart_bands(400, 90) == [(0, 90), (310, 400)]


# -- folding -------------------------------------------------------------------------------------------------------


def test_fold_names_stars_only_what_differs() -> None:
    assert fold_names(["blocks.0.mlp.2.weight", "blocks.1.mlp.2.weight"]) == "blocks.*.mlp.2.weight"
    assert fold_names(["head.weight"]) == "head.weight"


def test_parameters_are_folded_over_blocks_and_tied_ones_marked() -> None:
    rows = parameter_rows(explained())
    assert [(row.name, row.count, row.stages, row.is_tied) for row in rows] == [
        ("blocks.*.weight", 4, (0, 1, 2, 3), False),
        ("token.weight", 1, (0, 3), True),
    ]


def test_parameters_of_other_shapes_are_not_folded() -> None:
    view = explained().ranks[0]
    odd = [place("0.weight"), place("2.weight"), place("4.weight", shape=(2, 4)), place("6.weight", cut={"tp": 1})]
    made = explained(ranks=[replace(view, parameters=odd)])
    assert [(row.name, row.count) for row in parameter_rows(made)] == [
        ("*.weight", 2),
        ("4.weight", 1),
        ("6.weight", 1),
    ]


def test_messages_of_many_sizes_become_a_range() -> None:
    few = Counter({Message("forward", "all-gather", size, "dp_shard", 2): 2 for size in (10, 20)})
    many = Counter({Message("backward", "all-gather", size, "dp_shard", 2): 1 for size in range(100, 110)})
    first, second, third = message_rows(many + few)
    assert (first.phase, first.num_ranks, first.total_bytes, second.total_bytes) == ("forward", 2, 40, 20)
    assert (third.phase, third.times, third.each, third.total_bytes) == ("backward", 10, "100 B - 109 B", 1045)


def test_stages_that_do_the_same_are_told_once() -> None:
    groups = groups_of(explained(), lambda view: view.rank in (0, 3))
    assert [group.label for group in groups] == ["stage 0 (rank 0)", "stages 1-2 (ranks 1-2)", "stage 3 (rank 3)"]


def test_small_words() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert [human_bytes(n) for n in (0, 999, 1024, 3 * 2**20, 5 * 2**40)] == ["0 B", "999 B", "1 KiB", "3 MiB", "5 TiB"]
    notes = ["first", *(f"stage {n}: x" for n in range(20)), "last"]
    assert fold_stage_notes(notes)[6:] == ["stage 5: x", "... 13 stages between", "stage 19: x", "last"]
    assert fold_stage_notes(notes[:5]) == notes[:5]


# -- text, picture, JSON -------------------------------------------------------------------------------------------


def shown(made: Explanation, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show(made, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_all_of_it_fits_100_columns() -> None:
    for name in ("1f1b", "interleaved", "zb"):
        made = explained(name, 8, 32)
        told = shown(made)
        assert max(map(len, told.splitlines())) <= 100
        for words in ("Parameters", "Kept by a rank", "Sent in a step", "Schedule", "tied", describe_idle(made)[:10]):
            assert words in told


def test_one_process_sends_nothing() -> None:
    alone = replace(explained().ranks[0], messages=Counter(), actions=[])
    told = shown(explained(ranks=[alone], layout=Layout("single"), chart=[]))
    assert "the process: nothing" in told
    assert "Schedule" not in told


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb"])
def test_svg_is_well_formed_and_escapes_names(name: str) -> None:
    made = explained(name, task='<a & "b">', notes=["x < y & z"])
    odd = [place('a<b>&"c".weight', is_trained=False)]
    made = replace(made, ranks=[replace(made.ranks[0], parameters=odd), *made.ranks[1:]])
    root = ElementTree.fromstring(draw(made))
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any('<a & "b">' in text for text in words)
    assert 'a<b>&"c".weight (frozen)' in words
    assert {"rank 0", "rank 3", "stage 1" if name != "interleaved" else "stages 1, 5"} <= set(words)
    assert not {"script", "style", "image", "link"} & {element.tag.rpartition("}")[2] for element in root.iter()}


def test_svg_has_a_box_for_every_action() -> None:
    made = explained()
    root = ElementTree.fromstring(draw(made))
    tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("of micro-batch" in tip for tip in tips) == len(made.chart) == 2 * 4 * 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp16x64", "fsdp128,tp8"])
def test_svg_of_a_thousand_ranks_stays_small(strategy: str) -> None:
    view = replace(explained().ranks[0], actions=[])
    made = explained(layout=parse(strategy, 1024), ranks=[view], chart=[])
    text = draw(made)
    assert len(text) < 60_000
    height = float(ElementTree.fromstring(text).attrib["height"])
    assert height < 1500
    assert "more" in text


def test_json_holds_plain_values() -> None:
    document = json.loads(json.dumps(explained().as_json()))
    assert document["layout"]["pp"] == 4
    assert document["bubble"] == pytest.approx(3 / 11)
    assert document["ranks"][0]["messages"] == [
        {"phase": "forward", "operation": "send", "num_bytes": 2048, "axis": "pp", "num_ranks": 4, "times": 8}
    ]
    assert len(document["chart"]) == 64
