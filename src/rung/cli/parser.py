"""argparse with suggestions for misspelt flags and commands, and help that fits a screen."""

from __future__ import annotations

import argparse
import difflib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from rung.errors import RungError
from rung.spec.config import FLAGS, SETTINGS
from rung.system.launcher_env import external_rank

_MAIN_SECONDS = 20.0  # for rank 0 to report; on a busy machine it may start late


class Parser(argparse.ArgumentParser):
    """A command, or `rung` itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else list(args)
        options, unknown = self.parse_known_args(words, namespace)
        if unknown:
            command = self._command_of(words)
            command.error(self._describe_unknown(unknown[0].partition("=")[0], command))
        return options

    def error(self, message: str) -> NoReturn:
        let_main_report_first()
        sys.stderr.write(f"rung: {message}\n{self.prog} --help lists all arguments.\n")
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse has no public hook for an invalid choice, and its own message has no suggestion.
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            self.error(f"{value!r} is not one of {', '.join(choices)}.{_suggest(value, choices, cutoff=0.5)}")

    def _command_of(self, words: Iterable[str]) -> Parser:
        """The parser of the command that the words name."""
        parser = self
        for word in words:
            if word not in (commands := parser._commands()):
                break
            parser = commands[word]
        return parser

    def _describe_unknown(self, word: str, command: Parser) -> str:
        """The message for an unknown flag of `command`, with the most likely correction."""
        known, own = [flag for parser in self._all_parsers() for flag in parser._flags()], command._flags()
        setting = word.lstrip("-").replace("-", "_")
        if word in known and (owners := self._owners(word)):
            hint = _suggest(word, own, cutoff=0.85) or f" It is a flag of {', '.join(owners)}."
        elif setting in SETTINGS and setting not in FLAGS:
            hint = f" It is a setting without a flag: --set {setting}=VALUE."
        else:
            hint = _suggest(word, own, cutoff=0.5) or _suggest(word, known, cutoff=0.5)
        return f"there is no argument {word!r}{' here' * (word in known)}.{hint}"

    def _commands(self) -> dict[str, Parser]:
        found = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return {name: parser for action in found for name, parser in action.choices.items()}

    def _all_parsers(self) -> list[Parser]:
        return [self, *(parser for command in self._commands().values() for parser in command._all_parsers())]

    def _flags(self) -> list[str]:
        return [option for action in self._actions for option in action.option_strings]

    def _owners(self, word: str) -> list[str]:
        """The commands that have a flag, without `rung submit` for the flags it shares with `rung train`."""
        owners = [name for parser in self._commands().values() for name in parser._owners(word)]
        if not owners and word in self._flags():
            return [self.prog]
        is_trained = "rung train" in owners
        return [name for name in dict.fromkeys(owners) if not (is_trained and name.startswith("rung submit"))]


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=119)


def _suggest(word: str, known: Iterable[str], *, cutoff: float) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {match[0]!r}?" if match else ""


def let_main_report_first() -> None:
    """Delay the error of an external rank other than 0, so that an error of all ranks is printed once.

    mpirun and torchrun end the other ranks when rank 0 exits. A rank that fails alone prints its error after the delay.
    """
    try:
        rank = external_rank()
    except RungError:  # the environment itself is the error to report
        return
    if rank is not None and not rank.is_main:
        time.sleep(_MAIN_SECONDS)
