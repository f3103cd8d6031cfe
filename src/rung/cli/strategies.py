"""The flags of `rung strategies`, which has none, and its list."""

from __future__ import annotations

import argparse
from typing import Any

from rung.spec.presets import PRESETS, SCHEDULES


def add(commands: Any) -> None:
    strategies = commands.add_parser("strategies", help="list the strategies", description="List the strategies.")
    strategies.set_defaults(call=_run, for_main=True)


def _run(options: argparse.Namespace) -> int:
    for name, preset in PRESETS.items():
        print(f"  {name:<8} {preset.summary}")
    print("\nA name may have a size, its number of processes: ddp4, zero1x4, hsdp2x2, tp2, pp4.")
    print("Compositions have at most one of pp, data parallelism and tp: pp2,ddp2  fsdp2,tp2  pp2,fsdp,tp2.")
    print("\nSchedules of a pipeline, as in pp4:zb or --schedule zb:")
    for name, schedule in SCHEDULES.items():
        print(f"  {name:<12} {schedule.summary}")
    return 0
