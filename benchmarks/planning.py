"""How long a plan takes: a Llama of 8 billion parameters on 1,024 GPUs, over all layouts that are sensible there."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from rung.hardware.cluster import parse_cluster
from rung.planner.candidates import layouts_for
from rung.planner.parallel_search import TaskSource
from rung.planner.plan import make_plan
from rung.planner.truncated_model import count_blocks
from rung.spec.config import RunConfig
from rung.spec.task import load_task

_TASK = "benchmarks/tasks/llama.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="128 nodes x 8 H100")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    task, cluster = load_task(_TASK), parse_cluster(options.cluster)
    started = time.perf_counter()
    config = RunConfig(batch_size=options.batch_size, precision="bf16", clip=1.0)
    source = TaskSource(_TASK, {})

    def progress(text: str) -> None:
        print(f"{time.perf_counter() - started:7.1f} {text}", flush=True)

    plan = make_plan(task, config, cluster, source=source, progress=progress)
    found = {
        "command": f"python -m benchmarks.planning {' '.join(sys.argv[1:])}",
        "cluster": cluster.describe(),
        "layouts": len(list(layouts_for(cluster, count_blocks(task), 32))),
        "looked_at": len({row.layout.name for row in plan.rows}),
        "seconds": time.perf_counter() - started,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "recommendation": plan.words,
        "rejected": {one.layout.name: one.reason for one in plan.rejected},
        "rows": {f"{row.layout.name} {row.checkpointing}": row.time.seconds for row in plan.rows},
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key not in ("rejected", "rows")}, indent=1))


if __name__ == "__main__":
    main()
