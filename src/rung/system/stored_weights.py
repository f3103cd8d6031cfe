"""Weights that are in a store, as files on this disk: fetched once, and again when they change there."""

from __future__ import annotations

import json
from pathlib import Path

from rung.errors import ConfigError
from rung.system.store import Store, check_address, is_store, local_folder
from rung.system.untrusted import read_json

_WEIGHTS = ".safetensors"  # the other formats are pickles, and nothing from a store is unpickled
_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # configuration and tokenizer
_VERSIONS = ".versions"
_MAX_VERSIONS = 2**26


def local_weights(path: str, flag: str) -> Path:
    """The file or folder of weights at a path: itself, or for an address in a store the copy of it on this disk."""
    if not is_store(path):
        return Path(path)
    url = check_address(path, flag)
    folder = local_folder(url, "weights")
    above, _, last = url.rpartition("/")
    store, names = Store(url), [last]
    is_file = "." in last and not (inside := store.sizes())
    if is_file:
        store = Store(above)
    else:
        inside = store.sizes()
        names = [name for name in inside if "/" not in name and Path(name).suffix in (_WEIGHTS, *_BESIDE)]
    if not any(name.endswith(_WEIGHTS) for name in names):
        raise ConfigError(
            f"{flag} {url}: there are no weights in .safetensors files, which are the only ones that Rung takes from a "
            "store. Other formats are pickles: fetch such a file yourself if you trust it, and name it by its path."
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        known = read_json(folder / _VERSIONS, _MAX_VERSIONS)
    except (OSError, ValueError):
        known = {}
    (folder / _VERSIONS).unlink(missing_ok=True)
    versions = {}
    for name in names:
        try:
            versions[name] = store.version(name)
            if known.get(name) != versions[name] or not (folder / name).is_file():
                store.get_file(name, folder / name)
        except FileNotFoundError:
            raise ConfigError(f"{flag} {url}: there is no such file or folder in the store.") from None
    for old in folder.iterdir():
        if old.is_file() and old.name not in versions:
            old.unlink()
    (folder / _VERSIONS).write_text(json.dumps(versions))
    return folder / last if is_file else folder
