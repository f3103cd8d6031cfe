"""What must hold on a CUDA device, as rows that run with or without a test runner."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rung.checkpoint import Position, StorageTopology
from rung.data.pytree import tensors_in
from rung.distributed.world import open_fake_world, open_world
from rung.hardware.cluster import parse_cluster
from rung.planner.at_hand import measure_rank
from rung.planner.estimate import Estimator
from rung.planner.truncated_model import count_blocks
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task, load_task
from rung.system.launcher_env import environment_size
from rung.train.checkpointing import Checkpointing
from rung.train.worker import make_batches
from tests.checkpoints import legs, one_leg
from tests.gpu.float8_rows import rows as float8_rows
from tests.gpu.later_rows import rows as later_rows
from tests.gpu.loss_kernel import loss_kernel
from tests.harness import RankFailed, on_ranks
from tests.host_weights import build, gradients
from tests.parallel.context.ring_by_threads import largest_difference as ring_difference
from tests.parity import by_hand, largest_difference, with_rung
from tests.tasks import EXAMPLES, TASKS

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp")
ONE_RANK_OF_64 = (
    "tp64", "ddp,tp4", "zero1,tp4", "zero2,tp4", "fsdp,tp4", "hsdp4x4,tp4",
    "pp4,ddp", "pp4:gpipe,ddp", "pp4:zb,ddp", "pp2:interleaved,fsdp", "pp4,zero1", "pp4,zero2", "pp4,fsdp",
    "pp4:zb,fsdp", "pp4,hsdp4x4", "pp4,tp16", "pp4,fsdp,tp4",
)  # fmt: skip


def matches_cpu(strategy: str, model: str, num_ranks: int, **changes: Any) -> str:
    """The CUDA run equals a hand-written loop on the CPU in float64."""
    backend = changes.pop("backend", "gloo" if num_ranks > 1 else "auto")
    micro = changes.pop("global_micro_batch", None)
    num_data_ranks = parse(strategy, num_ranks).num_data_ranks
    config = RunConfig(
        batch_size=25,
        steps=5,
        precision="fp64",
        clip=0.5,
        device="cuda",
        backend=backend,
        micro_batch=None if micro is None else micro // num_data_ranks,
        **changes,
    )
    expected = by_hand(TASKS[model](), config, micro)
    found = on_ranks(with_rung, num_ranks, TASKS[model], strategy, config, timeout=300)
    difference = largest_difference(expected, found[0])
    assert difference < 1e-9, f"differs by {difference:.1e}"
    return f"{difference:.1e}"


def compressed(how: str) -> str:
    """Nothing left out is nothing lost; in fp16 a little is."""
    config = RunConfig(batch_size=25, steps=5, precision="fp64", device="cuda", backend="gloo", compress=how)
    expected = by_hand(TASKS["gpt"](), config)
    found = on_ranks(with_rung, 2, TASKS["gpt"], "ddp", config, timeout=300)
    found[0].norms = expected.norms  # what is told with momentum taken over is the norm of what was exchanged
    difference = largest_difference(expected, found[0])
    assert difference < (1e-9 if how.startswith("topk") else 1e-2), f"differs by {difference:.1e}"
    return f"{difference:.1e}"


def half_is_near(strategy: str, precision: str, **changes: Any) -> str:
    config = RunConfig(batch_size=25, steps=10, precision=precision, device="cuda", **changes)
    expected = by_hand(TASKS["text"](), RunConfig(batch_size=25, steps=10, precision="fp64"))
    found = on_ranks(with_rung, 1, TASKS["text"], strategy, config, timeout=300)
    if precision == "fp16":
        # The scaler starts too high and skips steps until it has found its level, later where gradients are half.
        assert found[0].losses[-1] < found[0].losses[0], found[0].losses
        return f"loss {found[0].losses[0]:.3f} -> {found[0].losses[-1]:.3f}"
    gap = max(abs(a - b) for a, b in zip(found[0].losses, expected.losses, strict=True))
    assert gap < 0.05, f"losses differ by {gap}"
    assert all(str(value.dtype) == "float32" for value in found[0].state.values())
    return f"loss gap {gap:.1e}"


def _steps_without_synchronisation(strategy: str, precision: str) -> int:
    task = TASKS["adamw"]()
    config = RunConfig(batch_size=16, steps=8, precision=precision, clip=1.0, device="cuda")
    with open_world(parse(strategy, environment_size())) as world, tempfile.TemporaryDirectory() as folder:
        runtime = build_runtime(task, world, config, total_steps=8)
        checkpointing = Checkpointing(
            Path(folder), runtime, StorageTopology(world, Path(folder)), config, {}, Position(0, 0, 0, 0)
        )
        for window in runtime.place(make_batches(task, config, world)):
            if window.step > 3:  # by then every cache is warm
                torch.cuda.set_sync_debug_mode("error")
            try:
                checkpointing.before_step()
                runtime.step(window)
                checkpointing.after_step(Position(window.step, 0, 0, 0))
                if window.step > 4 and precision != "fp16":  # the scaler's state is read from the device
                    checkpointing.save(Position(window.step, 0, 0, 0))
            finally:
                torch.cuda.set_sync_debug_mode("default")
        checkpointing.close()  # its thread still writes
    return 8


def does_not_synchronise(strategy: str, precision: str) -> str:
    """A step that does not log never waits for the device: torch raises at any such operation."""
    return f"{on_ranks(_steps_without_synchronisation, 1, strategy, precision, timeout=300)[0]} steps"


def _peak_of_one_rank(strategy: str, size: int, stage: int, precision: str) -> dict[str, int]:
    task = load_task(EXAMPLES / "gpt").bind({"model.size": "25m"})
    config = RunConfig(batch_size=64, micro_batch=2, steps=2, precision=precision, clip=1.0, device="cuda")
    layout = parse(strategy, size)
    with open_fake_world(layout, rank=stage * (size // layout.pp), device="cuda", fake=False) as world:
        runtime = build_runtime(task, world, config, total_steps=2)
        torch.cuda.reset_peak_memory_stats()
        for window in runtime.place(make_batches(task, config, world)):
            runtime.step(window, want_norm=True)
        torch.cuda.synchronize()
        kept = runtime.state_bytes()
    return {**kept, "peak": torch.cuda.max_memory_allocated()}


def memory_of_one_rank(strategy: str, size: int, precision: str = "bf16") -> str:
    """One rank of each stage of a large world, alone on the GPU: messages go nowhere, its memory is the true one."""
    figures = []
    for stage in range(parse(strategy, size).pp):
        found = on_ranks(_peak_of_one_rank, 1, strategy, size, stage, precision, timeout=300)[0]
        assert 0 < found["parameters"] < found["peak"] < 100 * 2**30, found
        figures.append(f"{found['peak'] / 2**20:.0f}")
    return f"peak MiB {' '.join(figures)}"


def _large_vocabulary(precision: str) -> tuple[Task, RunConfig]:
    arguments = {"model.layers": 4, "model.width": 512, "model.heads": 8, "model.context": 256}
    words = {"model.vocabulary": 32000, "train_data.context": 256, "train_data.vocabulary": 32000}
    task = load_task(EXAMPLES.parent / "benchmarks/tasks/gpt.py").bind({**arguments, **words})
    return task, RunConfig(batch_size=16, steps=3, precision=precision, device="cuda")


def _measured_peak(precision: str) -> int:
    task, config = _large_vocabulary(precision)
    return measure_rank(task, parse("single", 1), config).allocated


def plan_is_near(precision: str) -> str:
    """What `rung plan` says of a model whose loss is computed in chunks, against the allocator."""
    task, config = _large_vocabulary(precision)
    said = Estimator(task, config, parse_cluster("1xH200"), count_blocks(task)).estimate(parse("single", 1), "none", 16)
    (found,) = on_ranks(_measured_peak, 1, precision, timeout=300)
    assert abs(said.memory.allocated / found - 1) < 0.03, (said.memory.allocated, found)
    return f"{found / 2**20:.0f} MiB, said {said.memory.allocated / 2**20:.0f}"


def resumes_exactly(strategy: str, num_ranks: int, precision: str = "fp32", **changes: Any) -> str:
    """Stopped twice, with dropout: the losses and weights of the run that was never stopped, bit by bit."""
    config = RunConfig(
        batch_size=10,
        steps=20,
        precision=precision,
        device="cuda",
        backend="gloo" if num_ranks > 1 else "auto",
        eval_every="never",
    )
    config = replace(config, **changes)
    with tempfile.TemporaryDirectory() as folder:
        plan = [(strategy, num_ranks, until) for until in (4, 11, 20)]
        losses, state = legs(TASKS["dropping"], config, Path(folder, "legs"), plan)
        whole_losses, whole = legs(TASKS["dropping"], config, Path(folder, "whole"), plan[-1:])
    assert losses == whole_losses
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    return f"{len(losses)} steps"


def any_to_any() -> str:
    """From strategy to strategy and from the GPU to the CPU and back, against one process on the CPU."""
    config = RunConfig(batch_size=10, steps=10, precision="fp64", clip=0.5, device="cuda", eval_every="never")
    shared = replace(config, backend="gloo")
    plan = [
        ("ddp", 2, 2, shared), ("zero3", 2, 4, shared), ("tp2", 2, 5, shared), ("single", 1, 6, config),
        ("dp2", 1, 7, shared), ("pp2", 2, 8, replace(config, device="cpu")), ("zero1", 2, 10, shared),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for strategy, num_ranks, until, own in plan:
            results = on_ranks(
                one_leg, num_ranks, TASKS["gpt"], strategy, own, str(Path(folder, "legs")), until, timeout=300
            )
        _, whole = legs(TASKS["gpt"], replace(config, device="cpu"), Path(folder, "whole"), [("single", 1, 10)])
    gap = max(float((torch.as_tensor(v).double() - whole[n].double()).abs().max()) for n, v in results[0].state.items())
    assert gap < 1e-9, f"differs by {gap:.1e}"
    return f"{gap:.1e}"


def _dp_run(model: str, config: RunConfig) -> dict[str, Any]:
    task = TASKS[model]()
    with open_world(parse("dp2", 1), device=config.device, backend=config.backend) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps)
        for window in runtime.place(batches):
            runtime.step(window)
        return {
            "traffic": {name: asdict(sent) for name, sent in runtime.traffic().items()},
            "device 0": runtime.device_0_bytes(),
            "notes": [note for note in runtime.notes if note.startswith("batch norm")],
            "state": {name: value.numpy() for name, value in runtime.named_weights()},
        }


def like_threads(model: str) -> str:
    """`nn.DataParallel` on one GPU twice and Rung's threads: the same numbers, batch norm included, and exchanges."""
    config = RunConfig(batch_size=25, steps=5, precision="fp64", device="cuda", backend="gloo")
    found = on_ranks(_dp_run, 1, model, config, timeout=300)[0]
    expected = on_ranks(_dp_run, 1, model, replace(config, device="cpu"), timeout=300)[0]
    states = found.pop("state"), expected.pop("state")
    gap = max(float(abs(states[0][name] - value).max()) for name, value in states[1].items())
    assert gap < 1e-9, f"differs by {gap:.1e}"
    assert found == expected, (found, expected)
    return f"{gap:.1e}; {sum(sent['num_bytes'] for sent in found['traffic'].values())} bytes"


