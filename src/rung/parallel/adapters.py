"""Low-rank adapters (LoRA) beside linear layers whose weights stay as they are.

An adapted layer has the form and the names that peft's has: `base_layer`, `lora_A.default`, `lora_B.default`. So models
that peft made and those that `--lora` made take the same way everywhere: both are told by that form alone.

What is frozen beside adapters is the base of a run. It is made as the first time when a run is resumed, and is in no
checkpoint; the digests of its tensors are, so that a run does not go on with another base.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rung.data.permutation import mix
from rung.errors import ConfigError, nearest
from rung.parallel.blocks import find_blocks
from rung.parallel.linear_layers import is_conv1d, is_linear, num_inputs, num_outputs
from rung.spec.lora import Lora

_MAGNITUDE = "lora_magnitude_vector."
_NAME = "default"  # peft's name of an adapter without a name
# peft's `modules_to_save`: a module that is trained as a whole, in a copy beside the one that stays as it was.
_COPY = re.compile(r"(?:^|\.)modules_to_save\.[^.]+(?=\.)")
_ORIGINAL = re.compile(r"(?:^|\.)original_module(?=\.)")
PEFT_PREFIX = "base_model.model."  # what peft puts before all names of a model
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22  # numbers of which a digest is taken at a time


class LoraLinear(nn.Module):
    """A linear layer, and what is added to its result: B A x alpha / r."""

    def __init__(self, base_layer: nn.Module, lora: Lora) -> None:
        super().__init__()
        self.base_layer = base_layer
        dtype: Any = base_layer.weight.dtype
        layers: Any = {"device": "meta", "bias": False, "dtype": dtype}  # `initial_value` draws by name
        self.lora_A = nn.ModuleDict({_NAME: nn.Linear(num_inputs(base_layer), lora.r, **layers)})
        self.lora_B = nn.ModuleDict({_NAME: nn.Linear(lora.r, num_outputs(base_layer), **layers)})
        self.lora_dropout = nn.ModuleDict({_NAME: nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()})
        self.scaling = {_NAME: lora.scale}
        # nn.TransformerEncoderLayer takes a fused path in evaluation, which reads the weights of layers without hooks.
        self.register_forward_pre_hook(_nothing)

    def forward(self, input: Tensor) -> Tensor:
        within = self.lora_A[_NAME](self.lora_dropout[_NAME](input))
        result: Tensor = self.base_layer(input) + self.lora_B[_NAME](within) * self.scaling[_NAME]
        return result

    # Some models look at the type or the size of a layer.
    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias


def _nothing(module: nn.Module, inputs: Any) -> None:
    return None


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers with adapters, made by `--lora` or by peft, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict)
        and isinstance(getattr(module, "lora_B", None), nn.ModuleDict)
        and isinstance(getattr(module, "base_layer", None), nn.Module)
    }


def low_rank_layers(model: nn.Module) -> list[nn.Module]:
    return [one for layer in adapted_layers(model).values() for one in _low_rank(layer)]


def _low_rank(layer: Any) -> list[nn.Module]:
    return [*layer.lora_A.values(), *layer.lora_B.values()]


def describe_choice(model: nn.Module, lora: Lora | None) -> list[str]:
    """A line for the user about the adapters of a model, if it has some."""
    layers = adapted_layers(model)
    if not layers:
        return []
    parameters = list(model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = [p for p in parameters if not p.requires_grad]
    counts: Counter[str] = Counter()
    for parameter in frozen:
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    types = " and ".join(f"{count:,} in {dtype}" for dtype, count in counts.items())
    ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    all_of_blocks = ", all linear layers of the blocks" if lora is not None and not lora.targets else ""
    form = f"r={lora.r}, alpha={lora.alpha:g}" if lora is not None else "as model() made them"
    return [
        f"adapters ({form}) beside {len(layers)} linear layers ({ends}{all_of_blocks}): {trained:,} parameters are "
        f"trained; frozen, and in no checkpoint: {types or 'none'}"
    ]


def insert_adapters(model: nn.Module, lora: Lora, blocks: str | None, seed: int) -> list[str]:
    """Freeze the model, and put adapters beside its layers in place. Returns the names of the layers."""
    if there := adapted_layers(model):
        raise ConfigError(
            f"--lora: model() returns a model that has adapters already, at {next(iter(there))}. It is trained as it "
            "is without --lora."
        )
    chosen = _targets(model, lora, blocks)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    made: dict[int, LoraLinear] = {}
    for name in chosen:
        base = model.get_submodule(name)
        if id(base) not in made:
            made[id(base)] = LoraLinear(base, lora)
            if base.weight.device.type != "meta":
                _give_values(made[id(base)], name, seed)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in made:
            _put_module(model, name, made[id(module)])
    if lora.base is not None:
        _keep_in_half(model)
    return chosen


def _give_values(layer: LoraLinear, name: str, seed: int) -> None:
    for key, inner in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
        linear: Any = inner[_NAME]
        value = initial_value(f"{name}.{key}.{_NAME}.weight", linear.weight.shape, seed)
        linear.register_parameter("weight", nn.Parameter(value.to(linear.weight.dtype)))


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The weights that adapters begin with, as peft's do: B is zero, A uniform by Kaiming for a slope of sqrt(5).

    Drawn by name, so that they depend on the seed alone, not on what the base draws or where that comes from.
    """
    if ".lora_B." in name:
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(mix(seed, zlib.crc32(name.encode()), 2))
    bound = shape[-1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def drawn_names(model: nn.Module) -> set[str]:
    """The parameters that `initial_value` draws."""
    layers = {name for name, layer in adapted_layers(model).items() if isinstance(layer, LoraLinear)}
    return {f"{name}.{key}.{_NAME}.weight" for name in layers for key in ("lora_A", "lora_B")}


def _targets(model: nn.Module, lora: Lora, blocks: str | None) -> list[str]:
    # A module of which two names exist is one layer.
    linears = [name for name, module in model.named_modules() if name and is_linear(module)]
    if not linears:
        raise ConfigError("--lora adapts linear layers (nn.Linear, Conv1D), and the model has none.")
    if not lora.targets:
        inside = [f"{name}." for name, _ in find_blocks(model, blocks)]
        own = [name for name in linears if any(f"{name}.".startswith(block) for block in inside)]
        return own or linears
    chosen: set[str] = set()
    for target in lora.targets:
        found = {name for name in linears if fnmatch.fnmatchcase(f".{name}", f"*.{target}")}
        if not found:
            others = [n for n, m in model.named_modules() if n and fnmatch.fnmatchcase(f".{n}", f"*.{target}")]
            if others:
                kind = type(model.get_submodule(others[0])).__name__
                raise ConfigError(
                    f"--lora: {target!r} names {others[0]}, which is a {kind} and no linear layer (nn.Linear, Conv1D)."
                )
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"--lora: no linear layer is named {target!r}.{nearest(target, [*ends, *linears])} "
                f"There are: {', '.join(ends[:12])}{' and others' if len(ends) > 12 else ''}."
            )
        chosen |= found
    return [name for name in linears if name in chosen]


