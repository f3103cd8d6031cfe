"""A long run: whether anything grows but what has to.

python -m benchmarks.endurance
python -m benchmarks.endurance --steps 10000 --kill-every 2500 --strategies ddp --out /tmp/endurance.json
python -m benchmarks.endurance --show benchmarks/results/endurance.json

Two ranks train a tiny model with evaluations, a checkpoint every 50 steps and a loader process each, and one of them is
killed every so often. Meanwhile the processes are looked at from outside, through /proc, and so are the disk and
/dev/shm. What is there in the last thousand steps is set against steps 1,000 to 2,000: memory, descriptors, threads,
processes, files, bytes, and the time of a step. Metrics, TensorBoard's events, logs and the reports of failures grow by
nature; they are shown by themselves. The table of docs/elastic.md is written from the results; --show does only that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import fill_page, machine_facts, write
from benchmarks.usage import content_of, descendants, usage_of
from rung.distributed.status_board import read_statuses

_PAGE = Path("docs/elastic.md")
_STRATEGIES = ("ddp", "zero3", "pp2", "ps-async")
_WINDOW = 1000  # steps over which a figure is taken
_SETTLING = 100  # steps after a start that do not count: buffers, plans and caches are made
_LIMIT = 0.02  # that a figure may have grown by
_GROWS = ("metrics.jsonl", "tensorboard", "logs", "failures")  # in the run's directory, by nature
# Of a process. Not its pages of files: other programs share the libraries, and when one ends, this share of them grows.
_OF_EACH = ("own_bytes", "descriptors", "threads")
_KEPT = 10  # one look in so many is written down
_STALL_SECONDS = 120.0  # without a step, after which the run counts as dead
_TASK = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def _samples(count, seed):
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


def train_data():
    return _samples(65536, 0)


def eval_data():
    return _samples(64, 1)


def loss(output, target):
    return F.cross_entropy(output, target)


def metrics(output, target):
    return {"accuracy": (output.argmax(-1) == target).double()}


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
"""


class LongRun:
    """A run of `rung train` that is looked at, and hit."""

    def __init__(self, folder: Path, strategy: str, options: argparse.Namespace) -> None:
        self._run, self._temporary = folder / "run", folder / "tmp"
        self._temporary.mkdir()
        (folder / "task.py").write_text(_TASK)
        command = [
            sys.executable, "-m", "rung", "train", str(folder / "task.py"), "--strategy", strategy, "--nproc", "2",
            "--batch-size", "16", "--steps", str(options.steps), "--checkpoint-every", "50", "--keep", "2",
            "--max-restarts", "5", "--out", str(self._run), "--set", "workers=1",
            "--set", f"eval_every={options.eval_every}",
        ]  # fmt: skip
        self._output = (folder / "console").open("wb")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)}
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._faults: list[dict[str, int]] = []
        self._samples: list[dict[str, Any]] = []
        self._options = options

    def follow(self) -> dict[str, Any]:
        """To its end; what was seen."""
        options, started = self._options, time.monotonic()
        looked, hit, seen, moved = 0, 0, 0, time.monotonic()
        while self._process.poll() is None:
            time.sleep(0.05)
            step = self._step()
            if step > seen:
                seen, moved = step, time.monotonic()
            if time.monotonic() - moved > _STALL_SECONDS:
                raise RuntimeError(f"no step since step {seen}: see {self._output.name}")
            if step // options.sample_every > looked:
                looked = step // options.sample_every
                self._samples.append({"step": step, **self._look()})
            # The last stretch is as long as the others, so that ranks are as old at the end as they ever were.
            if options.kill_every and step // options.kill_every > hit and step < options.steps - options.kill_every:
                hit = step // options.kill_every
                self._hit(hit % 2)
        if self._process.wait() != 0:
            raise RuntimeError(f"the run ended with {self._process.returncode}: see {self._output.name}")
        return {"seconds": time.monotonic() - started, "faults": self._faults, "samples": self._samples}

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._run / "metrics.jsonl").read_text().splitlines()]

    def _step(self) -> int:
        return max((status.step for status in read_statuses(self._run / ".state" / "status").values()), default=0)

    def _hit(self, rank: int) -> None:
        status = read_statuses(self._run / ".state" / "status").get(rank)
        if status is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.pid, signal.SIGKILL)
                self._faults.append({"step": status.step, "rank": rank})

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        ranks = {status.pid: rank for rank, status in read_statuses(self._run / ".state" / "status").items()}
        parents = dict(descendants(self._process.pid))
        servers = {parent for pid, parent in parents.items() if pid in ranks}
        for pid in [self._process.pid, *parents]:
            usage = usage_of(pid)
            if usage is None:
                continue
            loads = parents.get(pid) in ranks
            rank = ranks.get(pid, ranks.get(parents.get(pid, 0), -1))
            role = (
                "launcher" if pid == self._process.pid else "server" if pid in servers
                else f"rank {rank}" if pid in ranks else f"loader {rank}" if loads else "tracker"
            )  # fmt: skip
            told = {f"{role}: {name}": value for name, value in vars(usage).items() if name in _OF_EACH}
            for key, value in {**told, "all: processes": 1}.items():
                found[key] = found.get(key, 0) + value
        grown = [content_of(self._run / name) for name in _GROWS if (self._run / name).is_dir()]
        lines = self._run / "metrics.jsonl"
        grown_bytes = sum(num_bytes for num_bytes, _ in grown) + (lines.stat().st_size if lines.exists() else 0)
        grown_files = sum(count for _, count in grown) + lines.exists()
        num_bytes, count = content_of(self._run)
        found["run: files"], found["run: bytes"] = count - grown_files, num_bytes - grown_bytes
        found["run, by nature: files"], found["run, by nature: bytes"] = grown_files, grown_bytes
        found["/dev/shm: bytes"], found["/dev/shm: files"] = content_of(Path("/dev/shm"))
        found["temporary: bytes"], found["temporary: files"] = content_of(self._temporary)
        return found


