"""A pipeline over RPC: weights move, and are those of one process; stages overlap; whatever a model does between its
parts, and whatever fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import rung.runtime.rpc_pipeline as rpc_pipeline
from rung.distributed.world import open_world
from rung.parallel.pipeline.schedule import Action
from rung.runtime import Runtime, build_runtime
from rung.runtime.step import StepRuntime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task
from rung.system.launcher_env import environment_size
from rung.train.worker import make_batches
from tests.checkpoint.test_checkpoint_ranks import EXACT, FP64, _largest, _scheduled_adamw
from tests.checkpoints import legs
from tests.harness import RankFailed, on_ranks
from tests.launcher import WarmLauncher
from tests.marks import slow
from tests.parallel.pipeline import test_pipeline_ranks as pipelines
from tests.parallel.pipeline.test_pipeline_ranks import difference_from_one_process
from tests.parity import with_rung, with_rung_traced
from tests.runtime.test_composed_ranks import difference, unused_task
from tests.tasks import EXAMPLES, TinyGPT, dropping_task, gpt_task, image_task, text_data, text_task

# -- the numbers -------------------------------------------------------------------------------------------------------


def _passes(runtime: Runtime) -> rpc_pipeline.RpcPasses:
    assert isinstance(runtime, StepRuntime)
    assert isinstance(runtime.parts.passes, rpc_pipeline.RpcPasses)
    return runtime.parts.passes


def _moves(make_task: Callable[[], Task], config: RunConfig) -> list[dict[str, Any]]:
    """This rank's part: its weights at first, after a step in which nobody asked the DistributedOptimizer, and after
    one in which it was asked."""
    task = make_task()
    with open_world(parse("rpc-pp", environment_size()), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(task, world, config, total_steps=2)
        passes, trainable = _passes(runtime), [(n, p) for n, p in runtime.model.named_parameters() if p.requires_grad]
        found = [{name: p.detach().clone().numpy() for name, p in trainable}]
        chosen, asked = passes._optimizers, []
        passes._optimizers = type("Nobody", (), {"step": lambda self, context: asked.append(context)})()
        for window in runtime.place(make_batches(task, config, world)):
            runtime.step(window)
            passes._optimizers = chosen
            found.append({name: p.detach().clone().numpy() for name, p in trainable})
        assert len(asked) == int(world.is_main)
    return found


def plain_sgd_task() -> Task:
    return text_task(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))


def test_weights_move_by_the_distributed_optimizer_and_equal_one_process() -> None:
    config = RunConfig(batch_size=12, steps=2, precision="fp64", device="cpu", shuffle=False)
    torch.manual_seed(config.seed)
    model = TinyGPT().double()
    tokens, targets = text_data()[12:24]  # the second step's, which alone is taken
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    expected = {name: (p - 0.1 * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}
    seen = set()
    for first, unasked, last in on_ranks(_moves, 2, plain_sgd_task, config):
        for name, value in first.items():
            assert (unasked[name] == value).all(), "nobody else takes the context's gradients"
            assert abs(last[name] - value).max() > 1e-6, f"{name} did not move"
            assert (torch.as_tensor(last[name]) - expected[name]).abs().max() < 1e-12
        seen |= set(first)
    assert seen == set(expected)


def test_loss_weighted_by_tokens_with_tied_weights_clipped_and_a_short_window() -> None:
    """103 samples in windows of 25: the last has 3, and so fewer micro-batches. Some of these count no token at all."""
    assert difference("rpc-pp2", "padded", micro_batch=2) < 1e-9


def test_three_samples_on_four_stages_clipped_far_below_the_norm() -> None:
    """A norm that missed a stage or counted the tied weight twice would show at once."""
    assert difference("rpc-pp4", "text", batch_size=3, micro_batch=1, clip=0.1) < 1e-9


@pytest.mark.parametrize(
    ("make_task", "strategy"),
    [
        slow(pipelines.frozen_start_task, "rpc-pp2"),
        (pipelines.masked_task, "rpc-pp2"),  # shapes that change from step to step
        slow(pipelines.skipping_task, "rpc-pp4"),
        slow(pipelines.looping_task, "rpc-pp2"),
        slow(pipelines.encoder_decoder_task, "rpc-pp4"),
        slow(pipelines.dict_task, "rpc-pp4"),
        slow(pipelines.in_place_task, "rpc-pp2"),
        slow(pipelines.attribute_task, "rpc-pp2"),
        slow(pipelines.recurring_task, "rpc-pp2"),
    ],
)
def test_models_that_were_not_written_for_a_pipeline(make_task: Callable[[], Task], strategy: str) -> None:
    assert difference_from_one_process(make_task, strategy) < 1e-9


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("babycnn", {"activation_checkpointing": "full", "micro_batch": 12}),
        slow("gpt", {"activation_checkpointing": "selective"}),
        slow("gpt", {"split": "head"}),
        slow("images", {"micro_batch": 3}),
        slow("adamw", {}),
        slow("recurrent", {"micro_batch": 3}),
        # More micro-batches than there are threads to answer calls.
        slow("text", {"batch_size": 100, "micro_batch": 1}),
    ],
)
def test_settings(model: str, settings: dict[str, Any]) -> None:
    assert difference("rpc-pp2", model, **settings) < 1e-9


@pytest.mark.parametrize("run", [with_rung_traced, slow(with_rung)])
def test_compiled_blocks(run: Any) -> None:
    config = RunConfig(batch_size=24, micro_batch=6, steps=3, precision="fp64", compile=True, device="cpu")
    found = on_ranks(run, 2, gpt_task, "rpc-pp2", config, timeout=600)
    expected = with_rung(gpt_task, "single", replace(config, compile=False))
    assert found[0].losses == pytest.approx(expected.losses, abs=1e-9)


def test_half_precision_is_as_near_as_its_rounding() -> None:
    config = RunConfig(batch_size=24, micro_batch=6, steps=4, precision="bf16", device="cpu")
    found = on_ranks(with_rung, 2, text_task, "rpc-pp2", config)
    assert found[0].losses == pytest.approx(with_rung(text_task, "single", config).losses, abs=1e-5)


class DroppingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 36)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.dropout(x.flatten(1), 0.5, self.training)).relu()


def functional_dropout_task() -> Task:
    return image_task(model=lambda: nn.Sequential(DroppingBlock(), DroppingBlock(), nn.Linear(36, 5)))


def test_dropout_that_is_turned_off_stays_off_where_backward_computes_again() -> None:
    config = replace(pipelines.CONFIG, dropout=False, activation_checkpointing="full")
    assert difference_from_one_process(functional_dropout_task, "rpc-pp2", config) < 1e-9


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_task", [gpt_task, slow(_scheduled_adamw)])
def test_checkpoints_go_to_other_strategies_and_back(tmp_path: Path, make_task: Any) -> None:
    plan = [("rpc-pp2", 2, 3), ("single", 1, 5), ("rpc-pp2", 2, 7), ("ddp", 2, 10)]
    losses, state = legs(make_task, FP64, tmp_path / "legs", plan)
    whole_losses, whole = legs(make_task, FP64, tmp_path / "whole", [("single", 1, 10)])
    assert losses == pytest.approx(whole_losses, abs=1e-9)
    assert _largest(state, whole) < 1e-9


def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    plan = [("rpc-pp2", 2, 4), ("rpc-pp2", 2, 9)]
    losses, state = legs(dropping_task, EXACT, tmp_path / "legs", plan)
    whole_losses, whole = legs(dropping_task, EXACT, tmp_path / "whole", plan[-1:])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)


# -- overlap -----------------------------------------------------------------------------------------------------------


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, watch: Callable[[str], None]) -> Tensor:
        ctx.watch = watch
        watch("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.watch("backward")
        return gradient, None


class Watched(nn.Module):
    """A block that at one micro-batch of each pass goes on only when the other stage is in the middle of another."""

    def __init__(self, folder: str, stage: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.folder, self.stage = Path(folder), stage
        # Of the micro-batches in their order: the stage that comes first is one ahead.
        self.meets = {"forward": 1 - stage, "backward": stage}
        self.counts = {"forward": 0, "backward": 0}

    def watch(self, phase: str) -> None:
        count, self.counts[phase] = self.counts[phase], self.counts[phase] + 1
        if (phase, count, self.stage) == ("backward", 0, 1):
            time.sleep(0.2)  # until the gradients of all losses have come, and there is more to do than to send
        if count == self.meets[phase]:
            (self.folder / f"{phase}-{self.stage}").touch()
            deadline = time.monotonic() + 30
            while not (self.folder / f"{phase}-{1 - self.stage}").exists():
                assert time.monotonic() < deadline, f"the other stage does its {phase} before or after this one"
                time.sleep(0.001)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if isinstance(y, FakeTensor) else _Watched.apply(y, self.watch)


def watched_task(folder: str) -> Task:
    return image_task(
        model=lambda: nn.Sequential(Watched(folder, 0), Watched(folder, 1)),
        loss=lambda output, target: output.square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
    )


def _journal(folder: str) -> tuple[list[Action], dict[str, Any]]:
    task = watched_task(folder)
    config = RunConfig(batch_size=8, micro_batch=2, steps=1, device="cpu")
    with open_world(parse("rpc-pp2", 2), device="cpu", timeout_seconds=60) as world:
        runtime = build_runtime(task, world, config, total_steps=1)
        for window in runtime.place(make_batches(task, config, world)):
            runtime.step(window)
        return _passes(runtime).stage_log.actions, runtime.traffic()


def test_stages_work_on_different_micro_batches_at_the_same_time(tmp_path: Path) -> None:
    found = on_ranks(_journal, 2, str(tmp_path))
    (first, _), (second, _) = found
    for stage, actions in enumerate((first, second)):
        assert [(a.kind, a.stage, a.chunk) for a in actions] == [
            *(("F", stage, chunk) for chunk in (0, 1, 2, 3)),
            *(("B", stage, chunk) for chunk in (3, 2, 1, 0)),
        ]
    times = {(a.kind, a.stage, a.chunk): (a.start, a.stop) for a in (*first, *second)}
    for one, other in ((("F", 0, 1), ("F", 1, 0)), (("B", 0, 3), ("B", 1, 2))):
        assert max(times[one][0], times[other][0]) < min(times[one][1], times[other][1])
    micro_batch = 2 * 36 * 4
    sent = [traffic for _, traffic in found]
    assert sent[0]["activations"].messages == sent[1]["gradients"].messages == 4
    assert sent[0]["activations"].num_bytes == sent[1]["gradients"].num_bytes == 4 * (micro_batch + 4)  # and a token


# -- what goes wrong ---------------------------------------------------------------------------------------------------


class Failing(TinyGPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.token(tokens))
        return self.head(self.norm(_Unable.apply(self.blocks[1](x))))


class _Unable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no way back")


def failing_task() -> Task:
    return text_task(model=Failing)


@pytest.mark.parametrize(
    ("make_task", "message"),
    [
        (unused_task, r"got no gradient in this step: spare\.weight"),
        (failing_task, "backward failed on rank 1: no way back"),
    ],
)
def test_what_fails_is_named(make_task: Callable[[], Task], message: str) -> None:
    config = RunConfig(batch_size=24, micro_batch=6, steps=2, device="cpu")
    with pytest.raises(RankFailed, match=message):
        on_ranks(with_rung, 2, make_task, "rpc-pp2", config)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_trains_the_example_and_says_what_rpc_is(launcher: WarmLauncher, tmp_path: Path) -> None:
    arguments = ["train", str(EXAMPLES / "gpt" / "task.py"), "--strategy", "rpc-pp2", "--steps", "10"]
    done = launcher.call(tmp_path, *arguments, "--set", "eval_every=never", "--out", "run", limit=300)
    assert done.code == 0, done.output
    assert "rpc: listens on loopback, for the ranks of this job only; messages are not encrypted" in done.output
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["event"] == "step"]
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5
    sent = rows[-1]["traffic"]
    assert sent[0]["activations"]["num_bytes"] == sent[1]["gradients"]["num_bytes"] > 0
