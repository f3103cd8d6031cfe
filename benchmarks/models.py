"""Models that nobody here wrote, under five strategies: whether the numbers are those of one process.

python -m benchmarks.models
python -m benchmarks.models --only GPT-2 CLIP --strategies ddp tp2
python -m benchmarks.models --show benchmarks/results/models.json

Each model takes two steps of SGD in float64 (float32 where an operation has no kernel for float64), without dropout, on
two ranks, or four under the composition. A cell is "same" (losses, gradient norms and all weights as of one process, to
1e-9), "refused" with Rung's reason, "differs" or "fails". A model that computes in float32 whatever its weights are may
differ by as much as it does on one process with smaller micro-batches. Weights are compared by their norm, their sum
and a random projection of each tensor. Cells are added to the results one by one; docs/models.md is written from them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.report import fill_page, machine_facts, write
from benchmarks.zoo import ZOO, Scale
from rung.distributed.world import open_world
from rung.launch.fork_server import start_fork_server
from rung.launch.spawn import RankFailedError, on_ranks
from rung.runtime import build_runtime
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.system.launcher_env import environment_local_size, environment_size
from rung.train.worker import make_batches

_PAGE = Path("docs/models.md")
_STRATEGIES = ("ddp", "zero3", "tp2", "pp2", "zero2x2,tp2")
_SECONDS = 240.0
_ROUNDING = 1e-6  # of float32, inside a model that asks for it
_TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3}


def train(name: str, strategy: str, precision: str, micro_batch: int) -> dict[str, Any]:
    """Two steps on this rank: losses and norms, and figures of each weight on the main rank."""
    task = ZOO[name][1](Scale())
    layout = parse(strategy, environment_size(), environment_local_size())
    data_ranks = layout.num_data_ranks
    # The same global micro-batches under every strategy, as batch norm sees them.
    config = RunConfig(
        batch_size=8, micro_batch=micro_batch // data_ranks, steps=2, precision=precision, device="cpu", dropout=False,
        unused_parameters="allow",
    )  # fmt: skip
    with open_world(layout, device="cpu", timeout_seconds=int(_SECONDS)) as world:
        batches = make_batches(task, config, world)
        runtime = build_runtime(task, world, config, total_steps=batches.total_steps, dataset=batches.dataset)
        losses, norms = [], []
        for window in runtime.place(batches):
            result = runtime.step(window, want_norm=True)
            losses.append(sum(row[0] for row in world.gather([float(result.loss_share)])))
            norms.append(float(result.grad_norm) if result.grad_norm is not None else math.nan)
        weights = {key: value.double().flatten() for key, value in runtime.named_weights() if value.numel()}
        digest = {key: [float(value.norm()), float(value.sum()), _projection(value)] for key, value in weights.items()}
    return {"losses": losses, "norms": norms, "weights": digest if world.is_main else {}}


def _projection(values: torch.Tensor) -> float:
    return float(values @ torch.randn(len(values), dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def compare(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference, relative to the figure or to 1."""
    pairs = [*zip(one["losses"], other["losses"], strict=True), *zip(one["norms"], other["norms"], strict=True)]
    if set(one["weights"]) != set(other["weights"]):
        return math.inf
    for key, figures in one["weights"].items():
        pairs += list(zip(figures, other["weights"][key], strict=True))
    worst = max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
    return math.inf if math.isnan(worst) else worst


