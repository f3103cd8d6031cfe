"""Predicted memory and time against what training takes, over models that nobody here wrote.

A seed draws the jobs: a model of the zoo or one written by hand, sizes, batch, type, checkpointing and optimizer. It
also draws the half that is held out, which is for the last measurement alone.

    python -m benchmarks.foresight --predict FILE --half built        # needs no GPU
    python -m benchmarks.foresight --train FILE --half built          # on an H200
    python -m benchmarks.foresight --at-hand FILE --half built        # what `rung plan` says there
    python -m benchmarks.foresight --join TRAINED PREDICTED AT_HAND
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from benchmarks.zoo import ZOO, Scale
from rung.spec.config import RunConfig
from rung.spec.strategy import parse
from rung.spec.task import Task

SEED = 21  # the jobs of 20 served to find what was wrong
NUM_JOBS = 120
_RESULTS = Path("benchmarks/results/foresight.json")
_DEVICE = "H200"
_BUSY = 0.8  # of a step: more, and the device bounds it


# -- models written by hand ------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Words into recurrent layers, and their outputs into words."""

    def __init__(self, scale: Scale, layers: nn.LSTM | nn.GRU) -> None:
        super().__init__()
        self.words = nn.Embedding(scale.vocabulary, scale.width)
        self.layers = layers
        self.head = nn.Linear(scale.width, scale.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(tokens))[0])
        return logits


def lstm(scale: Scale) -> nn.Module:
    return Recurrent(scale, nn.LSTM(scale.width, scale.width, num_layers=2, batch_first=True, dropout=0.1))


def gru(scale: Scale) -> nn.Module:
    layers = nn.GRU(scale.width, scale.width // 2, num_layers=2, batch_first=True, bidirectional=True)
    return Recurrent(scale, layers)


class Encoder(nn.Module):
    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.words = nn.Embedding(scale.vocabulary, scale.width)
        layer = nn.TransformerEncoderLayer(scale.width, scale.heads, scale.inner, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, scale.layers, enable_nested_tensor=False)
        self.head = nn.Linear(scale.width, scale.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.words(tokens)))
        return logits


class Experts(nn.Module):
    """A mixture of four experts; each token goes to the best of them, with the router's weight."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        self.words = nn.Embedding(scale.vocabulary, scale.width)
        self.router = nn.Linear(scale.width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(scale.width, scale.inner), nn.GELU(), nn.Linear(scale.inner, scale.width))
            for _ in range(4)
        )
        self.head = nn.Linear(scale.width, scale.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        weights = self.router(hidden).softmax(-1)
        best = weights.argmax(-1, keepdim=True)
        mixed = sum(
            expert(hidden) * weights[..., number : number + 1] * (best == number)
            for number, expert in enumerate(self.experts)
        )
        logits: Tensor = self.head(hidden + mixed)
        return logits


def _down(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, channels: int = 32, *, is_timed: bool = False) -> None:
        super().__init__()
        sizes = [channels, 2 * channels, 4 * channels]
        self.down = nn.ModuleList(_down(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.middle = _down(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(_down(2 * a, b) for a, b in zip(sizes[::-1], [*sizes[-2::-1], channels], strict=True))
        self.head = nn.Conv2d(channels, 3, 1)
        self.time = nn.Linear(1, sizes[-1]) if is_timed else None

    def forward(self, image: Tensor, when: Tensor | None = None) -> Tensor:
        kept = []
        for block in self.down:
            image = block(image)
            kept.append(image)
            image = F.max_pool2d(image, 2)
        image = self.middle(image)
        if self.time is not None and when is not None:
            image = image + self.time(when[:, None])[:, :, None, None]
        for block, other in zip(self.up, reversed(kept), strict=True):
            image = block(torch.cat([F.interpolate(image, size=other.shape[-2:]), other], dim=1))
        found: Tensor = self.head(image)
        return found


class Autoencoder(nn.Module):
    """A variational autoencoder; its noise comes with the batch."""

    def __init__(self, pixels: int) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(3 * pixels**2, 1024), nn.ReLU(), nn.Linear(1024, 128))
        self.decode = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 3 * pixels**2))

    def forward(self, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(image).chunk(2, dim=-1)
        return self.decode(mean + noise * (0.5 * spread).exp()).view_as(image), mean, spread


class Graph(nn.Module):
    """Messages along edges, summed at their ends; samples are graphs of one size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        starts, ends = edges.unbind(1)
        for layer in self.layers:
            sent = nodes.gather(1, starts[..., None].expand(-1, -1, nodes.shape[-1]))
            nodes = (
                nodes
                + layer(
                    torch.zeros_like(nodes).scatter_add(1, ends[..., None].expand_as(sent), sent.to(nodes.dtype))
                ).relu()
            )
        found: Tensor = self.head(nodes.mean(1))
        return found


