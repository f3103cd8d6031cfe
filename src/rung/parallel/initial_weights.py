"""Weights to begin with, from files that others wrote: safetensors, a Hugging Face folder, or torch's own format.

A tensor is read when it is asked for, so that no rank holds the whole model.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rung.errors import ConfigError
from rung.parallel.adapters import adapted_layers, base_name, magnitude_of

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_FILES = ("model.safetensors", "pytorch_model.bin")
_WRAPPED = ("model", "state_dict", "model_state_dict")  # keys under which scripts save a model beside other things
_WRAPPERS = ("module.", "_orig_mod.")  # which DDP and torch.compile put before every name
_MOST_NAMED = 6  # tensors in a message


class InitialWeights:
    """The tensors of a file or folder, or of a state dict, under the names of a model."""

    def __init__(self, source: str | Path | Mapping[str, Tensor]) -> None:
        self.where = "initial_weights()" if isinstance(source, Mapping) else f"--init {source}"
        self._readers: dict[str, Callable[[], Tensor]] = {}  # by the names of the files
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, str] = {}  # of numbers
        self._names: dict[str, str] = {}  # of the model -> of the files
        self.notes: list[str] = []
        if isinstance(source, Mapping):
            self._add_state(source)
        else:
            for file in _files_of(Path(source)):
                self._add_file(file)

    @property
    def names(self) -> list[str]:
        """The model's tensors that are in it."""
        return list(self._names)

    def read(self, name: str) -> Tensor:
        """The tensor of this name of the model."""
        return self._readers[self._names[name]]()

    def match(self, model: nn.Module, *, is_partial: bool) -> None:
        """Find the tensors of a model by their names. Raises `ConfigError` if some are missing, or fit nothing.

        With `is_partial`, what is missing or has another shape stays as the task makes it, and a note says so.
        """
        kept = set(model.state_dict())
        layers = adapted_layers(model)
        names: dict[str, tuple[list[str], Tensor]] = {}
        for name, (aliases, tensor) in _names_of(model).items():
            plain = [alias for alias in (base_name(alias, layers) for alias in aliases) if alias is not None]
            if plain and kept & set(aliases):
                names[name] = plain, tensor
        # Buffers that are not saved may be in an old file.
        every = {base_name(name, layers) for name, _ in _all_tensors(model)} - {None}
        self.match_tensors(names, every, is_partial=is_partial)
        for name, layer in layers.items():
            if (magnitude := magnitude_of(layer)) is not None and f"{name}.base_layer.weight" in self._names:
                raise ConfigError(
                    f"{self.where}: {name}.{magnitude} begins with the lengths of the rows of the base, which peft "
                    "computes where the model is made. Load the base in model(), as from_pretrained does, and leave "
                    "this out."
                )

    def match_tensors(
        self, names: Mapping[str, tuple[list[str], Tensor]], every: Set[str | None], *, is_partial: bool
    ) -> None:
        """The same for tensors by name, each with its names in files, where `every` name is known."""
        found = self._without_prefix(names)
        untied = []
        for name, (aliases, _) in names.items():
            keys = [found[alias] for alias in aliases if alias in found]
            if keys:
                self._names[name] = keys[0]
            if any(not torch.equal(self._readers[keys[0]](), self._readers[key]()) for key in keys[1:]):
                untied.append(" and ".join(alias for alias in aliases if alias in found))
        shapes = {name: tuple(tensor.shape) for name, (_, tensor) in names.items()}
        differ = [name for name, key in self._names.items() if self._shapes[key] != shapes[name]]
        kinds = {name: _kind(tensor.dtype) for name, (_, tensor) in names.items()}
        others = [name for name, key in self._names.items() if self._kinds[key] != kinds[name]]
        missing = [name for name in names if name not in self._names]
        unknown = [name for name in found if name not in every]
        problems = []
        if missing:
            problems.append(f"it lacks {_list(missing, shapes, unknown)}")
        if untied:
            problems.append(f"the model has one weight for {_some(untied)}, which differ there")
        if others:
            said = [f"{name} ({self._kinds[self._names[name]]} numbers there, not {kinds[name]})" for name in others]
            problems.append(f"other types: {_some(said)}")
        if differ:
            said = [
                f"{name} ({_shape(self._shapes[self._names[name]])} there, not {_shape(shapes[name])})"
                for name in differ
            ]
            problems.append(f"other shapes: {_some(said)}")
        if unknown:
            theirs = {name: self._shapes[found[name]] for name in unknown}
            problems.append(f"the model has no {_list(unknown, theirs, missing)}")
        if problems and not is_partial:
            raise ConfigError(
                f"{self.where} does not fit the model: {'; '.join(problems)}. "
                "--init-partial takes what fits, and leaves the rest as the task makes it."
            )
        for name in {*differ, *others}:
            del self._names[name]
        if not self._names:
            raise ConfigError(f"{self.where}: no tensor fits the model: {'; '.join(problems)}.")
        self.notes.append(f"{len(self._names)} of {len(names)} tensors begin as in {self.where}")
        self.notes += [f"{self.where}: {problem}" for problem in problems]

    def _without_prefix(self, names: Mapping[str, Any]) -> dict[str, str]:
        """The files' names as the model has them, by the prefix that makes the most of them fit; a note says which."""
        every = {alias for aliases, _ in names.values() for alias in aliases}
        plain = {key: key for key in self._readers}
        while plain and (
            wrapper := next((one for one in _WRAPPERS if all(name.startswith(one) for name in plain)), "")
        ):
            plain = {name.removeprefix(wrapper): key for name, key in plain.items()}
            self.notes.append(f"{self.where}: all names there begin with {wrapper!r}")
        candidates: list[tuple[str, dict[str, str]]] = [("", plain)]
        for prefix in sorted({f"{name.split('.')[0]}." for name in plain if "." in name}):
            cut = {name.removeprefix(prefix): key for name, key in plain.items()}
            if len(cut) == len(plain):  # else two tensors would have one name
                candidates.append((f"their names there begin with {prefix!r}", cut))
        for prefix in sorted({f"{name.split('.')[0]}." for name in every if "." in name}):
            longer = {f"{prefix}{name}": key for name, key in plain.items()}
            candidates.append((f"their names in the model begin with {prefix!r}", longer))
        counts = [sum(name in every for name in found) for _, found in candidates]
        # Where two prefixes fit alike, as for a file of one of two alike parts, none is taken.
        said, best = candidates[counts.index(max(counts))] if counts.count(max(counts)) == 1 else candidates[0]
        if said:
            self.notes.append(f"{self.where}: {said}")
        return best

    def _add_file(self, file: Path) -> None:
        if file.suffix == ".safetensors":
            opened = _opened(file)
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                self._shapes[name] = tuple(part.get_shape())
                letters = part.get_dtype().rstrip("0123456789_EMN")  # F, BF, C, I, U, BOOL
                self._kinds[name] = {"F": "floating", "BF": "floating", "C": "complex"}.get(letters, "whole")
                self._readers[name] = partial(opened.get_tensor, name)
            return
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch's format before 1.6 cannot be mapped
            state = _loaded(file)
        except Exception as error:
            raise ConfigError(f"--init {file} cannot be read: {error}") from None
        for key in _WRAPPED:
            if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
                state = state[key]
                self.notes.append(f"--init {file}: its entry {key!r}")
                break
        if not isinstance(state, Mapping):
            raise ConfigError(f"--init {file} holds {type(state).__name__}, not the state dict of a model.")
        self._add_state(state)

    def _add_state(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, Tensor):
                self._shapes[name], self._kinds[name] = tuple(value.shape), _kind(value.dtype)
                self._readers[name] = value.detach


