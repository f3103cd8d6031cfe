"""A plan with experts knows how uneven the choice is that it was told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from rung.errors import ConfigError
from rung.planner.dryrun import dry_run
from rung.planner.memory import find_peak
from rung.spec.config import RunConfig, resolve
from rung.spec.strategy import parse
from rung.spec.task import Task
from tests import expert_models as models
from tests.parallel.experts.test_lists import Layer, Model
from tests.tasks import text_task

CONFIG = RunConfig(batch_size=48, steps=2, device="cpu", eval_every="never", unused_parameters="allow")


def listed_task() -> Task:
    return text_task(model=partial(Model, Layer))


@pytest.mark.parametrize("make_task", [models.padded_mixture_task, listed_task])
def test_the_busiest_rank_gets_as_many_rows_as_is_said(make_task: Callable[[], Task]) -> None:
    even, uneven = (
        dry_run(make_task(), parse("ep2", 2), replace(CONFIG, expert_load=load), device="cpu") for load in (1.0, 1.8)
    )
    operations = [sum(work.flops for work in run.trace.works()) for run in (even, uneven)]
    assert operations[0] < operations[1]
    assert find_peak(even.trace).num_bytes < find_peak(uneven.trace).num_bytes


def test_no_rank_is_the_busiest_with_less_than_the_others() -> None:
    with pytest.raises(ConfigError, match="expert_load must be at least 1"):
        resolve(models.list_task(), assignments={"expert_load": "0.5"})
