"""The entry point: parses flags, calls the command, and prints errors in one line. Each command's flags are in the file
of its name."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence

from rung.cli import (
    bench,
    calibrate,
    checkpoints,
    compare,
    doctor,
    explain,
    export,
    new,
    plan,
    profile,
    rdzv,
    report,
    scale,
    strategies,
    submit,
    train,
    verify,
    watch,
)
from rung.cli.machine_flags import tell_ignored_interfaces
from rung.cli.parser import Parser, let_main_report_first
from rung.errors import JobFailed, RungError
from rung.spec.version import VERSION
from rung.system.disk import is_refused, reason
from rung.system.launcher_env import external_rank
from rung.system.untrusted import LAYOUT, printable

# in the order of `rung --help`
_COMMANDS = (
    *(train.add, verify.add, explain.add, scale.add, rdzv.add, checkpoints.add, export.add, watch.add, profile.add),
    *(compare.add, plan.add, bench.add, doctor.add, calibrate.add, report.add, submit.add, new.add, strategies.add),
)


def build_parser() -> Parser:
    parser = Parser(prog="rung", description="Train one plain PyTorch task under every parallel strategy.")
    parser.add_argument("--version", action="version", version=f"rung {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for add in _COMMANDS:
        add(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    # `for_main`: a command of one process. Of several that mpirun started, the first one runs it.
    for_main, starts_ranks = (vars(options).pop(name, False) for name in ("for_main", "starts_ranks"))
    try:
        rank = external_rank()
        if rank is not None and not rank.is_main and for_main:
            return 0
        if starts_ranks and rank is None and getattr(options, "rdzv", None) is None:
            tell_ignored_interfaces()
        return int(options.call(options))
    except JobFailed as error:
        sys.stderr.write(f"{printable(error, keep=LAYOUT)}\n")
        return 2 if error.is_mistake else 1
    except RungError as error:
        let_main_report_first()
        sys.stderr.write(f"rung: {printable(error, keep=LAYOUT)}\n")
        return 2
    except OSError as error:
        let_main_report_first()
        if not is_refused(error):
            raise
        sys.stderr.write(f"rung: the system refuses it: {reason(error)}.\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception:
        let_main_report_first()
        raise


def run() -> int:
    """The command as a process of its own, which ignores Ctrl-C once it has nothing left to do but to exit: torch and
    the fork server take a moment for that, and an impatient second Ctrl-C would end in their tracebacks."""
    try:
        return main()
    except KeyboardInterrupt:  # while an earlier one was answered
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # Python would walk all of torch's objects once more, for half a second


if __name__ == "__main__":
    sys.exit(run())
