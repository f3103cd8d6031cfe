"""The flags of `rung doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from rung.cli.machine_flags import BACKENDS, DEVICES, add_machines, given


def add(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or all machines of a job, before a long run",
        description="Check versions, host names, ports, memory, limits, disk, GPUs and, with real ranks, the "
        "rendezvous, clocks, links and slow ranks, with a verdict and a fix for each. Starts processes on this "
        "machine, or takes part in a job of torchrun, mpirun or srun. Exits with 1 if a check failed.",
    )
    add_machines(doctor)
    doctor.add_argument("--backend", choices=BACKENDS, help="as for rung train")
    doctor.add_argument("--device", choices=DEVICES, help="as for rung train")
    doctor.add_argument("--out", metavar="DIR", help="where runs will be written (default runs)")
    doctor.add_argument("--json", dest="as_json", action="store_true", help="the findings as JSON on standard output")
    doctor.set_defaults(call=_run, starts_ranks=True)


def _run(options: argparse.Namespace) -> int:
    from rung.hardware.doctor.command import doctor_command
    from rung.hardware.doctor.options import DoctorOptions

    return doctor_command(DoctorOptions(**given(options)))
