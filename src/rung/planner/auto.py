"""`rung train --strategy auto`: plan for this machine, print the choice and its reasons, and train with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rung.errors import ConfigError
from rung.hardware.cluster import HERE, HERE_FILE, Cluster, devices, parse_cluster
from rung.planner.calibrate import calibrate
from rung.planner.measurements import open_measurements
from rung.planner.parallel_search import TaskSource
from rung.planner.plan import in_tokens, make_plan, micro_batch_of
from rung.spec.config import count_range, resolve
from rung.spec.task import load_task
from rung.train.sample_order import with_fullest_batch

_LINES = 3


def choose_flags(
    path: str | Path,
    *,
    config_file: str | None,
    flags: Mapping[str, Any],
    assignments: Mapping[str, str],
    measures: bool = True,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """The flags of `rung train` with the planned strategy, micro-batch and checkpointing in the place of "auto"."""
    task = load_task(path)
    resolved = resolve(task, file=config_file, flags={**flags, "strategy": None}, assignments=assignments)
    config = resolved.config
    low, high = count_range(config.nproc) if config.nproc is not None else (0, 0)
    if config.nnodes != "1" or low != high:
        requested = f"--nnodes {config.nnodes}" if config.nnodes != "1" else f"--nproc {config.nproc}"
        raise ConfigError(
            f"--strategy auto plans for a fixed number of processes on one machine, not for {requested}. Use "
            "`rung plan TASK --cluster ...` and pass the strategy that it recommends."
        )
    on_gpu = torch.cuda.is_available() and config.device != "cpu"
    nproc = high or (torch.cuda.device_count() if on_gpu else 1)
    cluster = local_cluster(nproc, on_gpu=on_gpu, log=log)
    source = TaskSource(path, resolved.arguments, config)
    task, config = with_fullest_batch(task.bind(resolved.arguments), config)
    measurements = open_measurements(source, cluster) if measures else None
    plan = make_plan(task, config, cluster, advises=False, measurements=measurements)
    plan = in_tokens(plan, resolved.config.batch_tokens)
    if plan.chosen is None:
        raise ConfigError(" ".join(plan.words))
    chosen = plan.chosen
    log(f"auto: {chosen.layout.name} of {len(plan.rows) + len(plan.rejected)} layouts on {cluster.describe()}")
    for line in plan.words[: _LINES - 1]:
        log(f"  {line}")
    wanted = {**flags, "strategy": chosen.layout.name, "nproc": str(chosen.layout.num_ranks)}
    if chosen.num_micro_batches > 1:
        wanted["micro_batch"] = micro_batch_of(chosen, resolved.config.batch_tokens)
    if chosen.checkpointing != "none":
        wanted["activation_checkpointing"] = chosen.checkpointing
    if chosen.cp_form != "auto":
        wanted["cp_form"] = chosen.cp_form
    return wanted


def local_cluster(nproc: int, *, on_gpu: bool, log: Callable[[str], None]) -> Cluster:
    """This machine as a cluster: from the record of its GPU or a calibration, which runs now if there is none."""
    found = recorded_cluster(nproc, on_gpu=on_gpu)
    if found is None:
        log(f"auto: measuring this machine once ({HERE_FILE}; `rung calibrate` does it again)")
        calibrate(sorted({1, nproc}), HERE_FILE)
    return found or parse_cluster(f"{nproc}x{HERE}")


def recorded_cluster(nproc: int, *, on_gpu: bool) -> Cluster | None:
    """This machine as a cluster, if its GPU has a record or it was calibrated; else None."""
    known = devices()
    is_measured = all(f"{HERE}-{count}" in known for count in (1, nproc))
    if is_measured and (known[f"{HERE}-1"].kind == "cuda") == on_gpu:
        return parse_cluster(f"{nproc}x{HERE}")
    if on_gpu:
        name = torch.cuda.get_device_name()
        found = next((key for key in sorted(known, key=len, reverse=True) if key.lower() in name.lower()), None)
        return parse_cluster(f"{nproc}x{found}") if found is not None else None
    return None
