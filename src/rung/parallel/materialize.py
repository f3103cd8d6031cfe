"""Initial weights: made once, from the seed alone, and given to every rank piece by piece.

Every rank builds the model without storage (on the meta device); the main rank also builds it for real on the host.
Storage is then made for one piece at a time, filled by a broadcast from the main rank, and may be sharded before the
next piece comes. So no rank but the main one ever holds the whole model, and the weights do not depend on the layout.

A rank of a pipeline keeps the pieces of its own stages. In place of the others it has tensors without data, so that the
model keeps its form and its own forward can run up to what this rank computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rung import fakes
from rung.errors import ModelError
from rung.generators import seed_generators
from rung.task import Task
from rung.world import World, broadcast_from


class Weights:
    """The seeded weights of a model, handed out by name to the pieces of its skeleton."""

    def __init__(
        self,
        task: Task,
        world: World,
        seed: int,
        dtype: torch.dtype | None,
        *,
        seeded: bool = True,
        channels_last: bool = False,
    ) -> None:
        self._world = world
        self._channels_last = channels_last
        # Else storage is left as it comes: a checkpoint will fill it, or nobody will, where tensors hold no data.
        self._seeded = seeded = seeded and world.has_storage
        self._dtype = dtype
        with world.tensors():
            self.model = self._build(task, seed, "meta")
            # All ranks agree. A constructor that fails on one rank alone (it reads a file, say) would otherwise leave
            # this rank out of the broadcasts in which the others wait for it.
            own = self.model is not None and _all_meta(self.model)
            self.is_skeleton = all(world.gather_objects(own))
            source = None
            if not self.is_skeleton or (world.has_source and seeded):
                source = self._build(task, seed, "cpu")
                if source is None:
                    raise AssertionError("a build on the host raises its own error")
            if not self.is_skeleton:
                # Some constructors compute with real numbers. Then every rank builds the whole model for itself.
                self.model = source
        assert self.model is not None
        self._names = _names_of(self.model)
        self._keeps: Callable[[str], bool] = lambda name: True
        self.mode = world.fake_mode or fakes.new_fake_mode()  # of the tensors that stand for absent ones
        # By identity of the skeleton's tensors, so that tied weights are one entry.
        self._source: dict[str, Tensor] = {}
        if self.is_skeleton and source is not None:
            self._source = {**dict(source.named_parameters()), **dict(source.named_buffers())}

    def _build(self, task: Task, seed: int, device: str) -> nn.Module | None:
        seed_generators(seed)  # Python's and numpy's, too: a constructor may draw from them
        torch.manual_seed(seed)
        if device == "meta":
            try:
                with torch.device("meta"):
                    model = task.model()
            except Exception:
                return None  # the build on the host will succeed, or raise the same
        else:
            model = task.model()
        if not isinstance(model, nn.Module):
            raise ModelError(f"{task.name}: model() must return an nn.Module, but it returned {type(model).__name__}.")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise ModelError(f"{task.name}: {name} is lazy and has no shape yet. Use modules with stated sizes.")
        if device == "cpu":
            _refuse_shared_storage(model, task.name)
        if self._dtype is not None:
            self._convert(model)
        return model

    def _convert(self, model: nn.Module) -> None:
        """Every floating tensor in the type asked for. Not by `model.to`, which cannot do it to fake tensors."""
        assert self._dtype is not None
        done: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that its identity stays its own
        for owner in model.modules():
            for registry in (owner._parameters, owner._buffers):
                for key, tensor in list(registry.items()):
                    if tensor is None or not (tensor.is_floating_point() or tensor.is_complex()):
                        continue
                    if id(tensor) not in done:
                        wanted = self._dtype.to_complex() if tensor.is_complex() else self._dtype
                        value = tensor.detach().to(wanted)
                        if isinstance(tensor, nn.Parameter):
                            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                        _carry_marks(tensor, value)
                        done[id(tensor)] = tensor, value
                    put_tensor(owner, key, done[id(tensor)][1])

    def keep_only(self, keeps: Callable[[str], bool]) -> None:
        """Which tensors, by name, belong to this rank. The others are left without data."""
        self._keeps = keeps

    def fill(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Give storage and values to every tensor of `module` that has none yet.

        All ranks call it for the same modules in the same order, whether they keep them or not.
        """
        device = device or self._world.device
        done: dict[int, Tensor] = {}  # by identity, so that tied weights stay tied
        with self._world.tensors(), torch.no_grad():
            for owner in module.modules():
                for registry in (owner._parameters, owner._buffers):
                    for key, tensor in list(registry.items()):
                        if tensor is None or isinstance(tensor, DTensor):
                            continue
                        if id(tensor) not in done:
                            # Forgotten once it is dealt with: its identity may become another tensor's.
                            name = self._names.pop(id(tensor), None)
                            if name is None:
                                continue
                            if not self._keeps(name):
                                done[id(tensor)] = self._let_go(tensor, name, device)
                            elif tensor.device == device:
                                continue  # in its place already
                            else:
                                done[id(tensor)] = self._in_place(tensor, name, device)
                        put_tensor(owner, key, done[id(tensor)])

    def _in_place(self, tensor: Tensor, name: str, device: torch.device) -> Tensor:
        """The tensor with storage on `device`, and its seeded values."""
        value = self._value(tensor, name).to(device) if _on_meta(tensor) else tensor.detach().to(device)
        value = self._laid_out(value, tensor)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        _carry_marks(tensor, value)
        return value

    def _laid_out(self, value: Tensor, skeleton: Tensor) -> Tensor:
        """In the memory format asked for, or else that of the task's own. What is cut by rows has to be contiguous."""
        if value.dim() != 4:
            return value
        if self._world.layout.uses_fully_shard:
            return value.contiguous()
        own = skeleton.is_contiguous(memory_format=torch.channels_last) and not skeleton.is_contiguous()
        return value.contiguous(memory_format=torch.channels_last) if own or self._channels_last else value

    def _let_go(self, tensor: Tensor, name: str, device: torch.device) -> Tensor:
        """What stands in for a tensor that another rank keeps."""
        if _on_meta(tensor):
            self._value(tensor, name)  # the broadcast needs every rank
        with fakes.imagined(self.mode):
            absent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                absent = nn.Parameter(absent, requires_grad=False)
        _carry_marks(tensor, absent)
        absent.is_absent, absent.is_trained_elsewhere = True, tensor.requires_grad  # type: ignore[attr-defined]
        return absent

    def _value(self, skeleton: Tensor, name: str) -> Tensor:
        world = self._world
        if not self._seeded:
            return torch.empty_like(skeleton, device=world.device)
        if world.has_source:
            value = self._source.pop(name).detach().to(world.device)
        else:
            value = torch.empty_like(skeleton, device=world.device)
        if world.size > 1 and value.numel() > 0:
            value = value.contiguous()
            broadcast_from(0, value)
        return value