class _Pairs(Dataset[dict[str, Tensor]]):
    """The arguments of forward by their places, and the target: by default the first of them."""

    def __init__(self, *inputs: Tensor, target: Tensor | None = None) -> None:
        self._inputs, self._target = inputs, inputs[0] if target is None else target

    def __len__(self) -> int:
        return len(self._target)

    def __getitem__(self, index: int) -> Any:
        return tuple(one[index] for one in self._inputs), self._target[index]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _language(make: Callable[[Scale], nn.Module]) -> Callable[[Scale], Task]:
    def task(scale: Scale) -> Task:
        def data() -> Any:
            tokens = torch.randint(scale.vocabulary, (scale.samples, scale.length), generator=_generator())
            return TensorDataset(tokens, tokens.roll(-1, 1))

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output.flatten(0, 1), target.flatten())

        return Task(lambda: make(scale), data, loss, _sgd)

    return task


def _picture(make: Callable[[Scale], nn.Module], *extra: int) -> Callable[[Scale], Task]:
    """Pictures, something more for each sample, and the picture as the target."""

    def task(scale: Scale) -> Task:
        def data() -> Any:
            images = torch.randn(scale.samples, 3, scale.photo, scale.photo, generator=_generator())
            more = [torch.randn(scale.samples, *([size] if size > 1 else []), generator=_generator()) for size in extra]
            return _Pairs(images, *more)

        def loss(output: Any, target: Tensor) -> Tensor:
            if isinstance(output, Tensor):
                return F.mse_loss(output, target)
            image, mean, spread = output
            return F.mse_loss(image, target) + 0.5 * (mean.square() + spread.exp() - 1 - spread).mean()

        return Task(lambda: make(scale), data, loss, _sgd, forward=_with_all_inputs)

    return task


def _graph(scale: Scale) -> Task:
    def data() -> Any:
        nodes = torch.randn(scale.samples, 512, scale.width, generator=_generator())
        edges = torch.randint(512, (scale.samples, 2, 4096), generator=_generator())
        return _Pairs(nodes, edges, target=torch.randint(5, (scale.samples,), generator=_generator()))

    return Task(lambda: Graph(scale.width), data, F.cross_entropy, _sgd, forward=_with_all_inputs)


def _with_all_inputs(model: nn.Module, batch: Any) -> Any:
    return model(*batch[0])


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


BY_HAND: dict[str, Callable[[Scale], Task]] = {
    "LSTM": _language(lstm),
    "GRU": _language(gru),
    "nn.TransformerEncoder": _language(Encoder),
    "experts": _language(Experts),
    "U-Net": _picture(lambda scale: UNet()),
    "diffusion": _picture(lambda scale: UNet(is_timed=True), 1),
    "VAE": _picture(lambda scale: Autoencoder(scale.photo), 64),
    "GNN": _graph,
}

