"""A command that a program gives with `rung.train` or `rung.compare`, in the process that the program started for it.

It runs as it does on the command line. How it ended goes to the program as JSON through a pipe.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rung.cli.machine_flags import tell_ignored_interfaces
from rung.cli.train import run_train
from rung.errors import EnvironmentProblem, JobFailed, RungError
from rung.spec.config import FLAGS
from rung.system.disk import is_refused, reason
from rung.system.processes import die_with_parent
from rung.system.untrusted import LAYOUT, printable


def run(request: Mapping[str, Any], pipe: int) -> None:
    """Run the command of a request that `rung.program` wrote, and report its end."""
    os.set_inheritable(pipe, False)  # else a process that the task leaves behind would keep it open
    die_with_parent(signal.SIGTERM)  # polite: where it can, the job saves its state
    if os.getppid() != request["caller"]:  # which ended before the call above
        return
    sys.argv = ["rung", *_words(request)]  # the page of `rung compare` shows the command
    settings = request["settings"]
    flags = {key: value for key, value in settings.items() if key in FLAGS}
    assignments = {key: value for key, value in settings.items() if key not in FLAGS}
    try:
        end = _COMMANDS[request["command"]](request["task"], flags, assignments, request["options"])
    except RungError as error:
        end = _describe(error)
    except OSError as error:
        if not is_refused(error):
            raise
        end = _describe(EnvironmentProblem(f"the system refuses it: {reason(error)}."))
    except KeyboardInterrupt:
        end = {"exit_code": 130}
    with os.fdopen(pipe, "w") as file:
        json.dump(end, file)


def _train(
    task: str, flags: dict[str, Any], assignments: dict[str, Any], options: dict[str, Any]
) -> dict[str, str | int]:
    end = run_train(task, flags, assignments, **options)
    return {"exit_code": end.exit_code, "folder": str(end.folder.resolve())}


def _compare(
    task: str, flags: dict[str, Any], assignments: dict[str, Any], options: dict[str, Any]
) -> dict[str, str | int]:
    from rung.compare.command import compare_command
    from rung.compare.options import CompareOptions

    tell_ignored_interfaces()
    if "strategies" in options:
        options["strategies"] = tuple(options["strategies"])
    whole = CompareOptions(task, flags=flags, assignments=assignments, **options)
    document, folder = compare_command(whole)
    if not any(row["status"] == "ok" for row in document["rows"]):
        reasons = "\n".join(f"  {row['strategy']}: {row['reason']}" for row in document["rows"])
        raise JobFailed(f"None of the strategies could be run ({folder}):\n{reasons}")
    return {"exit_code": 0, "folder": str(folder.resolve()), "page": str(Path(whole.out).resolve())}


_COMMANDS: dict[str, Callable[..., dict[str, str | int]]] = {"train": _train, "compare": _compare}


def _describe(error: RungError) -> dict[str, str | int]:
    is_mistake = isinstance(error, JobFailed) and error.is_mistake
    text = printable(error, keep=LAYOUT)
    return {"error": type(error).__name__, "message": text, "is_mistake": is_mistake}


def _words(request: Mapping[str, Any]) -> list[str]:
    """The words that give the same command in a shell."""
    words = [request["command"], request["task"]]
    for key, value in request["options"].items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{key.removesuffix('_file')}", *map(str, values)]
    for key, value in request["settings"].items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return words
