"""Flags of machines and devices, shared by commands that measure. Imports no torch."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rung.errors import ConfigError
from rung.spec.config import SETTINGS
from rung.system.launcher_env import external_rank, ignored_interfaces
from rung.system.network import interface_of
from rung.system.untrusted import printable

BACKENDS, DEVICES = ("auto", "gloo", "nccl", "mpi"), ("auto", "cpu", "cuda")


def add_machines(group: argparse._ActionsContainer) -> None:
    group.add_argument("--nproc", type=int, metavar="N", help="processes here (default: one for each GPU, 2 without)")
    group.add_argument("--nnodes", type=int, metavar="N", help="machines on which this command is started (default 1)")
    group.add_argument("--rdzv", metavar="HOST:PORT", help="where these machines find each other")
    group.add_argument("--rdzv-key", metavar="FILE", help=SETTINGS["rdzv_key"].metadata["help"])


def refuse_external_rank(command: str) -> None:
    """Refuse to run a command that starts processes of its own under mpirun, torchrun or srun."""
    rank = external_rank()
    if rank is not None:
        raise ConfigError(
            f"`rung {command}` starts processes of its own, and {rank.launcher} has started {rank.size} of it. Start "
            f"it once, without {rank.launcher}."
        )


def tell_ignored_interfaces() -> None:
    """Of the environment's interfaces, print those that ranks of this machine alone do not use."""
    ignored = ignored_interfaces(interface_of("127.0.0.1"))
    sys.stderr.write(f"{printable(ignored)}\n" if ignored is not None else "")


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The flags that the user gave; the command's options have defaults for the others."""
    return {key: value for key, value in vars(options).items() if key != "call" and value is not None}