# -- jobs ------------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda own: torch.optim.SGD(own, lr=0.01, momentum=0.9),
    "AdamW": lambda own: torch.optim.AdamW(own, lr=1e-4),
    "AdamW not fused": lambda own: torch.optim.AdamW(own, lr=1e-4, foreach=True),
    "Adafactor": lambda own: torch.optim.Adafactor(own, lr=1e-3),
}
# Samples, and tokens in each: steps long enough that the device and not the host bounds most of them.
_SIZES = ((16, 512), (16, 1024), (32, 256), (32, 512), (64, 256))
# Their kernels or their checks are not made for these sizes, or take minutes.
_LEFT_OUT = ("Mamba", "RWKV", "retinanet_resnet50_fpn")
MODELS = [name for name in (*ZOO, *BY_HAND) if name not in _LEFT_OUT]


@dataclass(frozen=True)
class Job:
    number: int
    model: str
    scale: Scale
    precision: str
    checkpointing: str
    optimizer: str
    is_held_out: bool

    @property
    def name(self) -> str:
        sizes = self.scale.named_sizes
        return f"{self.number}: {self.model}, {sizes}, {self.precision}, {self.checkpointing}, {self.optimizer}"

    def task(self) -> Task:
        make = BY_HAND[self.model] if self.model in BY_HAND else ZOO[self.model][1]
        choose = OPTIMIZERS[self.optimizer]
        return replace(
            make(self.scale),
            optimizer=lambda model: choose([p for p in model.parameters() if p.requires_grad]),
            name=self.model,
        )

    @property
    def config(self) -> RunConfig:
        return RunConfig(
            batch_size=self.scale.samples,
            steps=1,
            precision=self.precision,
            activation_checkpointing=self.checkpointing,
            fused="not fused" not in self.optimizer,
            unused_parameters="allow",
            eval_every="never",
        )


