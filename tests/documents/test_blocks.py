"""Every block of code in the documents is known, and every command in them is one that the real parser takes."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

import rung
from rung.cli.main import build_parser
from rung.errors import RungError
from rung.spec.compatibility import validate_config
from rung.spec.config import FLAGS, SETTINGS, resolve
from rung.spec.flags import assignments_of
from rung.spec.strategy import default_name, parse, required_num_ranks
from rung.spec.task import load_task
from tests.documents.pages import (
    ROOT,
    Block,
    Command,
    _block,
    blocks,
    commands,
    inline_code,
    page_names,
    rung_arguments,
)
from tests.documents.running import EXCEPTED, EXPECTED, HELD_TASKS, fill_in, reason_not_to_run

COMMANDS = [command for page in page_names() for command in commands(page)]
RUNG = [(c, arguments) for c in COMMANDS for arguments in rung_arguments(c.words)]


def _parsed(arguments: list[str]) -> argparse.Namespace:
    try:
        return build_parser().parse_args(arguments)
    except SystemExit as error:
        if error.code:
            raise AssertionError("the parser refuses it") from None
        return argparse.Namespace()


def test_there_are_commands_in_the_documents():
    assert len(RUNG) > 60


@pytest.mark.parametrize("page", page_names())
def test_every_block_of_code_is_known(page):
    for block in blocks(page):
        assert block.kind != "unknown", (
            f"{page}:{block.line} is neither commands nor marked as something else. Output and drawings are ```text, "
            "shell is ```bash; other programs are added to PROGRAMS in tests/documents/pages.py."
        )
        assert block.kind != "commands" or block.commands, f"{page}:{block.line} has no command"


def test_a_block_that_nobody_knows_is_seen():
    assert _block("page.md", 1, "", "frobnicate --hard\n").kind == "unknown"
    assert _block("page.md", 1, "", "rung strategies\nfrobnicate --hard\n").kind == "unknown"
    assert _block("page.md", 1, "", "rung strategies\n").kind == "commands"
    assert _block("page.md", 1, "text", "frobnicate --hard\n").kind == "output"


def test_prompts_continuations_and_comments_are_understood():
    text = '$ rung train "a #1.py" \\\n    --nproc 2   # two\nsome output\n$ rung strategies\n'
    block = Block("page.md", 10, "commands", "", text)
    assert [(c.line, c.text) for c in block.commands] == [
        (10, 'rung train "a #1.py" --nproc 2'),
        (13, "rung strategies"),
    ]
    words = ["mpirun", "-n", "2", "rung", "train", "a.py", "&&", "torchrun", "-m", "rung", "doctor"]
    assert rung_arguments(words) == [["train", "a.py"], ["doctor"]]


def test_the_page_of_settings_has_those_of_the_code(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    reference = importlib.import_module("reference")
    page = (ROOT / "docs" / "settings.md").read_text()
    assert reference.settings_table(has_flag=False) in page, "run: python docs/reference.py"
    assert reference.with_settings_table(page) == page
    assert reference.with_settings_table(page.replace("| `fused` |", "| `fussed` |")) == page


def test_the_reference_has_every_command_flag_and_setting(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    reference = importlib.import_module("reference")
    listed = reference.commands()
    settings = reference.flag_settings() + reference.settings_table(has_flag=False)
    for name in ("train", "verify", "profile merge", "bench collectives", "new"):
        assert f"## rung {name}\n" in listed
    for flag in FLAGS:
        assert f"`--{flag.replace('_', '-')}" in listed
    assert all(f"| `{name}` |" in settings or f"`--{name.replace('_', '-')}`" in settings for name in SETTINGS)


def test_the_python_reference_has_every_public_name_and_error():
    told = (ROOT / "docs" / "api.md").read_text()
    for name in rung.__all__:
        assert name == "__version__" or f":: rung.{name}" in told, name
    for error in RungError.__subclasses__():
        if error.__module__ == "rung.errors":
            assert f":: rung.errors.{error.__name__}\n" in told, error


@pytest.mark.parametrize("page", page_names())
def test_python_toml_and_json_can_be_read(page):
    for block in blocks(page):
        try:
            if block.language == "python":
                ast.parse(block.text)
            elif block.language == "toml":
                tomllib.loads(block.text)
            elif block.language == "json":
                json.loads(block.text)
        except (SyntaxError, ValueError) as error:
            pytest.fail(f"{page}:{block.line}: {error}")


@pytest.mark.parametrize(("command", "arguments"), RUNG, ids=lambda v: v.place if isinstance(v, Command) else "")
def test_every_rung_command_parses_and_its_settings_hold(command, arguments, tmp_path):
    options = _parsed(arguments)
    if "task" not in vars(options) or "--help" in arguments:
        return
    task = ROOT / fill_in(options.task, command.page)
    if options.task not in HELD_TASKS:
        assert (task / "task.py" if task.is_dir() else task).is_file(), f"{command.place}: there is no {task}"
    if (command.page, command.text) in EXPECTED or "huggingface" in options.task:
        return  # it is to fail; or takes seconds to import and is left to test_running.py
    _check_settings(command, options, task if task.exists() else _held(options.task, tmp_path))


def _held(name: str, folder) -> object:
    """A task that a page itself has, with the files beside it, or that stands for the reader's own."""
    for other, text in HELD_TASKS.items():
        if Path(other).parent == Path(name).parent:
            (folder / Path(other).name).write_text(text)
    return folder / Path(name).name


