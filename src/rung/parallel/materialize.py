"""Initial weights: built once from the seed and broadcast to the ranks unit by unit.

Every rank of several builds the model on the meta device; rank 0 also builds it on the host. `fill` then allocates one
unit at a time and fills it by a broadcast from rank 0; the unit may be sharded before the next one is filled. So only
rank 0 ever holds the whole model, and the weights do not depend on the layout.

A rank of a pipeline keeps the tensors of its own stages. The others become fake tensors, so that the modules stay
complete and the model's own forward can run up to this rank's stage.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from rung.data.rng import GeneratorMarks, seed_generators
from rung.distributed import fake_world
from rung.distributed.collectives import broadcast_from
from rung.distributed.torch_private import buffers_of, num_gradient_hooks, plain_attributes
from rung.distributed.world import World
from rung.errors import ConfigError, ModelError, RungError, TaskError
from rung.parallel.adapters import base_of, describe_choice, digest_of, drawn_names, initial_value, insert_adapters
from rung.parallel.initial_weights import InitialWeights
from rung.spec.lora import Lora
from rung.spec.task import Task

_HALF = (torch.bfloat16, torch.float16)


def gradient_hooks(model: nn.Module) -> Counter[str]:
    """The number of gradient hooks on each parameter, by name."""
    return Counter({name: num_gradient_hooks(parameter) for name, parameter in model.named_parameters()})


class NoDraws(TorchFunctionMode):
    """Leaves tensors on the meta device as they are where a constructor would draw their values.

    torch computes shapes and strides of such a draw in Python, a few milliseconds a tensor.
    """

    _DRAWS = frozenset(
        getattr(Tensor, f"{name}_")
        for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._DRAWS and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


class Weights:
    """The seeded weights of a model, from which `fill` materializes its meta tensors by name."""

    def __init__(
        self,
        task: Task,
        world: World,
        seed: int,
        dtype: torch.dtype | None,
        *,
        seeded: bool = True,
        channels_last: bool = False,
        masters: bool = False,
        init: str | None = None,
        init_partial: bool = False,
        lora: Lora | None = None,
    ) -> None:
        """`dtype` is that of all floating tensors, or the task's. With `masters`, half precision becomes fp32. `init`
        is a file or folder of weights, which replace the seeded ones; all of them, unless `init_partial`. `lora`: the
        model is frozen, and gets adapters."""
        self._world = world
        self._channels_last = channels_last
        # If not seeded, storage stays uninitialized: a checkpoint fills it, or tensors are fake and have no data.
        seeded = seeded and world.tensors.has_storage
        self._dtype, self._masters, self._lora, self._seed = dtype, masters, lora, seed
        self.widened: torch.dtype | None = None  # the type of weights that became fp32
        self.model: nn.Module | None = None
        self.notes: list[str] = []
        self._initial: InitialWeights | None = None
        self._initial_names: set[str] = set()  # the same on all ranks
        begins = init is not None or task.initial_weights is not None
        if world.size > 1 or not seeded or begins:  # else one process takes the model as it is built on the host
            with fake_world.outside_fakes():  # a constructor may compute a few numbers from real tensors
                self.model = self._build(task, seed, "meta")
        with world.tensors.mode():
            # All ranks must agree: if a constructor fails on one rank only (it reads a file, say), that rank would skip
            # the broadcasts in which the others wait for it.
            own = self.model is not None and _all_meta(self.model)
            self.is_skeleton = all(world.gather_objects(own))
            source = None
            if not self.is_skeleton:
                # Some constructors compute with tensor values. Then every rank builds the whole model on the host.
                self.model = source = self._build(task, seed, "cpu")
            assert self.model is not None  # a build on the host raises its own error
            self.base: dict[str, str] = dict.fromkeys(base_of(self.model), "")  # with digests, on the main rank
            # What is frozen beside adapters is in no checkpoint, and is made anew.
            seeded = seeded or (bool(self.base) and world.tensors.has_storage)
            self._seeded, begins = seeded, begins and seeded
            if begins:
                self._open_initial(task, init, self.model, is_partial=init_partial)
            self.notes += describe_choice(self.model, lora)
            if self.is_skeleton and world.has_source and seeded:
                source = self._source_of(task, seed, self.model)
        self._drawn = drawn_names(self.model)
        self._names = _names_of(self.model)
        self._keeps: Callable[[str], bool] = lambda name: True
        self.mode = world.tensors.fake_mode or fake_world.new_fake_mode()  # for tensors of other ranks' stages
        # By identity of the skeleton's tensors, so that tied weights are one entry.
        self._source: dict[str, Tensor] = {}
        if self.is_skeleton and source is not None:
            self._source = {**dict(source.named_parameters()), **dict(source.named_buffers())}
        if not self.is_skeleton and seeded:
            self._note_digests({n: p for n, p in self.model.named_parameters() if n not in self._initial_names})

    def _note_digests(self, tensors: Mapping[str, Tensor]) -> None:
        if self._world.has_source:
            self.base |= {name: digest_of(tensor) for name, tensor in tensors.items() if name in self.base}

    def share_base(self) -> dict[str, str]:
        """The names of what is frozen beside adapters, with their digests. All ranks call it, after all was filled."""
        if self.base:
            self.base = self._world.gather_objects(self.base)[0]
        return self.base

    def _open_initial(self, task: Task, init: str | None, model: nn.Module, *, is_partial: bool) -> None:
        """On the rank that has the source, find the weights to begin with; all ranks learn which there are."""
        error = None
        if self._world.has_source:
            try:
                given = init if init is not None else task.initial_weights() if task.initial_weights else None
                if not isinstance(given, str | Path | Mapping):
                    raise TaskError(
                        f"{task.name}: initial_weights() must return a path or a state dict, but it returned "
                        f"{type(given).__name__}."
                    )
                self._initial = InitialWeights(given)
                self._initial.match(model, is_partial=is_partial)
                if init is not None and task.initial_weights is not None:
                    self._initial.notes.append("--init replaces the task's initial_weights()")
            except RungError as problem:
                error = str(problem)
        found = self._initial.names if self._initial is not None and error is None else []
        error, names, self.notes = self._world.gather_objects(
            [error, found, self._initial.notes if self._initial is not None else []]
        )[0]
        if error is not None:
            raise ConfigError(error)
        self._initial_names = set(names)

    def _source_of(self, task: Task, seed: int, model: nn.Module) -> nn.Module | None:
        """The model on the host, for what no file has; without parameters if there is a file for all of them."""
        given = self._initial_names | drawn_names(model)
        if set(_names_of(model).values()) <= given:
            return None
        if {name for name, _ in model.named_parameters()} <= given:
            seed_generators(seed)
            torch.manual_seed(seed)
            seeded = GeneratorMarks()  # of the state from which a model is built
            with contextlib.suppress(Exception), _parameters_on_meta():  # a constructor may read their values
                source = self._build(task, seed, "cpu")
                buffers = {} if source is None else dict(source.named_buffers())
                is_whole = not any(_on_meta(b) for name, b in buffers.items() if name not in given)
                if is_whole and seeded.hold():  # else a buffer is drawn, or computed from a parameter
                    return source
        return self._build(task, seed, "cpu")

    def _build(self, task: Task, seed: int, device: str) -> nn.Module | None:
        seed_generators(seed)  # Python's and numpy's, too: a constructor may draw from them
        torch.manual_seed(seed)
        if device == "meta":
            try:
                with torch.device("meta"), NoDraws():
                    model = task.model()
            except Exception:
                return None  # the build on the host succeeds or raises the same error
        else:
            model = task.model()
        if not isinstance(model, nn.Module):
            raise ModelError(f"{task.name}: model() must return an nn.Module, but it returned {type(model).__name__}.")
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise ModelError(f"{task.name}: {name} is lazy and has no shape yet. Use modules with stated sizes.")
        if hooked := +gradient_hooks(model):
            raise ModelError(
                f"{task.name}: model() registers a hook on the gradient of {next(iter(hooked))}. Rung trains "
                "another tensor in its place, so the hook would never run. Change gradients in a hook of the optimizer "
                "(register_step_pre_hook), or of a module."
            )
        if device == "cpu":
            _refuse_shared_storage(model, task.name)
        if self._dtype is not None:
            self._convert(model, self._dtype)
        elif self._masters and (half := [p.dtype for p in model.parameters() if p.dtype in _HALF]):
            self.widened = half[0]
            self._convert(model, torch.float32, only=_HALF)
        if self._lora is not None:
            insert_adapters(model, self._lora, task.blocks, seed)
        return model

    def _convert(self, model: nn.Module, dtype: torch.dtype, only: tuple[torch.dtype, ...] = ()) -> None:
        """Convert floating tensors, or those of some types. `model.to` cannot convert fake tensors."""
        done: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the old tensor alive, so that its id() is not reused
        for owner in model.modules():
            for key, tensor in own_tensors(owner):
                if not (tensor.is_floating_point() or tensor.is_complex()) or (only and tensor.dtype not in only):
                    continue
                if id(tensor) not in done:
                    wanted = dtype.to_complex() if tensor.is_complex() else dtype
                    value = tensor.detach().to(wanted)
                    if isinstance(tensor, nn.Parameter):
                        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                    _copy_attributes(tensor, value)
                    done[id(tensor)] = tensor, value
                put_tensor(owner, key, done[id(tensor)][1])

    def keep_only(self, keeps: Callable[[str], bool]) -> None:
        """Set which tensors, by name, this rank keeps: those that every such call names. `fill` makes fake ones of the
        others."""
        others = self._keeps
        self._keeps = lambda name: keeps(name) and others(name)

    def fill(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Allocate and fill every tensor of `module` that has no storage yet.

        All ranks must call it for the same modules in the same order, because it broadcasts.
        """
        device = device or self._world.device
        done: dict[int, Tensor] = {}  # by id, so that tied weights stay tied
        with self._world.tensors.mode(), torch.no_grad():
            for owner in module.modules():
                for key, tensor in own_tensors(owner):
                    if isinstance(tensor, DTensor):
                        continue
                    if id(tensor) not in done:
                        # Popped, because Python may give its id to another tensor later.
                        name = self._names.pop(id(tensor), None)
                        if name is None:
                            continue
                        if not self._keeps(name):
                            done[id(tensor)] = self._absent(tensor, name, device)
                        elif (
                            name not in self._initial_names
                            and tensor.device == device
                            and self._in_memory_format(tensor, tensor) is tensor
                        ):
                            continue  # it is as it should be
                        else:
                            done[id(tensor)] = self._materialized(tensor, name, device)
                    put_tensor(owner, key, done[id(tensor)])

    def _materialized(self, tensor: Tensor, name: str, device: torch.device) -> Tensor:
        """The tensor with storage on `device` and its seeded values."""
        value = self._value(tensor, name).to(device) if self._is_sent(tensor, name) else tensor.detach().to(device)
        value = self._in_memory_format(value, tensor)
        if isinstance(tensor, nn.Parameter):
            value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        _copy_attributes(tensor, value)
        return value

    def _in_memory_format(self, value: Tensor, skeleton: Tensor) -> Tensor:
        """The value in the requested memory format or the task's own. FSDP shards by rows and needs it contiguous."""
        if value.dim() != 4:
            return value
        if self._world.layout.uses_fully_shard:
            return value.contiguous()
        own = skeleton.is_contiguous(memory_format=torch.channels_last) and not skeleton.is_contiguous()
        return value.contiguous(memory_format=torch.channels_last) if own or self._channels_last else value

    def _absent(self, tensor: Tensor, name: str, device: torch.device) -> Tensor:
        """A fake tensor in the place of one that another rank keeps."""
        if self._is_sent(tensor, name):
            self._value(tensor, name)  # the broadcast needs every rank
        with fake_world.imagined(self.mode):
            absent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                absent = nn.Parameter(absent, requires_grad=False)
        _copy_attributes(tensor, absent)
        absent.is_absent, absent.is_trained_elsewhere = True, tensor.requires_grad  # type: ignore[attr-defined]
        return absent

    def _is_sent(self, tensor: Tensor, name: str) -> bool:
        """Whether rank 0 has the value: of a skeleton's tensors, and of those in a file."""
        return _on_meta(tensor) or name in self._initial_names

    def _value(self, skeleton: Tensor, name: str) -> Tensor:
        world = self._world
        if self._seeded and world.has_source:
            initial = name in self._initial_names
            assert not initial or self._initial is not None
            if initial and self._initial is not None:
                value = self._initial.read(name)
            else:
                is_drawn = name in self._drawn
                value = initial_value(name, skeleton.shape, self._seed) if is_drawn else self._source.pop(name)
            value = value.detach().to(world.device, skeleton.dtype)
            self._note_digests({name: value})
        else:
            value = torch.empty_like(skeleton, device=world.device)
        if self._seeded and world.size > 1 and value.numel() > 0:
            value = value.contiguous()
            broadcast_from(0, value)
        return value


def _copy_attributes(old: Tensor, new: Tensor) -> None:
    """Copy attributes that the task set on a tensor, but keep a fake tensor's own ones, such as its device."""
    new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})


def put_tensor(owner: nn.Module, key: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of a module."""
    buffers = buffers_of(owner)
    if key in buffers:
        buffers[key] = tensor
    else:
        setattr(owner, key, tensor)  # not `register_parameter`: recurrent layers update a list in their __setattr__


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers; one under two names is listed twice."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def is_absent(tensor: Tensor) -> bool:
    """Whether a tensor is a fake in the place of one that another rank keeps."""
    return getattr(tensor, "is_absent", False)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """While inside, parameters lose their storage as soon as a module has them."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not _on_meta(parameter):
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with fake_world.patched(nn.Module, register_parameter=registered), NoDraws():
        yield


def _names_of(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _refuse_shared_storage(model: nn.Module, where: str) -> None:
    """Raise if two parameters share a storage: copying the model to a device would untie them."""
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
    """Whether all tensors are meta parameters and buffers, so that `fill` finds each by its name."""
    for module in model.modules():
        if any(not _on_meta(tensor) for _, tensor in own_tensors(module)):
            return False
        if any(_holds_tensor(value) for value in plain_attributes(module)):
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
