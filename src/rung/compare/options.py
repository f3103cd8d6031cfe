"""The options of `rung compare`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rung.errors import ConfigError
from rung.spec.presets import tried
from rung.system.disk import check_file

DEFAULT_STRATEGIES = ("single", *tried("alone"))


@dataclass(frozen=True)
class CompareOptions:
    """The flags of `rung compare`."""

    task: str
    strategies: tuple[str, ...] = DEFAULT_STRATEGIES
    flags: Mapping[str, Any] = field(default_factory=dict)
    assignments: Mapping[str, str] = field(default_factory=dict)
    config_file: str | None = None
    repeats: int = 2
    warmup: int | None = None
    out: str = "compare.html"
    json_file: str | None = None
    markdown: str | None = None
    predicts: bool = True


def check_options(options: CompareOptions) -> None:
    if options.repeats < 1:
        raise ConfigError(f"--repeats {options.repeats}: each strategy must run at least once.")
    files = (
        ("--out", options.out, ".html"),
        ("--json", options.json_file, ".json"),
        ("--markdown", options.markdown, ".md"),
    )
    for flag, name, ending in files:
        if name is None:
            continue
        if Path(name).suffix != ending:
            raise ConfigError(f"{flag} {name}: the name must end in {ending}.")
        if not Path(name).resolve().parent.is_dir():
            raise ConfigError(f"{flag} {name}: there is no directory {Path(name).parent}.")
        check_file(name, flag)  # before anything is measured
