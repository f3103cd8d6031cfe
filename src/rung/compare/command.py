"""`rung compare`: runs the strategies that the flags name, and writes the results as a page, files and a table."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rung.compare.options import CompareOptions, check_options
from rung.errors import ConfigError
from rung.launch.fork_server import start_fork_server
from rung.spec.config import resolve
from rung.spec.task import load_task

_DEFAULT_STEPS, _MOST_WARMUP = 20, 5
_PRELOADED = ("rung.compare.measure", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")


def compare_command(options: CompareOptions) -> tuple[dict[str, Any], Path]:
    """Run the command. Returns the document of results and the directory of the runs."""
    check_options(options)
    start_fork_server(_PRELOADED)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # ranks write their output to their own logs
    console = Console(file=sys.stdout, highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 160  # rich would wrap a file at 80 columns
    # These load torch, which takes seconds; the fork server, which has just started, loads it at the same time.
    from rung.compare.report import as_markdown, write_page
    from rung.compare.view import show

    document, folder = compare(options, Console(file=sys.stderr, highlight=False, markup=False))
    show(document, console)
    console.print(f"\nruns: {folder}/", soft_wrap=True, markup=False)
    if options.json_file is not None:
        _write(options.json_file, json.dumps(document, indent=1) + "\n")
    if options.markdown is not None:
        _write(options.markdown, as_markdown(document))
    write_page(document, Path(options.out))
    console.print(f"page: {options.out}", soft_wrap=True, markup=False)
    return document, folder


def compare(options: CompareOptions, stderr: Console) -> tuple[dict[str, Any], Path]:
    """Measure the strategies. Returns the document of results and the directory of the runs."""
    task = load_task(options.task)
    given = {"steps": _DEFAULT_STEPS, **{key: value for key, value in options.flags.items() if value is not None}}
    if "steps" in options.assignments:
        del given["steps"]
    resolved = resolve(task, file=options.config_file, flags=given, assignments=options.assignments)
    if resolved.config.batch_tokens is not None:
        raise ConfigError(
            "rung compare takes batches of one number of samples, and batch_tokens gives others in every step. Give "
            "--batch-size."
        )
    config = replace(
        resolved.config,
        epochs=None,
        strategy=None,
        eval_every="never",
        save_weights=False,
        checkpoint_every=None,
        keep_best="none",
        replicate_state=False,
        out=None,
    )
    assert config.steps is not None
    warmup = options.warmup if options.warmup is not None else min(_MOST_WARMUP, config.steps // 2)
    if not 0 <= warmup < config.steps:
        raise ConfigError(f"--warmup {warmup} of {config.steps} steps leaves none to measure. Use more --steps.")
    from rung.compare.comparison import measure_strategies  # loads torch, once the settings are known to be good

    return measure_strategies(options, task.bind(resolved.arguments), resolved.arguments, config, warmup, stderr)


def _write(name: str, content: str) -> None:
    try:
        Path(name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be written: {error.strerror}. `rung report` can write it from the directory of the runs."
        ) from None