class Table:
    """The cells so far, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cells": {}}

    def run(self, name: str, strategies: list[str], say: Any) -> None:
        precision = "fp64"
        reference = self._train(name, "single", precision)
        if isinstance(reference, str):
            precision = "fp32"
            reference = self._train(name, "single", precision)
        for strategy in strategies:
            started = time.perf_counter()
            if isinstance(reference, str):
                cell = {"result": "fails", "why": f"one process: {reference}"}
            else:
                cell = self._cell(self._train(name, strategy, precision), reference, precision)
                if cell["result"] == "differs" and cell["difference"] < _ROUNDING:
                    smaller = self._train(name, "single", precision, micro_batch=2)
                    rounding = compare(smaller, reference) if isinstance(smaller, dict) else 0.0
                    if cell["difference"] <= 2 * rounding < _ROUNDING:
                        cell |= {"result": "same", "rounding": rounding}
            cell |= {"precision": precision, "seconds": round(time.perf_counter() - started, 1)}
            cell["torch"] = torch.__version__
            self.content["cells"].setdefault(name, {})[strategy] = cell
            say(f"{name:<26} {strategy:<12} {cell['result']:<8} {cell.get('why', cell.get('difference', ''))}")
            self.content["machine"] = machine_facts("cpu")
            write(self.path, self.content)

    def _train(self, name: str, strategy: str, precision: str, micro_batch: int = 4) -> Any:
        size = 1 if strategy == "single" else required_num_ranks(strategy) or 2
        try:
            return on_ranks(train, size, name, strategy, precision, micro_batch, threads=1, timeout=_SECONDS)[0]
        except RankFailedError as failure:
            lines = failure.error.strip().splitlines()
            # Rung's own errors may have several lines.
            first = next((n for n, line in enumerate(lines) if line.startswith("rung.errors.")), len(lines) - 1)
            return re.sub(r"\S*/site-packages/", "", " ".join(lines[first:]))[:400]

    def _cell(self, found: Any, reference: dict[str, Any], precision: str) -> dict[str, Any]:
        if isinstance(found, str):
            kind = "refused" if found.startswith("rung.errors.") else "fails"
            return {"result": kind, "why": found.removeprefix("rung.errors.")}
        difference = compare(found, reference)
        return {"result": "same" if difference <= _TOLERANCES[precision] else "differs", "difference": difference}


def marks(content: dict[str, Any]) -> dict[str, str]:
    cells = [cell for row in content["cells"].values() for cell in row.values()]
    counts = {kind: sum(cell["result"] == kind for cell in cells) for kind in ("same", "refused", "fails", "differs")}
    rounded = sum("rounding" in cell for cell in cells)
    sentence = (
        f"{len(content['cells'])} models, {len(cells)} cells: {counts['same']} same "
        f"({100 * counts['same'] / max(1, len(cells)):.0f} %; {rounded} of them to the rounding of a model that "
        f"computes in float32 by itself), {counts['refused']} refused, {counts['fails']} fail, "
        f"{counts['differs']} differ. torch {' and '.join(sorted({cell['torch'] for cell in cells}))}."
    )
    lines = ["| family | model | " + " | ".join(f"`{name}`" for name in _STRATEGIES) + " |"]
    lines.append("|" + "---|" * (2 + len(_STRATEGIES)))
    reasons: dict[str, int] = {}
    for name, row in content["cells"].items():
        shown = []
        for strategy in _STRATEGIES:
            cell = row.get(strategy)
            text = cell["result"] if cell is not None else "-"
            if cell is not None and "why" in cell:
                text += f" ({reasons.setdefault(cell['why'], len(reasons) + 1)})"
            shown.append(f"**{text}**" if cell is not None and cell["result"] in ("differs", "fails") else text)
        lines.append(f"| {ZOO[name][0]} | {name} | {' | '.join(shown)} |")
    notes = [f"{number}. {_escaped(why)}" for why, number in reasons.items()]
    return {"models": sentence, "models_table": "\n".join([*lines, "", *notes])}


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--strategies", nargs="+", default=list(_STRATEGIES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/models.json"))
    parser.add_argument("--show", type=Path, metavar="FILE", help="write the page from results")
    options = parser.parse_args()
    if options.show is None:
        modules = ["torch.distributed.fsdp", "torch.distributed.tensor", "rung.train.worker", "benchmarks.zoo"]
        start_fork_server(modules)
        table, console = Table(options.out), Console(highlight=False, soft_wrap=True)
        table.content["command"] = shlex.join(["python", "-m", "benchmarks.models", *sys.argv[1:]])
        for name in options.only:
            table.run(name, options.strategies, console.print)
    results = options.show or options.out
    fill_page(_PAGE, results, marks)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