class Idle(torch.nn.Module):
    """A parameter that nothing uses; with images of three rows only, an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = torch.nn.Linear(36, 5), torch.nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise ValueError("three rows")
        return self.used(x.flatten(1))


def idle_task() -> Any:
    return replace(TASKS["images"](), model=Idle)


def dp_errors() -> str:
    """What is refused with one device is refused with replicas, too."""
    config = RunConfig(batch_size=25, steps=2, precision="fp64", device="cuda", backend="gloo")
    for words, own in (
        ("2 trainable parameters got no gradient", config),
        ("ValueError: three rows", replace(config, batch_size=6)),
        ("dp2 asks for 2 GPUs, and torch sees 1", replace(config, backend="auto")),
    ):
        if own.backend == "auto" and torch.cuda.device_count() > 1:
            continue
        told = "no error"
        try:
            on_ranks(with_rung, 1, idle_task, "dp2", own, timeout=300)
        except RankFailed as failed:
            told = failed.error
        assert words in told, f"{words}: {told}"
    on_ranks(with_rung, 1, idle_task, "dp2", replace(config, unused_parameters="allow"), timeout=300)
    return "as on one device"


HUNGRY = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 64, "steps": 6, "log_every": 1}


class Hungry(nn.Module):
    def __init__(self, fraction):
        super().__init__()
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(fraction)
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(12)])

    def forward(self, x):
        x = x[:, None].expand(-1, 512, -1)  # 2 MiB a sample and layer
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.mean(dim=(1, 2))


def model(fraction: float = 1.0):
    return Hungry(fraction)


def train_data():
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(512, 1024, generator=g), torch.randn(512, generator=g))


def loss(output, target):
    return F.mse_loss(output, target)


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


def out_of_memory(strategy: str, num_ranks: int, fraction: float) -> str:
    """The device really runs out of memory: the run goes on with smaller micro-batches and the same numbers."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "task.py").write_text(HUNGRY)
        command = [sys.executable, "-m", "rung", "train", f"{folder}/task.py", "--set", "device=cuda"]
        shared = ["--set", "backend=gloo"] if num_ranks > 1 else []
        told = []
        for name, own in (("whole", 1.0), ("poor", fraction)):
            more = ["--out", f"{folder}/{name}", "--strategy", strategy, "--nproc", str(num_ranks), *shared]
            done = subprocess.run(
                [*command, *more, "--set", f"model.fraction={own}"], capture_output=True, text=True, timeout=200
            )
            assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
            told.append([line for line in done.stdout.splitlines() if "out of memory" in line])
        assert not told[0] and told[1], told
        whole, poor = (load_file(f"{folder}/{name}/model.safetensors") for name in ("whole", "poor"))
        gap = max(float((whole[name] - poor[name]).abs().max()) for name in whole)
        assert gap < 1e-5, f"differs by {gap:.1e}"
    return f"{gap:.1e}; {told[1][-1]}"