def _keep_in_half(model: nn.Module) -> None:
    """Keep the frozen linear layers in bf16, in which autocast multiplies them anyway: the same numbers."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    for module in model.modules():
        if is_linear(module):
            for key, parameter in list(module.named_parameters(recurse=False)):
                alone = all(user is module for user in users[id(parameter)])
                if alone and not parameter.requires_grad and parameter.is_floating_point():
                    half = nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
                    module.register_parameter(key, half)


def base_of(model: nn.Module) -> list[str]:
    """The names of what is frozen beside adapters; none without adapters."""
    if not adapted_layers(model):
        return []
    return [name for name, parameter in model.named_parameters() if not parameter.requires_grad]


def base_name(name: str, layers: dict[str, Any]) -> str | None:
    """The name of a tensor in the model without adapters; None if it is an adapter's.

    A trained copy of a module has that of the module.
    """
    if not layers:
        return name
    name = _ORIGINAL.sub("", _COPY.sub("", name, 1), 1)
    for place, letter in enumerate(name):
        if letter == "." and name[:place] in layers:
            rest = name[place + 1 :]
            if not rest.startswith("base_layer."):
                return None
            name = f"{name[:place]}.{rest.removeprefix('base_layer.')}"
            break
    return name.removeprefix(PEFT_PREFIX) if all(layer.startswith(PEFT_PREFIX) for layer in layers) else name


def is_copy(name: str) -> bool:
    """Whether a tensor is of a module that peft trains in a copy."""
    return _COPY.search(name) is not None


def digest_of(tensor: Tensor) -> str:
    """A digest of the values; halves count as the fp32 numbers that they are."""
    values = tensor.detach().contiguous().flatten()
    values = values.float() if values.is_floating_point() and values.itemsize < 4 else values
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    numbers = values.view(_AS_INTEGERS[values.itemsize])
    total = 0
    for start in range(0, numbers.numel(), _CHUNK):
        part = numbers[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=part.device)
        # Sums of 64 bits that overflow: odd factors by place, so that every bit and every exchange counts.
        total += int(((part ^ (part >> 29)) * (2 * places * 0x9E3779B1 + 1)).sum())
    return f"{total % 2**64:016x}"


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[dict[str, Any]]:
    """While inside, adapted layers are the plain ones that they were made from. Gives the layers by name."""
    layers = adapted_layers(model)
    every = list(model.named_modules(remove_duplicate=False))
    places = [(name, module) for name, module in every if any(module is layer for layer in layers.values())]
    for name, layer in places:
        _put_module(model, name, layer.base_layer)
    try:
        yield layers
    finally:
        for name, layer in places:
            _put_module(model, name, layer)


def _put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    path, _, key = name.rpartition(".")
    setattr(model.get_submodule(path), key, module)


def describe_adapters(model: nn.Module) -> dict[str, Any] | None:
    """Layers and settings of a model's adapters, for export: JSON. None without adapters."""
    layers = adapted_layers(model)
    if not layers:
        return None
    special = _special_form(model, layers)
    described: dict[str, dict[str, Any]] = {}
    for name, layer in layers.items() if not special else ():
        key = next(iter(layer.lora_A))
        described[name] = {
            "A": f"{name}.lora_A.{key}.weight",
            "B": f"{name}.lora_B.{key}.weight",
            "scale": float(layer.scaling[key]),
            "is_turned": is_conv1d(layer.base_layer),
        }
        if (magnitude := magnitude_of(layer)) is not None:
            described[name]["magnitude"] = f"{name}.{magnitude}"
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and configs:
        config = json.loads(json.dumps(next(iter(configs.values())).to_dict(), default=_plain))
    else:
        first = next(iter(layers.values()))
        rank = first.lora_A[_NAME].weight.shape[0]
        config = {
            "peft_type": "LORA",
            "task_type": None,
            "r": rank,
            "lora_alpha": first.scaling[_NAME] * rank,
            "lora_dropout": getattr(first.lora_dropout[_NAME], "p", 0.0),
            "target_modules": list(layers),
            "fan_in_fan_out": any(is_conv1d(layer.base_layer) for layer in layers.values()),
            "bias": "none",
            "base_model_name_or_path": None,
        }
    return {"layers": described, "config": config, "special": special}


