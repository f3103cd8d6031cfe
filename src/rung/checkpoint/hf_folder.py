"""Folders of Hugging Face: weights beside the model's configuration and its tokenizer, for `from_pretrained`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rung.checkpoint.survey import WEIGHTS as WEIGHTS
from rung.errors import ConfigError
from rung.spec.config import read_toml
from rung.system.stored_weights import local_weights

_CONFIG = "config.json"
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # tokenizers, templates, code of the model
_TYPES = ("dtype", "torch_dtype")  # of the configuration, since transformers 5 and before


def folder_like(given: str | None, run: Path) -> Path:
    """The folder whose files are copied along: `given`, or the one with whose weights the run began."""
    if given is None:
        given = initial_of(run)
        if given is None or not local_weights(given, "--init").is_dir():
            raise ConfigError(
                "--format hf needs the model's config.json, and the run did not begin with a Hugging Face folder "
                "(--init). Name one with --like FOLDER: `model.config.save_pretrained(FOLDER)` writes it."
            )
    folder = local_weights(given, "--like")
    if not (folder / _CONFIG).is_file():
        raise ConfigError(f"{folder} is not a Hugging Face folder: it has no {_CONFIG}.")
    return folder


def initial_of(run: Path) -> str | None:
    """The weights with which a run began (`--init`), if there were any."""
    settings = read_toml(run / "config.toml") if (run / "config.toml").is_file() else {}
    given = settings.get("init")
    return str(given) if given is not None else None


def copy_beside(folder: Path, output: Path, dtype: str) -> list[str]:
    """Copy all but the weights. The configuration names the type of those that lie beside it now."""
    copied = []
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.suffix not in _BESIDE or file.name.endswith(".index.json"):
            continue
        if file.name == _CONFIG:
            content = json.loads(file.read_text())
            content |= {key: dtype for key in _TYPES if key in content}
            (output / file.name).write_text(json.dumps(content, indent=2) + "\n")
        elif file.resolve() != (output / file.name).resolve():
            shutil.copyfile(file, output / file.name)
        copied.append(file.name)
    return copied
