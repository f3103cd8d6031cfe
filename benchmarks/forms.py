"""Which form of context parallelism a plan chooses, beside what each takes: four ranks on a link that `tc` limits.

python -m benchmarks.forms
python -m benchmarks.forms --megabits 200 --repeats 1 --out /tmp/forms.json
python -m benchmarks.forms --show benchmarks/results/forms.json

The ranks are on a machine of our own making, a network namespace, whose loopback they share (needs root). `rung
calibrate` measures it there, `rung plan --cluster 4xhere --strategy cp4` plans each form and chooses one, and `rung
train` takes the steps. Two models: a GPT with as many keys as queries, and one whose queries share a key.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.limited import Cable
from benchmarks.load import rows_of, run
from benchmarks.report import fill_page, machine_facts, write
from rung.spec.config import CP_FORMS

_PAGE = Path("docs/strategies.md")
_TASK = Path(__file__).parent / "tasks" / "gpt.py"
_LENGTH = 1024
_SHAPE = {
    "model.layers": 2,
    "model.width": 256,
    "model.heads": 8,
    "model.context": _LENGTH,
    "train_data.context": _LENGTH,
}
_MODELS: dict[str, dict[str, int]] = {"8 keys": {}, "1 key": {"model.key_heads": 1}}
_SKIPPED = 2  # first steps


def _settings(model: str) -> list[str]:
    values = {**_SHAPE, **_MODELS[model], "device": "cpu", "train_data.samples": 64}
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")] + ["--batch-size", "1"]


def _plan(folder: Path, model: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "rung", "plan", str(_TASK), "--cluster", "4xhere", "--strategy", "cp4", "--json"]
    done = subprocess.run([*command, *_settings(model), *flags], cwd=folder, capture_output=True, text=True, check=True)
    (row,) = json.loads(done.stdout)["layouts"]
    return dict(row)


def _train(folder: Path, prefix: list[str], model: str, form: str, steps: int) -> float:
    """Seconds of a step."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "rung", "train", str(_TASK), "--strategy", "cp4", "--nproc", "4", "--no-check"]
    command += [*_settings(model), "--cp-form", form, "--steps", str(steps), "--out", str(out)]
    run([*command, "--set", "eval_every=never", "--set", "log_every=1"], folder, prefix=prefix)
    return statistics.median(row["step_seconds"] for row in rows_of(out, "step")[_SKIPPED:])


def measure(megabits: int | None, steps: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    found = []
    with Cable() as cable:
        prefix = cable.prefix(0)
        if megabits is not None:
            cable.limit_loopback(0, megabits)
        run([sys.executable, "-m", "rung", "calibrate", "--nproc", "1", "4"], folder, prefix=prefix)
        for model in _MODELS:
            planned = {form: _plan(folder, model, "--cp-form", form)["time"]["seconds"] for form in CP_FORMS}
            chosen = _plan(folder, model)["cp_form"]
            seconds: dict[str, list[float]] = {form: [] for form in CP_FORMS}
            for _ in range(repeats):
                for form in CP_FORMS:
                    seconds[form].append(_train(folder, prefix, model, form, steps))
            measured = {form: statistics.median(each) for form, each in seconds.items()}
            row = {"megabits": megabits, "model": model, "planned": planned, "chosen": chosen, "measured": measured}
            row["lost"] = measured[chosen] / min(measured.values()) - 1  # by the plan's choice
            found.append({**row, "all": seconds})
            print(row, flush=True)
    return found


def marks(content: dict[str, Any]) -> dict[str, str]:
    lines = ["| link | heads of keys | " + " | ".join(CP_FORMS) + " | plan's choice |", "|---|---|--:|--:|--:|---|"]
    for row in content["rows"]:
        link = "loopback" if row["megabits"] is None else f"{row['megabits']} Mbit/s"
        each = [f"{row['measured'][f] * 1000:.0f} ms (planned {row['planned'][f] * 1000:.0f})" for f in CP_FORMS]
        lost = "the quickest" if row["lost"] == 0 else f"{row['lost']:.0%} slower than the quickest"
        lines.append(f"| {link} | {row['model']} | {' | '.join(each)} | `{row['chosen']}`, {lost} |")
    return {"forms of context parallelism": "\n".join(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, nargs="*", default=[0, 1000], help="0 is without a limit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/forms.json"))
    parser.add_argument("--show", type=Path, help="write the page from these figures and measure nothing")
    options = parser.parse_args()
    if options.show is None:
        command = shlex.join(["python", "-m", "benchmarks.forms", *sys.argv[1:]])
        content: dict[str, Any] = {"command": command, "machine": machine_facts("cpu"), "rows": []}
        for megabits in options.megabits:
            with tempfile.TemporaryDirectory() as folder:
                content["rows"] += measure(megabits or None, options.steps, options.repeats, Path(folder))
            write(options.out, content)
        print(f"written to {options.out}")
    fill_page(_PAGE, options.show or options.out, marks)


if __name__ == "__main__":
    main()
