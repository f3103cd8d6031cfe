"""`rung bench collectives`: from flags to a table, a chart and records."""

from __future__ import annotations

from rung.errors import ConfigError
from rung.hardware.bench.options import BenchOptions, parse_dtypes, parse_ops, parse_sizes
from rung.hardware.collective_records import BENCH_FOLDER
from rung.hardware.machines import apply_environment
from rung.launch.signals import leaving_at_once
from rung.system.disk import check_folder, writing


def collectives_command(options: BenchOptions) -> int:
    """Run the command. Returns the exit code: 1 if a result was wrong or a call failed."""
    folder = check_folder(options.out if options.out is not None else BENCH_FOLDER, "--out")
    with leaving_at_once():
        sizes, dtypes, ops = parse_sizes(options.sizes), parse_dtypes(options.dtypes), parse_ops(options.ops)
        if options.seconds <= 0:
            raise ConfigError(f"--seconds {options.seconds:g}: a positive time is needed.")
        options, place = apply_environment(options, ["rung.hardware.bench.collectives"])
        # These load torch, which takes seconds; the fork server, which has just started, loads it at the same time.
        from rung.hardware.bench import sweep
        from rung.hardware.bench.collectives import Case, SweepPlan

        backend, device = sweep.choose_backend_and_device(options, place)
        cases = [Case(op, dtype, size) for op in ops if op != "barrier" for dtype in dtypes for size in sizes]
        cases += [Case("barrier", "", 0)] if "barrier" in ops else []
        plan = SweepPlan(tuple(cases), backend, device, options.reduction, options.seconds)
    if place is not None:
        measured = sweep.run_as_rank(plan, place)
    else:
        nproc = options.nproc or sweep.default_nproc(device)
        is_alone = options.nnodes == 1
        measured = sweep.run_here(plan, nproc) if is_alone else sweep.run_with_machines(plan, nproc, options)
    if measured is None:
        return 0
    with writing(folder, "--out"):
        sweep.finish(measured, options, folder)
    return int(any(record.state in ("wrong", "failed") for record in measured.records))