def _names_of(model: nn.Module) -> dict[str, tuple[list[str], Tensor]]:
    """Each tensor of a model by its first name, with all of its names: tied weights have several."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in _all_tensors(model):
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return {aliases[0]: (aliases, tensor) for aliases, tensor in found.values()}


def _all_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _kind(dtype: torch.dtype) -> str:
    return "complex" if dtype.is_complex else "floating" if dtype.is_floating_point else "whole"


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        inside = [path / name for name in (*_INDICES, *_FILES) if (path / name).is_file()]
        if not inside:
            known = sorted(file for end in ("safetensors", "pt", "pth", "bin") for file in path.glob(f"*.{end}"))
            hint = f" It has {_some([file.name for file in known])}: name one." if known else ""
            raise ConfigError(
                f"--init {path}: there is no {' and no '.join((*_FILES, *_INDICES))} in this folder.{hint}"
            )
        path = inside[0]
    if not path.is_file():
        raise ConfigError(f"--init {path}: there is no such file or folder.")
    if path.suffix == ".json":
        try:
            files = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--init {path} is no index of files: {type(error).__name__}: {error}.") from None
        missing = [file for file in files if not (path.parent / Path(file).name).is_file()]
        if missing:
            raise ConfigError(f"--init {path}: the index names files that are not beside it: {_some(missing)}.")
        return [path.parent / Path(file).name for file in files]
    if path.suffix not in (".safetensors", ".pt", ".pth", ".bin"):
        raise ConfigError(f"--init {path}: weights are in a .safetensors, .pt, .pth or .bin file, or in a folder.")
    return [path]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--init {file} cannot be read: {error}") from None


def _loaded(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"--init {file} cannot be read: {error}") from None


def _list(names: list[str], shapes: Mapping[str, tuple[int, ...]], others: list[str]) -> str:
    """Names with their shapes, and each with the nearest one on the other side."""
    said = []
    for name in names[:_MOST_NAMED]:
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
        there = f", nearest {near[0]}" if near else ""
        said.append(f"{name} ({_shape(shapes[name])}{there})")
    return _some(said, len(names))


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _some(said: list[str], count: int | None = None) -> str:
    left = (count if count is not None else len(said)) - min(len(said), _MOST_NAMED)
    return ", ".join(said[:_MOST_NAMED]) + (f" and {left} more" if left else "")
