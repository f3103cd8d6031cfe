"""Images a second that Rung trains on, beside a hand-written torch loop: the task of examples/imagenet.

python -m benchmarks.imagenet --device cuda
python -m benchmarks.imagenet --device cuda --only resnet50-files --workers 16

Images are generated, or read from JPEG files that are written first (cases that end in -files). Every case runs in one
process; ratios are taken within a repetition, in which the two loops alternate.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.cases import Case
from benchmarks.contenders.common import LOG_EVERY
from benchmarks.measure import Plan, measure
from rung.system.processes import num_cores

_RESULTS = Path(__file__).parent / "results"
_CONTENDERS = ("hand", "rung")
_NUM_FILES, _NUM_CLASSES = 4096, 10
_NUM_NAMES = 32  # of each file: with short epochs a loader that reads on across their ends would have it easier


def find_cases(device: str, workers: int) -> list[Case]:
    """On a GPU bf16 and channels_last, compiled and not; on a CPU something small that shows that it runs."""
    if device == "cpu":
        small = _arguments("shufflenet_v2_x0_5", size=64, classes=10)
        case = Case("shufflenet", "imagenet", "cpu", 16, 20, arguments=small, clip=None)
        return [case, replace(case, name="shufflenet-files", workers=1)]
    cases = []
    for arch, batch_size in (("resnet50", 256), ("resnet18", 512)):
        plain = Case(
            arch,
            "imagenet",
            "cuda",
            batch_size,
            30,
            arguments=_arguments(arch, size=224, classes=1000),
            precision="bf16",
            clip=None,
            memory_format="channels_last",
            workers=workers,
        )
        cases += [replace(plain, name=f"{arch}-compile", compile=True), plain]
    # Blocks are longer than what the loaders have read ahead while the other contender had its turn.
    return [*cases, replace(cases[1], name="resnet50-files", steps=120)]


def _arguments(arch: str, size: int, classes: int) -> dict[str, Any]:
    data = {"train_data.size": size, "train_data.classes": classes, "train_data.count": 200_000}
    # Random crops would be what is measured: a GPU takes images faster than a few cores cut them.
    return {"model.arch": arch, "model.classes": classes, **data, "train_data.augment": False}


def reading_files(case: Case, root: str) -> Case:
    """The case with images from files, cropped at random as ImageNet's are."""
    own = {key: value for key, value in case.arguments.items() if key != "train_data.count"}
    return replace(case, arguments={**own, "train_data.root": root, "train_data.augment": True})


def write_files(root: Path) -> None:
    """JPEG files of about the size that ImageNet's have, a directory a class."""
    from PIL import Image

    own = torch.Generator().manual_seed(0)
    for number in range(_NUM_FILES):
        folder = root / "train" / f"class-{number % _NUM_CLASSES:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        coarse = torch.rand(1, 3, 24, 32, generator=own)
        smooth = torch.nn.functional.interpolate(coarse, size=(375, 500), mode="bicubic", align_corners=False)
        noisy = smooth[0] * 200 + torch.rand(3, 375, 500, generator=own) * 40
        pixels = noisy.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
        file = folder / f"{number}.jpg"
        Image.fromarray(pixels).save(file, quality=90)
        for name in range(1, _NUM_NAMES):
            (folder / f"{number}-{name}.jpg").hardlink_to(file)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.imagenet", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, help="steps in a timed block; default: as fits the case")
    parser.add_argument("--repeats", type=int, default=7, help="timed blocks of each contender")
    parser.add_argument("--workers", type=int, default=max(1, num_cores() - 2), help="data-loading processes on a GPU")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="only these cases")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/imagenet-DEVICE.json")
    options = parser.parse_args(arguments)
    if options.steps is not None and (options.steps < 1 or options.steps % LOG_EVERY):
        parser.error(f"--steps must be a multiple of {LOG_EVERY}: the clock is read with the loss")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    cases = find_cases(options.device, options.workers)
    names = [case.name for case in cases]
    unknown = [name for name in options.only or [] if name not in names]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r} here; there are: {', '.join(names)}")
    out = options.out or _RESULTS / f"imagenet-{options.device}.json"
    content: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.imagenet", *arguments]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": report.machine_facts(options.device),
        "cases": {},
    }
    for case in cases:
        if options.only is None or case.name in options.only:
            content["cases"][case.name] = _measure(case, options.steps or case.steps, options.repeats)
            report.write(out, content)  # after each case, so that an interruption costs one case alone
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(_table(content["cases"]))
    console.print(f"written to {out}")
    return 0


def _measure(case: Case, steps: int, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        if case.name.endswith("-files"):
            write_files(Path(folder))
            case = reading_files(case, folder)
        plan = Plan(case, _CONTENDERS, steps, repeats, threads=max(1, num_cores() // 2))
        found = report.summarise(plan, measure(plan))
    for row in found["contenders"].values():
        row["images_per_second"] = case.batch_size / row["seconds_per_step"]["median"]
    return found


def _table(cases: dict[str, Any]) -> Table:
    shown = Table(title="images a second, and time relative to the hand-written loop", box=box.SIMPLE)
    for heading in ("case", "contender"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("images/s", "ms a step", "ratio", "range", "loss"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, case in cases.items():
        for contender, row in case["contenders"].items():
            ratio = row["ratio_to_hand"]
            shown.add_row(
                name,
                contender,
                f"{row['images_per_second']:,.0f}",
                f"{row['seconds_per_step']['median'] * 1000:.1f}",
                f"{ratio['median']:.3f}",
                f"{ratio['min']:.3f}..{ratio['max']:.3f}",
                f"{row['mean_loss']:.3f}",
            )
        shown.add_section()
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