def jobs() -> list[Job]:
    draw = random.Random(SEED)
    models = list(MODELS)
    draw.shuffle(models)
    chosen = [models[number % len(models)] for number in range(NUM_JOBS)]
    held_out = set(draw.sample(range(NUM_JOBS), NUM_JOBS // 2))
    found = []
    for number, model in enumerate(chosen):
        heads = draw.choice((12, 16))
        samples, length = draw.choice(_SIZES)
        scale = Scale(
            samples=samples,
            length=length,
            vocabulary=draw.choice((8192, 32000)),
            width=64 * heads,
            layers=draw.choice((4, 8)),
            heads=heads,
            key_heads=draw.choice((2, 4)),
            image=224,
            patch=16,
            photo=224,
        )
        recomputes = "full" if draw.random() < 0.25 else "none"
        optimizer = draw.choice(list(OPTIMIZERS))
        found.append(
            Job(number, model, scale, draw.choice(("fp32", "bf16")), recomputes, optimizer, number in held_out)
        )
    return found


# -- prediction and truth --------------------------------------------------------------------------------------------


def predict(job: Job) -> dict[str, Any]:
    """Without the device, from records."""
    from rung.hardware.cluster import parse_cluster
    from rung.planner.estimate import Estimator
    from rung.planner.truncated_model import count_blocks

    task = job.task()
    started = time.perf_counter()
    estimator = Estimator(task, job.config, parse_cluster(f"1x{_DEVICE}"), count_blocks(task))
    found = estimator.estimate(parse("single", 1), job.checkpointing, job.scale.samples)
    took = time.perf_counter() - started
    return {
        "allocated": found.memory.allocated,
        "reserved": found.memory.reserved,
        "by_kind": found.memory.by_kind,
        "seconds": found.time.seconds,
        "limit": found.time.limit,
        "took": took,
        "operations": _predicted_operations(job),
    }


def _predicted_operations(job: Job) -> dict[str, list[float]]:
    """By name: how many, and their seconds on the device."""
    from rung.hardware.cluster import devices
    from rung.planner.cost import duration
    from rung.planner.dryrun import dry_run
    from rung.planner.trace import Work

    run = dry_run(job.task(), parse("single", 1), job.config, device="cuda")
    found: dict[str, list[float]] = {}
    for event in run.trace.events[run.second_step :]:
        if isinstance(event, Work):
            one = found.setdefault(event.name, [0, 0.0])
            one[0] += 1
            one[1] += duration(event, devices()[_DEVICE])[0]
    return found


def train(job: Job) -> dict[str, Any]:
    """What it takes: the world, runtime and batches of `rung train`, on the GPU, for some steps."""
    from rung.distributed.world import open_world
    from rung.runtime import build_runtime
    from rung.train.worker import make_batches

    started = time.perf_counter()
    task = job.task()
    with open_world(parse("single", 1), device="cuda") as world:
        runtime = build_runtime(task, world, job.config, total_steps=100)
        (window,) = runtime.place(make_batches(task, job.config, world))
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            runtime.step(window, want_norm=True)
        torch.cuda.synchronize()
        once = time.perf_counter()
        runtime.step(window, want_norm=True)
        torch.cuda.synchronize()
        times = max(1, min(20, int(0.2 / (time.perf_counter() - once))))
        blocks = []
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(times):
                runtime.step(window, want_norm=True)
            torch.cuda.synchronize()
            blocks.append((time.perf_counter() - begun) / times)
        found = {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "seconds": statistics.median(blocks),
            "blocks": blocks,
        }
        with torch.profiler.profile(acc_events=True) as profile:
            runtime.step(window, want_norm=True)
            torch.cuda.synchronize()
        found["operations"] = {
            one.key.removeprefix("aten::"): [one.count, one.self_device_time_total / 1e6]
            for one in profile.key_averages()
            if one.self_device_time_total > 0 and one.key.startswith("aten::")
        }
        del runtime, window
    return {**found, "took": time.perf_counter() - started}


def at_hand(job: Job) -> dict[str, Any]:
    """What `rung plan` measures where the device is."""
    from rung.planner.at_hand import measure_rank

    started = time.perf_counter()
    found = measure_rank(job.task(), parse("single", 1), job.config, rank=0, device="cuda")
    return {
        "allocated": found.allocated,
        "reserved": found.reserved,
        "seconds": found.seconds,
        "took": time.perf_counter() - started,
    }


# -- tables ----------------------------------------------------------------------------------------------------------


def _error(guess: dict[str, Any], truth: dict[str, Any], key: str) -> float:
    return 100 * (float(guess[key]) / float(truth[key]) - 1)


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and largest error of memory; the share of steps of more than 5 ms within 10 and 25 %."""
    long = [row for row in rows if row["trained"]["seconds"] > 5e-3]
    found: dict[str, Any] = {"jobs": len(rows), "of more than 5 ms": len(long)}
    for key in ("allocated", "reserved"):
        errors = [abs(row["errors"][key]) for row in rows]
        found[key] = {"mean": statistics.fmean(errors), "largest": max(errors)}
        found[key]["lowest"] = min(row["errors"][key] for row in rows)
    for limit in (10, 25):
        near = sum(abs(row["errors"]["seconds"]) <= limit for row in long)
        found[f"seconds within {limit} %"] = near / max(1, len(long))
    for who, is_busy in (("the device", True), ("the host", False)):
        bound = [row for row in long if (row["trained"]["busy"] > _BUSY * row["trained"]["seconds"]) == is_busy]
        shares = [
            sum(abs(row["errors"]["seconds"]) <= limit for row in bound) / max(1, len(bound)) for limit in (10, 25)
        ]
        found[f"bound by {who}"] = {"jobs": len(bound), "within 10 %": shares[0], "within 25 %": shares[1]}
    found["seconds"] = {
        "median": statistics.median(abs(row["errors"]["seconds"]) for row in long) if long else math.nan
    }
    return found


def join(trained: dict[str, Any], guesses: dict[str, dict[str, Any]]) -> None:
    """All in one file, and as tables: the worst first."""
    content: dict[str, Any] = {"command": shlex.join(["python", "-m", "benchmarks.foresight", *sys.argv[1:]])}
    for how, guessed in guesses.items():
        rows, failed = [], []
        for name, truth in trained.items():
            guess = guessed.get(name)
            if guess is None or "error" in truth:
                continue
            if "error" in guess:
                failed.append({"job": name, "error": guess["error"]})
                continue
            errors = {key: _error(guess, truth, key) for key in ("allocated", "reserved", "seconds")}
            busy = sum(seconds for _, seconds in truth["operations"].values())
            facts = {key: truth[key] for key in ("allocated", "reserved", "seconds", "took")} | {"busy": busy}
            told = {key: value for key, value in guess.items() if key not in ("operations", "by_kind")}
            rows.append({"job": name, "trained": facts, "said": told, "errors": errors})
        rows.sort(key=lambda row: -max(abs(row["errors"]["allocated"]), abs(row["errors"]["reserved"])))
        content[how] = {"summary": summarize(rows), "failed": failed, "rows": rows}
        print(f"\n{how}: {json.dumps(content[how]['summary'], indent=1)}")
        for one in failed:
            print(f"FAILED {one['job']}: {one['error'][:200]}")
        print("| job | alive, MiB | said | reserved, MiB | said | step, ms | said |")
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            cells = []
            for key, unit in (("allocated", 2**20), ("reserved", 2**20), ("seconds", 1e-3)):
                cells.append(f"{row['trained'][key] / unit:,.{1 if key == 'seconds' else 0}f}")
                cells.append(f"{row['errors'][key]:+.1f} %")
            print(f"| {row['job']} | {' | '.join(cells)} |")
    content["not trained"] = {name: one["error"] for name, one in trained.items() if "error" in one}
    for name, error in content["not trained"].items():
        print(f"NOT TRAINED {name}: {error[:200]}")
    _RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def _in_processes(
    function: Callable[[Job], dict[str, Any]], chosen: list[Job], at_once: int, until: float
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each job in a process of its own, whose allocator is empty and whose death is a result, too."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # packages that ask for a GPU must not open it before the forks
    for name in ("transformers.modeling_utils", "timm", "torchvision", "diffusers", "peft"):
        importlib.import_module(name)
    context = multiprocessing.get_context("fork")  # with what this process has imported, and without a GPU's context
    waiting, running = list(chosen), {}
    while waiting or running:
        while waiting and len(running) < at_once and time.monotonic() < until:
            job = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_attempt, args=(function, job, theirs), daemon=True)
            process.start()
            theirs.close()
            running[ours] = job, process
        if not running:
            print(f"no more time for {len(waiting)} jobs", flush=True)
            return
        for end in wait(list(running)):
            job, process = running.pop(end)  # type: ignore[call-overload]
            try:
                yield job, end.recv()  # type: ignore[union-attr]
            except EOFError:
                process.join()
                yield job, {"error": f"its process ended with {process.exitcode}"}
            process.join()


def _attempt(function: Callable[[Job], dict[str, Any]], job: Job, end: Any) -> None:
    try:
        end.send(function(job))
    except Exception as error:
        end.send({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("predict", "train", "at-hand"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--half", choices=("built", "held-out"), default="built")
    parser.add_argument("--only", default="", help="jobs whose name holds this")
    parser.add_argument("--processes", type=int, default=1, help="for --predict")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no job after this time")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="trained, predicted, at hand")
    options = parser.parse_args()
    if options.join:
        trained, *others = (json.loads(path.read_text()) for path in options.join)
        join(trained, dict(zip(("from records", "with the device"), others, strict=False)))
        return
    began = time.monotonic()
    for function, path in ((predict, options.predict), (train, options.train), (at_hand, options.at_hand)):
        if path is None:
            continue
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        chosen = [
            job
            for job in jobs()
            if job.is_held_out == (options.half == "held-out") and options.only in job.name and job.name not in found
        ]
        at_once = options.processes if function is predict else 1
        for job, one in _in_processes(function, chosen, at_once, began + options.seconds):
            found[job.name] = one
            said = one.get("error", "")[:300]
            if not said:
                memory, milliseconds = one["reserved"] / 2**20, 1000 * one["seconds"]
                said = f"{memory:9.0f} MiB {milliseconds:8.2f} ms in {one['took']:.1f} s"
            print(f"{job.name:<110} {said}", flush=True)
            path.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
