"""Every command of the documents is run as it is printed, in the order of its page, in a copy of the project."""

from __future__ import annotations

import time

import pytest

from tests.documents.pages import commands, page_names
from tests.documents.running import EXPECTED, lack_of_this_machine, reason_not_to_run
from tests.documents.shell import HANGS, Shell, copy_project
from tests.marks import slow_if

PAGES = [page for page in page_names() if any(reason_not_to_run(c) is None for c in commands(page))]


@pytest.mark.parametrize("page", [slow_if(page != "docs/tasks.md", page) for page in PAGES])
def test_every_command_of_a_page_works(page, tmp_path):
    copy_project(tmp_path, page)
    failures = []
    with Shell(tmp_path) as shell:
        for command in commands(page):
            reason = reason_not_to_run(command) or lack_of_this_machine(command)
            if reason is not None:
                print(f"{command.place}: not run ({reason}): {command.text}")
                continue
            start = time.monotonic()
            code, said = shell.run(command)
            expected = EXPECTED.get((command.page, command.text), 0)
            verdict = "ok" if code == expected else f"FAILED with {code}"
            print(f"{command.place}: {verdict}, {time.monotonic() - start:.0f} s: {command.text}", flush=True)
            if code == HANGS:
                failures.append(f"{command.place}: {command.text}\n{said[-3000:]}")
                break  # the shell still waits for it
            if code != expected:
                failures.append(
                    f"{command.place}: {command.text}\nended with {code} and not {expected}:\n{said[-3000:]}"
                )
    assert not failures, "\n\n".join(failures)
