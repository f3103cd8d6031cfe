"""The flags of `rung export`."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a run's weights for use without Rung",
        description="Write the weights of a run under the module's own names: they load with strict=True into the "
        "bare module, whatever strategy trained them. Uses the newest whole checkpoint, or the end of the run.",
    )
    export.add_argument("run", metavar="RUN", help="a run directory, its folder of checkpoints, or one checkpoint")
    export.add_argument(
        "--output", metavar="FILE", required=True, help="FILE.safetensors, FILE.pt or FILE.pth; a folder for hf"
    )
    export.add_argument(
        "--format",
        choices=("file", "hf", "peft"),
        default="file",
        help="hf: a folder for from_pretrained, with the configuration and tokenizer of --like, adapters merged; peft: "
        "a folder with the adapters alone, for PeftModel.from_pretrained",
    )
    export.add_argument(
        "--like", metavar="FOLDER", help="the Hugging Face folder to copy these from; default: that of --init"
    )
    export.add_argument("--merge", action="store_true", help="add the adapters of --lora to the weights beside them")
    export.add_argument(
        "--base",
        metavar="PATH",
        help="those weights, which checkpoints do not have: a file or a Hugging Face folder; default: that of --init",
    )
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    export.add_argument("--best", action="store_true", help="the best evaluation's checkpoint (--set keep_best=METRIC)")
    export.add_argument(
        "--average", action="store_true", help="the average of the weights that --ema or --swa-start keeps"
    )
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="above it, write several .safetensors files and an index as Hugging Face does (default 5GB)",
    )
    export.add_argument("--force", action="store_true", help="replace FILE if it exists")
    export.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    from rung.cli.checkpoints_view import export_command

    return export_command(
        options.run,
        output=options.output,
        step=options.step,
        best=options.best,
        max_shard_size=options.max_shard_size,
        force=options.force,
        like=options.like,
        average=options.average,
        form=options.format,
        merge=options.merge,
        base=options.base,
    )