def batches_are_pinned(workers: int) -> str:
    """Copies from pinned memory alone run beside the computation; from any other they hold the host up, silently."""
    task = TASKS["images"]()
    config = RunConfig(batch_size=16, steps=3, device="cuda", workers=workers)
    with open_world(parse("single", 1), device="cuda") as world:
        windows = list(make_batches(task, config, world))
    assert len(windows) == 3
    assert all(t.is_pinned() for w in windows for micro in w.micro_batches for t in tensors_in(micro.data))
    return f"{len(windows)} batches"


def blocks_on_host() -> str:
    """A model too large for the GPU: its blocks come from host memory, and the figures are those of the CPU."""
    task = TASKS["gpt"]()
    expected = gradients(build(task, "cpu"), task)
    runtime = build(task, "cuda", blocks_on_host=True)
    found = gradients(runtime, task)
    gap = max(abs(found[name] - value) / max(abs(value), 1e-6) for name, value in expected.items())
    assert gap < 1e-9, f"differs by {gap:.1e}"
    blocks, whole = runtime.model.get_submodule("blocks"), dict(runtime.model.named_parameters())
    assert {p.device.type for p in blocks.parameters()} == {"cpu"}
    assert any(p.device.type == "cuda" for p in whole.values())
    return f"{gap:.1e}"


