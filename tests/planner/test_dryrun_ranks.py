"""What a dry run says is sent is what real ranks send: for every row of the matrix, and for the settings beside it.

Ranks that are started once go through all rows of their number. Each row is a world of its own, in which the fourth
step is recorded: by then DDP has settled its buckets, and weights are averaged if that is every second step. The dry
run of such a rank must give the same list in the same order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist

from rung.distributed.status_board import StatusWriter
from rung.distributed.world import open_world
from rung.planner.dryrun import dry_run
from rung.planner.recorder import Message, Recorder
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import Layout, parse
from rung.spec.task import Task
from rung.train.worker import make_batches
from tests.harness import on_ranks
from tests.matrix import BATCH_SIZE, ROWS, Row
from tests.tasks import TASKS

NUM_STEPS = 4
# All rows take minutes. These are of each kind one, on two ranks; `make test-all` runs the others.
USUAL = (
    "ddp-gpt-2ranks-accumulated",
    "zero3-gpt-2ranks-accumulated",
    "tp2-gpt-2ranks",
    "pp2:zb-gpt-2ranks-accumulated",
    "ddp-2ranks-text-compress=powersgd:2",
    "ddp-2ranks-skipping-unused_parameters=allow",
    "cp2-2ranks-text-cp_form=ring",
)


@dataclass(frozen=True)
class Case:
    """A task, a layout and settings."""

    name: str
    make_task: Callable[[], Task]
    layout: Layout
    config: RunConfig

    @property
    def looked_at(self) -> list[int]:
        """The ranks that a plan looks at: the first of each stage. And the last, whose share is the smallest."""
        each = self.layout.num_ranks // self.layout.pp
        return sorted({*range(0, self.layout.num_ranks, each), self.layout.num_ranks - 1})


def of_row(row: Row) -> Case:
    config = RunConfig(batch_size=BATCH_SIZE, micro_batch=row.micro_batch, precision="fp64", clip=0.5, device="cpu")
    return Case(row.name, TASKS[row.model], row.layout, config)


def beside(strategy: str, size: int, task: str = "text", **settings: Any) -> Case:
    """Settings that change what is sent."""
    config = RunConfig(**{"batch_size": 12, "micro_batch": 3, "device": "cpu", "clip": 1.0, **settings})
    words = "-".join(f"{name}={value}" for name, value in settings.items())
    return Case(f"{strategy}-{size}ranks-{task}-{words}", TASKS[task], parse(strategy, size), config)


# Where rows go to the ranks of their experts, sizes depend on values.
COMPARED = [row for row in ROWS if row.layout.kind == "mesh" and row.num_ranks > 1 and row.layout.ep == 1]
CASES = [
    *(of_row(row) for row in COMPARED),
    *(beside("ddp", 2, compress=method) for method in ("fp16", "bf16", "powersgd:2", "topk:0.1", "onebit", "ternary")),
    beside("ddp", 2, local_steps=2),
    beside("ddp", 2, "adamw", precision="bf16", activation_checkpointing="full"),
    beside("fsdp", 2, activation_checkpointing="full"),
    beside("fsdp", 2, activation_checkpointing="selective", precision="bf16"),
    beside("fsdp", 2, "padded", shard_by="whole"),
    beside("tp2", 2, activation_checkpointing="full"),
    beside("tp2", 2, sequence_parallel=True),
    beside("pp2", 2, "padded", activation_checkpointing="full"),
    beside("fsdp2,tp2", 4, sequence_parallel=True, activation_checkpointing="full"),
    *(beside("cp2", 2, cp_form=form) for form in ("ulysses", "gather", "ring")),
    beside("ddp", 2, "images", batch_norm="local"),
    *(beside(strategy, 2, "skipping", unused_parameters="allow") for strategy in ("ddp", "zero1", "zero3")),
]


@contextlib.contextmanager
def in_this_thread() -> Iterator[None]:
    """torch's PowerSGD sends from callbacks, which run in a thread that no recorder sees unless the result is there."""
    reduce = dist.all_reduce

    def all_reduce(*args: Any, **kwargs: Any) -> Any:
        work = reduce(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = reduce


def send_for_real(cases: list[Case], ports: list[int]) -> list[list[Message]]:
    """The messages of this rank in the last step of each case."""
    found = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        config = replace(case.config, steps=NUM_STEPS, eval_every="never")
        with open_world(case.layout, device="cpu", timeout_seconds=60) as world:
            task, status = case.make_task(), StatusWriter()
            runtime = build_runtime(task, world, config, total_steps=NUM_STEPS, status=status)
            window = next(iter(runtime.place(make_batches(task, config, world))))
            for _ in range(NUM_STEPS - 1):
                runtime.step(window, want_norm=True)
            recorder = Recorder(world, status)
            recorder.follow(runtime)
            with in_this_thread(), recorder:
                runtime.step(window, want_norm=True)
        found.append(recorder.messages)
    return found


@pytest.fixture(scope="module")
def sent_for_real(request: pytest.FixtureRequest) -> Callable[[Case], list[list[Message]]]:
    """By case, the messages of all ranks. All cases of a size that were asked for are run at once."""
    asked = [case for case in CASES if any(f"[{case.name}]" in item.nodeid for item in request.session.items)]
    known: dict[str, list[list[Message]]] = {}

    def find(case: Case) -> list[list[Message]]:
        if case.name not in known:
            cases = [one for one in asked if one.layout.num_ranks == case.layout.num_ranks]
            stores = [dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in cases]
            ports = [store.port for store in stores]
            ranks = on_ranks(send_for_real, case.layout.num_ranks, cases, ports, timeout=60 + 20 * len(cases))
            known.update({one.name: [rank[number] for rank in ranks] for number, one in enumerate(cases)})
        return known[case.name]

    return find


def test_all_rows_of_the_mesh_are_here() -> None:
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert {row.name for row in COMPARED} <= names
    assert set(USUAL) <= names


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.name in USUAL else [pytest.mark.slow]) for case in CASES],
)
def test_a_dry_run_sends_what_real_ranks_send(case: Case, sent_for_real: Callable[[Case], list[list[Message]]]) -> None:
    real = sent_for_real(case)
    for rank in case.looked_at:
        run = dry_run(case.make_task(), case.layout, case.config, rank=rank)
        pretended = run.trace.messages(run.second_step)
        assert pretended == real[rank], f"rank {rank}"
        assert pretended, "something is sent"