def judge(seen: dict[str, Any], metrics: Iterable[dict[str, Any]], steps: int) -> dict[str, Any]:
    """First and last figures beside each other, and what has grown by more than the limit."""
    early, late = range(_WINDOW, 2 * _WINDOW), range(steps - _WINDOW, steps + 1)
    samples = seen["samples"]
    names = list(dict.fromkeys(name for sample in samples for name in sample if name != "step"))
    rows: dict[str, Any] = {}
    for name in names:
        first, last = (_typical(samples, name, window) for window in (early, late))
        rows[name] = {"first": first, "last": last}
    times = _step_times(metrics)
    first, last = (_median_time(times, window) for window in (early, late))
    rows["step seconds"] = {"first": first, "last": last}
    for name, row in rows.items():
        first, last = row["first"], row["last"]
        row["growth"] = last / first - 1 if first and last is not None else None
        row["counts"] = "by nature" not in name
    windows = [_median_time(times, range(start, start + _WINDOW)) for start in range(_WINDOW, steps, _WINDOW)]
    grown = [
        name
        for name, row in rows.items()
        if row["counts"] and row["last"] is not None and row["last"] > (row["first"] or 0) * (1 + _LIMIT)
    ]
    return {"grown": grown, "figures": rows, "step_seconds_of_windows": windows}


def _typical(samples: Iterable[dict[str, Any]], name: str, window: range) -> float | None:
    """The median of bytes, and the least of what is counted: a sample that falls into a save sees one more thread."""
    values = [sample.get(name, 0) for sample in samples if sample["step"] in window]
    if not values:
        return None
    return statistics.median(values) if name.endswith("bytes") else min(values)


