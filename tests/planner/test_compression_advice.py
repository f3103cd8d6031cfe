"""The plan's word on compressed gradients: only where links limit ddp, with what each method would give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rung.cli.main import main
from rung.hardware.cluster import parse_cluster
from rung.planner.command import command_line
from rung.planner.compression_advice import Advice, best_of, try_compression, waiting_share
from rung.planner.cost import StepTime
from rung.planner.estimate import Estimate, Estimator, Memory
from rung.planner.plan import Plan, explain_choice, make_plan
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from tests.tasks import EXAMPLES, TinyGPT, text_task


def row(strategy: str, ranks: int, seconds: float, waits: float = 0.0) -> Estimate:
    memory = Memory(1, 1, 1, {}, {"parameters": 1}, 0)
    return Estimate(parse(strategy, ranks), "none", 1, 1, memory, StepTime(seconds, seconds - waits, 0, waits, 0, 0))


def made(rows: list[Estimate], chosen: Estimate, advice: list[Advice]) -> list[str]:
    cluster = parse_cluster("2xH100, 1Gb/s")
    plan = Plan("text", cluster, 4, "fp32", rows, [], {"parameters": 1}, advice=advice)
    return explain_choice(plan, chosen)


def test_over_a_slow_link_each_method_is_tried_on_the_task() -> None:
    """A step that is nearly all message: half the bytes take half the time, and low ranks take almost none."""
    task = text_task(model=lambda: TinyGPT(width=512, layers=1))
    plan = make_plan(task, RunConfig(batch_size=4, device="cpu"), parse_cluster("2xH100, 1Gb/s"), only="ddp")
    assert plan.chosen is not None and waiting_share(plan.chosen) > 0.9
    found = {one.compress: one for one in plan.advice}
    assert set(found) == {"bf16", "powersgd:4", "topk:0.01"}
    assert found["bf16"].times_quicker == pytest.approx(2, abs=0.1)
    assert found["powersgd:4"].times_quicker > 10
    assert found["topk:0.01"].times_quicker > 10
    assert [one.seconds for one in plan.advice] == sorted(one.seconds for one in plan.advice)
    (line,) = (line for line in plan.words if "Gradients over 1Gb/s take 9" in line)
    assert "--compress" in line and "it changes the numbers" in line
    assert plan.as_json()["advice"][0] == {
        "compress": plan.advice[0].compress,
        "seconds": plan.advice[0].seconds,
        "times_quicker": plan.advice[0].times_quicker,
        "fits": True,
    }


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([row("ddp", 2, 1.0, waits=0.09)], {}),  # hardly visible
        ([row("zero1", 2, 1.0, waits=0.9)], {}),  # cannot be compressed
        ([row("ddp", 2, 1.0, waits=0.9)], {"compress": "bf16"}),  # asked for
        ([row("ddp", 2, 1.0, waits=0.9)], {"local_steps": 8}),
    ],
)
def test_nothing_is_tried_where_nothing_can_be_gained(rows: list[Estimate], settings: Any) -> None:
    config = RunConfig(batch_size=4, device="cpu", **settings)
    looks = Estimator(text_task(), config, parse_cluster("2xH100, 1Gb/s"), 0)
    tried: list[str] = []
    assert try_compression(rows, rows[0], looks, tried.append) == []
    assert not tried


def test_one_layout_by_its_name_is_told_in_detail() -> None:
    memory = Memory(1000, 4096, 5000, {"activations": 700, "parameters": 290, "batch": 5}, {"parameters": 290}, 1)
    fullest = replace(row("pp2", 2, 1.0, waits=0.25), memory=memory)
    plan = Plan("text", parse_cluster("2xH100"), 4, "fp32", [fullest], [], {"parameters": 1}, only_one=True)
    assert explain_choice(plan, fullest)[-2:] == [
        "At the peak rank 1, the fullest has 700 B activations, 290 B parameters; the allocator holds 4 KiB.",
        "A step of 1 s is 75 % arithmetic, 25 % waiting for messages.",
    ]
    assert not any("At the peak" in line for line in explain_choice(replace(plan, only_one=False), fullest))


def test_compression_that_is_asked_for_is_planned() -> None:
    config = RunConfig(batch_size=4, device="cpu", compress="topk:0.1", topk_values="sign")
    plan = make_plan(text_task(), config, parse_cluster("2xH100, 1Gb/s"), only="ddp")
    assert plan.chosen is not None and plan.chosen.layout.name == "ddp"
    assert plan.advice == []
    assert command_line(plan).endswith("--nproc 2 --compress topk:0.1")


def test_local_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--cluster", "2xH100", "--strategy", "ddp", "--set", "local_steps=4"]
    assert main(["plan", str(EXAMPLES / "gpt"), *flags]) == 2
    assert "--local-steps 4 cannot be planned" in capsys.readouterr().err


def test_the_gentlest_of_the_quickest_is_told_of() -> None:
    half, low, few = (
        Advice("bf16", 0.6, 1.6, True),
        Advice("powersgd:4", 0.26, 3.9, True),
        Advice("topk:0.01", 0.25, 4, True),
    )
    assert best_of([few, low, half]) == low
    assert best_of([replace(few, times_quicker=5), low, half]) == replace(few, times_quicker=5)
    assert best_of([replace(few, fits=False), replace(low, fits=False), half]) == half
    assert best_of([replace(half, times_quicker=1.04)]) is None


def test_the_words_say_what_is_held_against_what() -> None:
    ddp, single = row("ddp", 2, 1.0, waits=0.7), row("single", 1, 0.9)
    advice = [Advice("powersgd:4", 0.3, 3.1, True)]
    assert made([ddp], ddp, advice)[-1] == (
        "Gradients over 1Gb/s take 70 % of a step of ddp: --compress powersgd:4 would make it 3.1 times quicker "
        "(it changes the numbers; docs/compression.md)."
    )
    assert (
        "with --compress powersgd:4 ddp would be 3.1 times quicker than single"
        in made([single, ddp], single, advice)[-1]
    )
    in_vain = [Advice("powersgd:4", 1.1, 0.9, True)]
    assert "no method that fits would make it more than 5 % quicker" in made([ddp], ddp, in_vain)[-1]
    assert not any("ompress" in line for line in made([single, ddp], single, in_vain))
    assert not any("ompress" in line for line in made([ddp], ddp, []))