def _carry_marks(old: Tensor, new: Tensor) -> None:
    """What the task may have left on its parameters. A fake tensor has marks of its own there, such as its device."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})


def put_tensor(owner: nn.Module, key: str, tensor: Tensor) -> None:
    """Put a parameter or buffer in the place of another of the same name."""
    if isinstance(owner, nn.RNNBase) and isinstance(tensor, nn.Parameter):
        setattr(owner, key, tensor)  # by name: recurrent layers keep a list beside it
    elif key in owner._parameters:
        owner._parameters[key] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[key] = tensor


def is_absent(tensor: Tensor) -> bool:
    """Whether a tensor only stands for one that another rank keeps."""
    return getattr(tensor, "is_absent", False)


def _names_of(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _refuse_shared_storage(model: nn.Module, where: str) -> None:
    """Two parameters over one storage are tied on one device only; a copy of the model would untie them."""
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0 or parameter.device.type == "meta" or type(parameter.data) is not Tensor:
            continue
        address = parameter.untyped_storage().data_ptr()
        if address in seen:
            raise ModelError(
                f"{where}: {seen[address]} and {name} are two parameters over one storage. "
                "Tie them by assigning the parameter itself."
            )
        seen[address] = name


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # `is_meta` is also true of fake tensors


def _all_meta(model: nn.Module) -> bool:
    """Whether all that must be filled later can be found by name: parameters and buffers on meta, nothing else."""
    for module in model.modules():
        registered = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
        if any(not _on_meta(tensor) for tensor in registered):
            return False
        loose = [v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")]
        if any(_holds_tensor(value) for value in loose):
            return False
    return True


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth < 8 and isinstance(value, list | tuple | set):
        return any(_holds_tensor(item, depth + 1) for item in value)
    if depth < 8 and isinstance(value, dict):
        return any(_holds_tensor(item, depth + 1) for item in value.values())
    return False