def magnitude_of(layer: Any) -> str | None:
    """The name, in a layer, of the lengths that peft's DoRA gives to the rows of the weight with its adapter."""
    found = [(key, p) for key, p in layer.named_parameters() if key.startswith(_MAGNITUDE)]
    is_one = len(found) == 1 and tuple(found[0][1].shape) == (num_outputs(layer.base_layer),)
    return found[0][0] if is_one else None


def _special_form(model: nn.Module, layers: dict[str, Any]) -> str:
    """Why adapters are more than B A added to a weight; empty if they are not."""
    for name, layer in layers.items():
        if len(layer.lora_A) != 1 or list(layer.lora_A) != list(layer.lora_B):
            return f"{name} has {len(layer.lora_A)} adapters beside it"
        base = layer.base_layer
        is_plain = isinstance(base, nn.Linear) or is_conv1d(base)
        if not is_plain or any(type(one) is not nn.Linear or one.bias is not None for one in _low_rank(layer)):
            return f"the adapter at {name} is not that of a linear layer"
        own = ("base_layer.", "lora_A.", "lora_B.")
        others = [key for key, _ in layer.named_parameters() if not key.startswith(own)]
        if other := [key for key in others if key != magnitude_of(layer)]:
            return f"the adapter at {name} has a further parameter, {other[0]}"
    for name, module in model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and len(copies) > 1:
            return f"{name} has {len(copies)} copies"
    trained = [name for name, p in model.named_parameters() if p.requires_grad and not is_copy(name)]
    trained = [name for name in trained if base_name(name, layers) is not None]
    return f"{trained[0]} is trained as well" if trained else ""


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
