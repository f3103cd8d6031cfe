"""States beside checkpoints: on disks that are not shared, in memory, and rescued from a step that failed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rung.checkpoint import StorageTopology, memory_folder, restore
from rung.distributed.world import open_world
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_rank, environment_size
from rung.train.checkpointing import Checkpointing, find_state
from rung.train.worker import dropout_seed, make_batches, position_of
from tests.checkpoint.test_checkpoint_ranks import EXACT, FP64, _largest
from tests.checkpoints import legs
from tests.harness import on_ranks
from tests.marks import slow
from tests.tasks import dropping_task, gpt_task, image_task


def _steps(
    make_task: Any, strategy: str, config: RunConfig, folders: list[str], until: int, fail: str | None = None
) -> tuple[int, dict[str, Any], bool]:
    """Steps up to `until` on this rank, whose disk is its own folder. Where it began, its weights, what it rescued."""
    task: Task = make_task()
    folder = Path(folders[environment_rank()])
    folder.mkdir(parents=True, exist_ok=True)
    with open_world(parse(strategy, environment_size()), device="cpu", timeout_seconds=20) as world:
        sites = StorageTopology(world, folder)
        assert len(sites.leaders) == len(set(folders))
        checkpoint = find_state(folder, sites, resume=True)
        start = position_of(checkpoint)
        batches = make_batches(task, replace(config, steps=until), world, start_step=start.step)
        runtime = build_runtime(task, world, config, total_steps=config.steps, seeded=checkpoint is None)
        torch.manual_seed(dropout_seed(config.seed, world))
        if checkpoint is not None:
            restore(runtime, checkpoint, seed=config.seed)
        checkpointing = Checkpointing(folder, runtime, sites, config, {}, start)
        position = start
        rescued = False
        try:
            for window in runtime.place(batches):
                checkpointing.before_step()
                if fail is not None and window.step == until and world.rank == 1:
                    _fail_in(runtime, fail)
                runtime.step(window)
                position = replace(position, step=window.step)
                checkpointing.after_step(position)
                if checkpointing.is_due(position):
                    checkpointing.save(position)
        except Exception:
            if fail is None:
                raise
            rescued = checkpointing.rescue()
            if dist.is_initialized():
                dist.destroy_process_group()
            return start.step, {}, rescued
        for wait in (
            checkpointing._saver.wait,
            *([checkpointing._replicator.wait] if checkpointing._replicator else []),
        ):
            wait()
        assert not [record.error for record in checkpointing.finished() if record.error]
        state = {name: value.numpy() for name, value in runtime.named_weights()}
        return start.step, state, rescued


def _fail_in(runtime: Any, phase: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("made to fail")

    if phase == "backward":
        list(runtime.model.modules())[-1].register_full_backward_pre_hook(fail)
    elif phase == "forward":
        # On one rank before anything is computed, so that the others wait in the middle of their pass.
        next(iter(runtime.model.children())).register_forward_pre_hook(fail, prepend=True)
    else:
        runtime.optimizer.step = fail


def _whole(make_task: Any, config: RunConfig, tmp_path: Path, plan: tuple[str, int, int]) -> dict[str, torch.Tensor]:
    return legs(make_task, config, tmp_path / "whole", [plan])[1]


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in state.items()}


@pytest.mark.parametrize("strategy", ["zero3", slow("pp2,ddp2")])
def test_hosts_without_a_shared_disk(tmp_path: Path, strategy: str) -> None:
    """Two machines of two ranks; the second is lost with its disk, and a new one comes with an empty one."""
    config = replace(FP64, steps=6, checkpoint_every=3, eval_every="never")
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    on_ranks(_steps, 4, gpt_task, strategy, config, [one, one, two, two], 3)
    shutil.rmtree(two)
    began, state, _ = on_ranks(_steps, 4, gpt_task, strategy, config, [three, three, one, one], 6)[0]
    assert began == 3
    whole = _whole(gpt_task, config, tmp_path, ("single", 1, 6))
    assert _largest(_tensors(state), whole) < 1e-9
    # And the newcomer has all of it now.
    shutil.rmtree(one)
    began, _, _ = on_ranks(_steps, 2, gpt_task, "zero3", config, [three, three], 6)[0]
    assert began == 6


@pytest.mark.parametrize("num_sites", [1, 2])
def test_state_in_memory(tmp_path: Path, num_sites: int) -> None:
    config = replace(EXACT, epochs=None, steps=9, replicate_state=True, workers=0)
    places = [str(tmp_path / f"site-{rank % num_sites}") for rank in range(2)]
    try:
        on_ranks(_steps, 2, dropping_task, "zero3", config, places, 5)
        if num_sites == 2:
            shutil.rmtree(memory_folder(Path(places[1])))  # that machine is gone
        began, state, _ = on_ranks(_steps, 2, dropping_task, "zero3", config, places, 9)[0]
    finally:
        for place in places:
            shutil.rmtree(memory_folder(Path(place)), ignore_errors=True)
    assert began == 5
    whole = _whole(dropping_task, replace(config, replicate_state=False), tmp_path, ("zero3", 2, 9))
    assert all(torch.equal(_tensors(state)[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "phase"),
    [
        ("ddp", 2, "backward"),
        ("zero3", 2, "forward"),
        ("zero3", 2, "backward"),
        slow("zero2", 2, "forward"),
        slow("zero1", 2, "forward"),
        ("pp2", 2, "backward"),
        ("tp2", 2, "forward"),
    ],
)
def test_rescued_state(tmp_path: Path, strategy: str, num_ranks: int, phase: str) -> None:
    """A step fails on one rank; all save what they had after the step before, and no step is lost."""
    config = replace(EXACT, epochs=None, steps=8, workers=0)
    places = [str(tmp_path / "run")] * num_ranks
    told = on_ranks(_steps, num_ranks, dropping_task, strategy, config, places, 5, phase)
    assert all(rescued for _, _, rescued in told)
    began, state, _ = on_ranks(_steps, num_ranks, dropping_task, strategy, config, places, 8)[0]
    assert began == 4
    whole = _whole(dropping_task, config, tmp_path, (strategy, num_ranks, 8))
    assert all(torch.equal(_tensors(state)[name], whole[name]) for name in whole)


def test_running_statistics_of_a_failed_step_are_undone(tmp_path: Path) -> None:
    config = replace(FP64, steps=8, eval_every="never")
    places = [str(tmp_path / "run")] * 2
    on_ranks(_steps, 2, image_task, "ddp", config, places, 5, "backward")
    began, state, _ = on_ranks(_steps, 2, image_task, "ddp", config, places, 8)[0]
    assert began == 4
    whole = _whole(image_task, config, tmp_path, ("ddp", 2, 8))
    assert all(torch.equal(_tensors(state)[name], whole[name]) for name in whole)


def test_a_state_in_the_middle_of_an_update_is_not_taken(tmp_path: Path) -> None:
    config = replace(FP64, steps=8, eval_every="never")
    places = [str(tmp_path / "run")] * 2
    told = on_ranks(_steps, 2, gpt_task, "ddp", config, places, 5, "update")
    assert not told[1][2]
