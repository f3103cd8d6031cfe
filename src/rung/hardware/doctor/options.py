"""The options of `rung doctor`."""

from __future__ import annotations

from dataclasses import dataclass

from rung.hardware.machines import MachineOptions


@dataclass(frozen=True)
class DoctorOptions(MachineOptions):
    """The flags of `rung doctor`."""

    out: str = "runs"
    as_json: bool = False
