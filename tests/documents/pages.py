"""The documents as data: their links, headings and code blocks, and the commands in these. Runs nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent
_PATTERNS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "examples/**/*.md", "benchmarks/*.md")
# A block of code without a language is made of commands if each line begins with one of these.
PROGRAMS = (
    "rung", "make", "python", "pip", "mpirun", "torchrun", "srun", "sbatch", "salloc", "scontrol", "squeue", "scancel",
    "kubectl", "docker", "podman", "source", "until", "bash", "cd", "kill", "sleep", "wait", "tensorboard",
    "pre-commit", "git", "export", "cat", "ls", "ip", "ssh", "mkdir", "head", "tail",
)  # fmt: skip
_SHELLS = ("bash", "sh", "shell", "console")
_DATA = ("toml", "yaml", "json", "ini", "dockerfile", "conf", "html", "diff")
_PIPES = ("|", "&&", "||", ";", "&")


@dataclass(frozen=True)
class Command:
    """One line for a shell, as it is printed, without its comment."""

    page: str
    line: int
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Block:
    """One block of code: `kind` is commands, file (with its `name`), fragment, output, directive, or unknown."""

    page: str
    line: int
    kind: str
    language: str
    text: str
    name: str = ""

    @property
    def commands(self) -> list[Command]:
        if self.kind != "commands":
            return []
        return [Command(self.page, self.line + offset, text) for offset, text in _command_lines(self.text)]


@dataclass(frozen=True)
class Link:
    page: str
    line: int
    target: str


def page_names() -> list[str]:
    """The documents, by their paths below the root of the project."""
    found = [path for pattern in _PATTERNS for path in sorted(ROOT.glob(pattern))]
    return [path.relative_to(ROOT).as_posix() for path in found]


@cache
def blocks(page: str) -> list[Block]:
    """The blocks of code of a page."""
    found = []
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            # A fence's own line is no part of its content.
            first = token.map[0] + (2 if token.type == "fence" else 1) if token.map else 0
            found.append(_block(page, first, token.info.strip(), token.content))
    return found


def commands(page: str) -> list[Command]:
    return [command for block in blocks(page) for command in block.commands]


def inline_code(page: str) -> Iterator[tuple[int, str]]:
    """What stands in backticks within the text, with its line."""
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield (token.map[0] + 1 if token.map else 0), child.content


def links(page: str) -> Iterator[Link]:
    for token in _tokens(page):
        for child in token.children or ():
            target = child.attrs.get("href") or child.attrs.get("src")
            if target:
                yield Link(page, token.map[0] + 1 if token.map else 0, str(target))


def anchors(page: str) -> set[str]:
    """The names by which headings can be linked to, as GitHub and MyST make them."""
    found: set[str] = set()
    tokens = _tokens(page)
    for token, following in pairwise(tokens):
        if token.type == "heading_open":
            words = "".join(c.content for c in following.children or () if c.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", words.strip().lower()).replace(" ", "-")
            number = 0
            while (name := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(name)
    return found


@cache
def _tokens(page: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())


def _block(page: str, line: int, language: str, text: str) -> Block:
    first = text.lstrip().partition("\n")[0]
    if language.startswith("{"):
        return Block(page, line, "directive", language, text)
    if language == "text":
        return Block(page, line, "output", language, text)
    named = re.fullmatch(r"#\s*([\w./-]+\.(?:py|toml|yaml|yml|sh|sbatch|ini))", first)
    if named:
        return Block(page, line, "file", language, text, named.group(1))
    if language == "python" or language in _DATA:
        return Block(page, line, "fragment", language, text)
    if language in _SHELLS or first.startswith("$ ") or (not language and _looks_like_commands(text)):
        return Block(page, line, "commands", language, text)
    return Block(page, line, "unknown", language, text)


def _looks_like_commands(text: str) -> bool:
    lines = [line for _, line in _command_lines(text)]
    return bool(lines) and all(_is_command(line) for line in lines)


def _is_command(line: str) -> bool:
    """Whether it begins, after settings of variables, with a known program or a script of the project."""
    words = [word for word in line.split() if not re.match(r"^[A-Z_]+=", word)]
    return bool(words) and (words[0].rpartition("/")[2] in PROGRAMS or (ROOT / words[0]).is_file())


def _command_lines(text: str) -> Iterator[tuple[int, str]]:
    """Commands with the number of their line: continued lines as one; of a console with prompts, what follows those."""
    has_prompts = text.lstrip().startswith("$ ")
    pending, start = "", 0
    for number, line in enumerate(text.splitlines()):
        stripped = line.strip()
        if not pending:
            if has_prompts and not stripped.startswith("$ "):
                continue
            if not stripped or stripped.startswith("#"):
                continue
            start = number
        pending += stripped.removeprefix("$ ") if has_prompts and not pending else stripped
        if pending.endswith("\\"):
            pending = pending[:-1].rstrip() + " "
            continue
        yield start, _without_comment(pending)
        pending = ""


def _without_comment(line: str) -> str:
    """A shell's comment begins with a # after a space, outside of quotes."""
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place].rstrip()
    return line.rstrip()


def rung_arguments(words: list[str]) -> list[list[str]]:
    """What `rung` is called with in a line, also by mpirun or torchrun; several times where commands are joined."""
    found: list[list[str]] = []
    for part in _parts(words):
        module = next((i for i in range(1, len(part)) if part[i] == "rung" and part[i - 1] == "-m"), None)
        plain = next((i for i, word in enumerate(part) if word == "rung" or word.endswith("/rung")), None)
        place = module if module is not None else plain
        if place is not None:
            found.append(part[place + 1 :])
    return found


def _parts(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in _PIPES or re.match(r"\d?>", word):
            yield part
            part = []
        else:
            part.append(word)
    yield part
