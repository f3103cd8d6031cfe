"""Export of adapters: added to the weights that they were trained beside, or as a folder of peft."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.export import WeightSource
from rung.checkpoint.files import DTYPES, Entry
from rung.errors import CheckpointError, ConfigError
from rung.parallel.adapters import PEFT_PREFIX, base_name, digest_of, is_copy
from rung.parallel.initial_weights import InitialWeights

log = logging.getLogger("rung")

ADAPTERS = "adapter_model.safetensors"  # peft's names
_CONFIG = "adapter_config.json"


def merged(source: WeightSource, base: str | None) -> WeightSource:
    """The weights of the model without adapters, which are added to them. `base` is a file or folder."""
    layers = _layers_of(source)
    if not layers:
        raise ConfigError(f"these adapters cannot be added to the weights: {_described(source)['special']}.")
    entries = {entry.key: entry for entry in source.entries}
    read_base = _reader_of_base(source, base, layers)
    for key, saved in source.base.items():
        entries[key] = Entry(key, DTYPES[saved["dtype"]], tuple(saved["shape"]))
    added = {f"{name}.base_layer.weight": layer for name, layer in layers.items()}
    # The copy of a module that was trained takes the place of the module.
    named = {base_name(key, layers): key for key in sorted(entries, key=is_copy)}
    found: dict[str, Entry] = {}
    for name, key in named.items():
        if name is not None:
            # A base in bf16 would round away most of what was learnt.
            dtype = torch.promote_types(entries[key].dtype, entries[added[key]["A"]].dtype) if key in added else None
            found[name] = Entry(name, dtype or entries[key].dtype, entries[key].shape)

    _warn_of_untied(source, named, set(added))

    def read(name: str) -> Tensor:
        key = named[name]
        value = read_base(key) if key in source.base else source.read(key)
        if (layer := added.get(key)) is None:
            return value
        product = source.read(layer["B"]).double() @ source.read(layer["A"]).double()
        change = (product.T if layer["is_turned"] else product) * layer["scale"]
        added_up: Tensor = value.double() + change
        if "magnitude" in layer:  # DoRA: each row gets a length of its own
            lengths = torch.linalg.vector_norm(added_up, dim=0 if layer["is_turned"] else 1)
            factors = source.read(layer["magnitude"]).double() / lengths
            added_up = added_up * (factors if layer["is_turned"] else factors[:, None])
        return added_up.to(found[name].dtype)

    return replace(
        source,
        label=f"{source.label}, adapters merged",
        entries=list(found.values()),
        read=read,
        same={name: source.same.get(key, key) for name, key in named.items() if name is not None and key not in added},
        adapters=None,
        base={},
    )


def _warn_of_untied(source: WeightSource, named: Mapping[str | None, str], added: set[str]) -> None:
    """A weight that is tied to another and has an adapter is another one afterwards."""
    for name, key in named.items():
        same = source.same.get(key, key)
        others = [other for other, its in named.items() if other and its != key and source.same.get(its, its) == same]
        if key in added and others:
            log.warning(
                "%s was tied to %s and is a weight of its own now that its adapter is added. A model that ties them "
                "would take one for both: untie them before it loads these weights (tie_word_embeddings in "
                "config.json, for transformers).",
                name,
                ", ".join(others),
            )


def as_peft(source: WeightSource) -> WeightSource:
    """The adapters alone, under the names that peft's files have."""
    layers = _layers_of(source)
    if not layers:
        raise ConfigError(f"Rung cannot write these adapters as peft does: {_described(source)['special']}.")
    own = {layer[key]: (name, key) for name, layer in layers.items() for key in ("A", "B")}
    names: dict[str, str] = {}
    for key, (name, which) in own.items():
        names[f"{PEFT_PREFIX}{name.removeprefix(PEFT_PREFIX)}.lora_{which}.weight"] = key
    for name, layer in layers.items():
        if "magnitude" in layer:
            names[f"{PEFT_PREFIX}{name.removeprefix(PEFT_PREFIX)}.lora_magnitude_vector"] = layer["magnitude"]
    for entry in source.entries:
        if is_copy(entry.key):
            names[f"{PEFT_PREFIX}{base_name(entry.key, layers)}"] = entry.key
    entries = {entry.key: entry for entry in source.entries}
    return replace(
        source,
        label=f"the adapters in {source.label}",
        entries=[Entry(name, entries[key].dtype, entries[key].shape) for name, key in names.items()],
        read=lambda name: source.read(names[name]),
        same={},
    )


def write_peft_config(source: WeightSource, folder: Path, base: str | None) -> None:
    """Write the settings beside the adapters: what `PeftModel.from_pretrained` reads."""
    config = dict(_described(source)["config"])
    targets = config.get("target_modules")
    if isinstance(targets, list):
        config["target_modules"] = [name.removeprefix(PEFT_PREFIX) for name in targets]
    config["inference_mode"] = True
    if config.get("base_model_name_or_path") is None:
        config["base_model_name_or_path"] = base
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _described(source: WeightSource) -> Mapping[str, Any]:
    if source.adapters is None:
        raise ConfigError("the run has no adapters: it was trained without --lora, and not with a model of peft's.")
    return source.adapters


def _layers_of(source: WeightSource) -> dict[str, Any]:
    layers: dict[str, Any] = _described(source)["layers"]
    return layers


def _reader_of_base(source: WeightSource, base: str | None, layers: Mapping[str, Any]) -> Callable[[str], Tensor]:
    """Reads a tensor of the base, and refuses one that has other values than the run's had."""
    if not source.base:
        return source.read
    if base is None:
        raise ConfigError(
            f"{source.label} has the adapters alone, and the run did not begin with weights of a file (--init). Name "
            "what they were trained beside with --base PATH, or export the end of the run, which has all weights."
        )
    names: dict[str, tuple[list[str], Tensor]] = {}
    for key, saved in source.base.items():
        tied = [other for other in source.base if source.same.get(other) == source.same.get(key)]
        aliases = [name for name in (base_name(one, dict(layers)) for one in tied) if name is not None]
        # The end of a run has them under their own names.
        names[key] = [*aliases, *tied], torch.empty(saved["shape"], dtype=DTYPES[saved["dtype"]], device="meta")
    given = InitialWeights(base)
    given.match_tensors(names, {name for aliases, _ in names.values() for name in aliases}, is_partial=True)
    if missing := [key for key in names if key not in given.names]:
        raise ConfigError(f"{base} lacks {', '.join(missing[:3])}, which the adapters were trained beside.")

    def read(key: str) -> Tensor:
        value = given.read(key).to(names[key][1].dtype)
        if digest_of(value) != source.base[key]["digest"]:
            raise CheckpointError(f"{base} is not what the adapters were trained beside: {key} has other values.")
        return value

    return read