def _step_times(metrics: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Of each step, as it was done last, without those right after a start."""
    times: dict[int, float] = {}
    began = 0
    for row in metrics:
        if row["event"] in ("start", "resume"):
            began = row.get("step", 0)
            times = {step: seconds for step, seconds in times.items() if step <= began}
        elif row["event"] == "step" and row["step"] > began + _SETTLING:
            times[row["step"]] = row["step_seconds"]
    return times


def _median_time(times: dict[int, float], window: range) -> float | None:
    values = [times[step] for step in window if step in times]
    return statistics.median(values) if len(values) >= len(window) // 2 else None


def show(strategy: str, result: dict[str, Any]) -> None:
    print(f"\n{strategy}: {result['steps']} steps in {result['seconds']:.0f} s, {len(result['faults'])} ranks killed")
    for name, row in result["figures"].items():
        if row["first"] is None or row["last"] is None:
            continue
        mark = "" if not row["counts"] else "  GROWN" if name in result["grown"] else ""
        growth = f"{100 * row['growth']:+.2f} %" if row["growth"] is not None else ""
        print(f"  {name:<30} {row['first']:>16,.4g} -> {row['last']:>16,.4g}  {growth}{mark}")


def marks(content: dict[str, Any]) -> dict[str, str]:
    return {"endurance": sentence(content), "endurance_table": table(content)}


def table(content: dict[str, Any]) -> str:
    """For the page: first and last figures by strategy, sums over all processes of the run."""
    lines = ["| | faults | memory | descriptors | threads | files and bytes of the run | /dev/shm | a step |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for strategy, result in content["strategies"].items():
        rows = result["figures"]

        def total(ending: str, which: str, rows: dict[str, Any] = rows) -> float:
            return sum(row[which] or 0 for name, row in rows.items() if name.endswith(ending) and row["counts"])

        def pair(ending: str, scale: float = 1, form: str = ",.0f", total: Any = total) -> str:
            return " → ".join(format(total(ending, which) * scale, form) for which in ("first", "last"))

        lines.append(
            f"| `{strategy}` | {len(result['faults'])} | {pair(': own_bytes', 2**-20)} MiB | "
            f"{pair(': descriptors')} | {pair(': threads')} | {pair('run: files')}; {pair('run: bytes', 1e-3)} kB | "
            f"{pair('/dev/shm: files')} | {pair('step seconds', 1e3, '.2f')} ms |"
        )
    return "\n".join(lines)


def sentence(content: dict[str, Any]) -> str:
    results, machine = list(content["strategies"].values()), content["machine"]
    grown = {name: result["grown"] for name, result in content["strategies"].items() if result["grown"]}
    trends = {
        name: [f"{figure} ({100 * trend(content['strategies'][name], figure):+.1f} %)" for figure in figures]
        for name, figures in grown.items()
    }
    told = "; ".join(f"under {name}: {', '.join(figures)}" for name, figures in trends.items())
    nature = max(
        row["last"] / result["steps"]
        for result in results
        for name, row in result["figures"].items()
        if name == "run, by nature: bytes" and row["last"]
    )
    return (
        f"{results[0]['steps']:,} steps with a checkpoint every 50, evaluations and a loader process a rank: figures "
        "of steps 1,000 to 2,000 and of the last thousand. "
        + (
            f"More than {100 * content['limit']:.0f} % were added to (in brackets: by the trend over the whole run, "
            f"since single looks vary by chance): {told}. "
            if told
            else ""
        )
        + f"By nature, metrics, TensorBoard's events, logs and reports of failures grow: {nature:,.0f} bytes a step at "
        f"most. {machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}."
    )


def trend(result: dict[str, Any], name: str) -> float:
    """How much a figure grew over the run, by the median slope between any two looks: single looks vary by chance."""
    if name == "step seconds":
        values = [value for value in result["step_seconds_of_windows"] if value is not None]
    else:
        values = [sample.get(name, 0) for sample in result["samples"]]
    slopes = [(b - a) / (j - i) for i, a in enumerate(values) for j, b in enumerate(values) if j > i]
    return statistics.median(slopes) * (len(values) - 1) / statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--strategies", nargs="+", default=list(_STRATEGIES))
    parser.add_argument("--kill-every", type=int, default=5000, help="steps; 0: nobody is killed")
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--sample-every", type=int, default=100, help="steps between two looks at the processes")
    parser.add_argument("--keep", type=Path, help="where the runs are to stay; else they are removed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/endurance.json"))
    parser.add_argument("--show", type=Path, help="write the page from these figures, and measure nothing")
    options = parser.parse_args()
    if options.show is not None:
        fill_page(_PAGE, options.show, marks)
        return
    if options.steps < 4 * _WINDOW:
        parser.error(f"--steps {options.steps}: the first and the last thousand steps are compared; 4000 at least.")
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.endurance", *sys.argv[1:]]),
        "machine": machine_facts("cpu"),
        "limit": _LIMIT,
        "strategies": {},
    }
    if options.out.exists() and set(options.strategies) < set(_STRATEGIES):  # those measured by themselves are added
        content["strategies"] = json.loads(options.out.read_text())["strategies"]
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if options.keep is not None:
                folder = options.keep / strategy
                folder.mkdir(parents=True)
            run = LongRun(folder, strategy, options)
            try:
                seen = run.follow()
            finally:
                run.close()
            result = {"steps": options.steps, **seen, **judge(seen, run.metrics(), options.steps)}
        show(strategy, result)
        content["strategies"][strategy] = {**result, "samples": result["samples"][::_KEPT]}
        write(options.out, content)
    fill_page(_PAGE, options.out, marks)
    grown = {name: result["grown"] for name, result in content["strategies"].items() if result["grown"]}
    for name, figures in grown.items():
        print(f"{name}: more than {100 * _LIMIT:.0f} % above the first: {', '.join(figures)}")
    sys.exit(1 if grown else 0)


if __name__ == "__main__":
    main()
