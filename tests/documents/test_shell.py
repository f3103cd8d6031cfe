"""The console that runs the documents' commands sees what a reader sees."""

from __future__ import annotations

from tests.documents.pages import Command
from tests.documents.shell import Shell


def _run(shell: Shell, text: str) -> tuple[int, str]:
    return shell.run(Command("page.md", 1, text))


def test_exit_codes_and_output_are_those_of_the_command(tmp_path):
    with Shell(tmp_path) as shell:
        assert _run(shell, "echo hello; false") == (1, "hello")
        assert _run(shell, "true") == (0, "")
        assert _run(shell, "(exit 75)")[0] == 75
        assert _run(shell, "nothing-of-this-name")[0] == 127


def test_commands_share_one_shell(tmp_path):
    with Shell(tmp_path) as shell:
        _run(shell, "mkdir inner")
        _run(shell, "cd inner")
        _run(shell, "export WORD=kept")
        assert _run(shell, "echo $WORD; basename $PWD") == (0, "kept\ninner")
        _run(shell, "sleep 60 &")
        assert _run(shell, "kill -KILL $!")[0] == 0
        assert _run(shell, "wait $!")[0] == 137


def test_placeholders_are_what_ran_before(tmp_path):
    for name, part in (("gpt-ddp-20261115-010203", "profile"), ("gpt-fsdp-20261115-010204", "checkpoints")):
        (tmp_path / "runs" / name / part).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    with Shell(tmp_path) as shell:
        assert _run(shell, "echo TASK runs/gpt-fsdp-...") == (0, "examples/gpt/task.py runs/gpt-fsdp-20261115-010204")
        assert _run(shell, "echo rung profile merge RUN")[1].endswith("runs/gpt-ddp-20261115-010203")
        assert _run(shell, "echo rung export RUN")[1].endswith("runs/gpt-fsdp-20261115-010204")