def _check_settings(command: Command, options: argparse.Namespace, task) -> None:
    given = {name: getattr(options, name) for name in FLAGS if getattr(options, name, None) is not None}
    if given.get("strategy") == "auto":
        del given["strategy"]
    if given.get("rdzv") == "HOST:PORT":
        del given["rdzv"]
    try:
        config = resolve(load_task(task), flags=given, assignments=assignments_of(getattr(options, "set", []))).config
        per_host = int(str(config.nproc or _ranks_outside(command) or 0).rpartition(":")[2])
        num_ranks = per_host * int(str(config.nnodes).partition(":")[0])
        name = config.strategy or default_name(max(num_ranks, 1))
        layout = parse(
            name, num_ranks or required_num_ranks(name) or 8, schedule=config.schedule, servers=config.servers
        )
        validate_config(config, layout)
    except RungError as error:
        pytest.fail(f"{command.place}: {command.text}\n{error}")


def _ranks_outside(command: Command) -> str | None:
    """How many processes mpirun or torchrun is told to start."""
    found = re.search(r"(?:mpirun -n|--nproc-per-node|srun -n)[ =]?(\d+)", command.text)
    return found.group(1) if found else None


def test_names_of_commands_and_flags_within_the_text_exist():
    parser = build_parser()
    wrong = []
    for page in page_names():
        if page == "CHANGELOG.md":
            continue  # tells of what was, too
        for line, code in inline_code(page):
            words = code.split()
            if len(words) < 2 or words[0] != "rung" or not words[1].islower():
                continue
            inner = _subparser(parser, words[1:])
            if inner is None:
                wrong.append(f"{page}:{line}: there is no command in `{code}`")
                continue
            known = {option for action in inner._actions for option in action.option_strings}
            flags = re.findall(r"(?<!\S)(--[a-z][\w-]*)", code)
            wrong += [f"{page}:{line}: `{code}`: {flag} is no flag of it" for flag in flags if flag not in known]
    assert not wrong, "\n".join(wrong)


def _subparser(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser | None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words[:1] != ["--help"]:
            word = words[0] if words else ""
            if word not in action.choices:
                return parser if word in ("WHAT", "COMMAND") or not words else None
            return _subparser(action.choices[word], words[1:])
    return parser


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.words[0] == "make"], ids=lambda c: c.place)
def test_what_make_is_asked_for_is_in_the_makefile(command):
    targets = re.findall(r"^([\w-]+(?: [\w-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    known = {name for line in targets for name in line.split()}
    asked = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    assert set(asked) <= known, f"{command.place}: {set(asked) - known}"


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-m" in c.words], ids=lambda c: c.place)
def test_what_python_is_asked_to_run_is_a_module(command):
    name = command.words[command.words.index("-m") + 1]
    assert importlib.util.find_spec(name) is not None, f"{command.place}: there is no module {name}"


@pytest.mark.parametrize("pattern", EXCEPTED, ids=str)
def test_no_exception_is_kept_that_no_command_needs(pattern):
    assert any(re.search(pattern, c.text) for c in COMMANDS), f"no command matches {pattern!r} any more: remove it"


@pytest.mark.parametrize("key", EXPECTED, ids=" ".join)
def test_no_exit_code_is_expected_of_a_command_that_is_gone(key):
    assert key in {(c.page, c.text) for c in COMMANDS}


def test_every_command_is_run_or_has_a_reason():
    """How many there are is printed with `pytest -s`; tests/documents/test_running.py runs them."""
    reasons = [reason_not_to_run(c) for c in COMMANDS]
    print(f"{len(COMMANDS)} commands, {sum(r is None for r in reasons)} are run")
    assert sum(r is None for r in reasons) > len(reasons) / 2