def in_a_ring() -> str:
    """Flash attention by parts, in bf16, of lengths that do and do not divide."""
    found = [
        ring_difference(length, 4, is_causal=causal, key_heads=2, dtype=torch.bfloat16, device="cuda")
        for length in (64, 51)
        for causal in (True, False)
    ]
    assert max(found) < 0.03, f"differs by {max(found):.1e}"
    return f"{max(found):.1e}"


def rows() -> list[tuple[str, Callable[[], str]]]:
    found: list[tuple[str, Callable[[], str]]] = []

    def add(name: str, function: Callable[..., str], *args: Any, **kwargs: Any) -> None:
        found.append((name, lambda: function(*args, **kwargs)))

    for model in ("babycnn", "gpt"):
        for strategy in STRATEGIES:
            add(f"{strategy} {model} 1 rank nccl", matches_cpu, strategy, model, 1)
        for strategy in STRATEGIES[1:]:
            add(f"{strategy} {model} 2 ranks gloo", matches_cpu, strategy, model, 2)
            add(f"{strategy} {model} 2 ranks gloo x3", matches_cpu, strategy, model, 2, global_micro_batch=12)
    add("zero3 gpt offload cpu", matches_cpu, "zero3", "gpt", 1, offload="cpu")
    add("zero3 gpt offload cpu 2 ranks gloo", matches_cpu, "zero3", "gpt", 2, offload="cpu")
    add("ddp babycnn full checkpointing", matches_cpu, "ddp", "babycnn", 1, activation_checkpointing="full")
    add("zero3 gpt selective checkpointing", matches_cpu, "zero3", "gpt", 1, activation_checkpointing="selective")
    add("single gpt compiled", matches_cpu, "single", "gpt", 1, compile=True)
    add("ddp gpt compiled", matches_cpu, "ddp", "gpt", 1, compile=True)
    add("zero3 gpt compiled", matches_cpu, "zero3", "gpt", 1, compile=True)
    add("kernel of the chunked loss", loss_kernel)
    for precision in ("fp32", "bf16"):
        add(f"plan of a loss in chunks, {precision}", plan_is_near, precision)
    add("attention in a ring", in_a_ring)
    add("single gpt loss in chunks", matches_cpu, "single", "gpt", 1, chunked_loss="5")
    add("zero3 gpt loss in chunks 2 ranks gloo", matches_cpu, "zero3", "gpt", 2, chunked_loss="5")
    add("single gpt loss in chunks, compiled", matches_cpu, "single", "gpt", 1, chunked_loss="5", compile=True)
    add("single images workers pinned", matches_cpu, "single", "images", 1, workers=2)
    for workers in (0, 2):
        add(f"batches of {workers} workers are pinned", batches_are_pinned, workers)
    for strategy in ("single", "ddp", "zero1", "zero3"):
        add(f"{strategy} bf16", half_is_near, strategy, "bf16")
        add(f"{strategy} fp16", half_is_near, strategy, "fp16")
        add(f"{strategy} bf16 no synchronisation", does_not_synchronise, strategy, "bf16")
        add(f"{strategy} fp32 no synchronisation", does_not_synchronise, strategy, "fp32")
    add("single fp16 no synchronisation", does_not_synchronise, "single", "fp16")
    for strategy in ("single", "ddp", "zero3"):
        add(f"{strategy} recurrent", matches_cpu, strategy, "recurrent", 1)
    for model in ("babycnn", "text", "gpt"):
        add(f"tp2 {model} gloo", matches_cpu, "tp2", model, 2)
    for strategy in ("single", "ddp", "zero3"):
        add(f"{strategy} resumes exactly", resumes_exactly, strategy, 1)
    add("single fp16 resumes exactly", resumes_exactly, "single", 1, "fp16")
    for strategy in ("ddp", "zero1", "zero3", "tp2"):
        add(f"{strategy} resumes exactly 2 ranks gloo", resumes_exactly, strategy, 2)
    add("any strategy to any, GPU and CPU, resumes", any_to_any)
    shared = {"backend": "gloo"}  # replicas share the GPU: device_ids [0, 0]
    for strategy in ("dp2", "dp4"):
        add(f"{strategy} gpt one GPU", matches_cpu, strategy, "gpt", 1, **shared)
        add(f"{strategy} gpt one GPU x3", matches_cpu, strategy, "gpt", 1, global_micro_batch=12, **shared)
    for mode in ("full", "selective"):
        add(
            f"dp2 gpt one GPU {mode} checkpointing",
            matches_cpu,
            "dp2",
            "gpt",
            1,
            activation_checkpointing=mode,
            **shared,
        )
    for model in ("padded", "recurrent"):
        add(f"dp2 {model} one GPU", matches_cpu, "dp2", model, 1, **shared)
    for precision in ("bf16", "fp16"):
        add(f"dp2 one GPU {precision}", half_is_near, "dp2", precision, **shared)
    for model in ("text", "images"):
        add(f"dp2 {model} one GPU like threads", like_threads, model)
    add("dp2 one GPU refuses", dp_errors)
    add("dp2 one GPU resumes exactly", resumes_exactly, "dp2", 1, dropout=False, **shared)
    for strategy, size in (("ps", 3), ("ddp+ps", 3), ("rpc-pp2", 2)):
        for model in ("babycnn", "gpt"):
            add(f"{strategy} {model} calls", matches_cpu, strategy, model, size, global_micro_batch=12)
    for how in ("topk:1.0", "fp16"):
        add(f"ddp compress {how} 2 ranks gloo", compressed, how)
    add("single gpt blocks on the host", blocks_on_host)
    add("single out of memory", out_of_memory, "single", 1, 0.01)
    add("ddp out of memory 2 ranks gloo", out_of_memory, "ddp", 2, 0.006)
    add("tp2 gpt gloo x3", matches_cpu, "tp2", "gpt", 2, global_micro_batch=12)
    add("tp2 gpt gloo sequence parallel", matches_cpu, "tp2", "gpt", 2, sequence_parallel=True)
    add("tp4 gpt gloo", matches_cpu, "tp4", "gpt", 4)
    for strategy in ("ddp2,tp2", "zero1x2,tp2", "zero2x2,tp2", "fsdp2,tp2"):
        add(f"{strategy} gpt gloo", matches_cpu, strategy, "gpt", 4, global_micro_batch=12)
    add("tp2 adamw gloo", matches_cpu, "tp2", "adamw", 2)
    for strategy in ONE_RANK_OF_64:
        add(f"{strategy} one rank of 64", memory_of_one_rank, strategy, 64)
    add("pp4,fsdp,tp4 one rank of 64 fp16", memory_of_one_rank, "pp4,fsdp,tp4", 64, "fp16")
    return [*found, *float8_rows(), *later_rows()]


def main() -> None:
    failures = 0
    words = sys.argv[1:]
    chosen = [(name, function) for name, function in rows() if not words or any(word in name for word in words)]
    for name, function in chosen:
        try:
            print(f"ok    {name:<42} {function()}", flush=True)
        except Exception as error:
            failures += 1
            print(f"FAIL  {name:<42} {str(error).strip()[-1500:]}", flush=True)
    print(f"{len(chosen) - failures} passed, {failures} failed")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
