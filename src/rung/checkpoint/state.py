"""The state of training under names that no strategy changes, as one process would call it.

    model/<name>                a parameter or buffer of the module, by its own name
    optimizer/<name>/<key>      what the optimizer keeps for that parameter
    rank/<number>/<what>        random generators, of use on the same topology alone; see also `own`

Tensors are listed as they live on this rank: DTensors where they are cut, so that torch's planner knows which part of
the whole they are. Everything else is small and goes into the manifest.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.checkpoint.files import DTYPES
from rung.checkpoint.packing import Unpackable, pack, unpack
from rung.errors import CheckpointError
from rung.generators import restore_generators, save_generators
from rung.parallel.materialize import is_absent
from rung.runtime.mesh import MeshRuntime
from rung.runtime.optimizer import members_of
from rung.strategy import Layout
from rung.world import World

# How a kernel is chosen, not what it computes: this belongs to the world at hand.
_IMPLEMENTATION = ("params", "fused", "foreach", "capturable", "differentiable")
# What a schedule's state counts beside its settings. Of its rates, the groups' `initial_lr` tells.
_COUNTERS = ("last_epoch", "base_lrs", "T_cur", "T_i", "verbose")
_ANEW = "for the task's, start a new run from the weights (rung export)"


def model_tensors(runtime: MeshRuntime) -> dict[str, Tensor]:
    """Parameters and buffers that this rank keeps, tied ones once, also those that a state dict leaves out."""
    return {f"model/{name}": tensor for name, tensor in _named(runtime.model) if not is_absent(tensor)}


def tensors_to_save(runtime: MeshRuntime, *, everything: bool = False) -> dict[str, Tensor]:
    """What this rank answers for. What several keep alike is listed by each, and written by one of them.

    `everything`: also buffers that another rank would write, because that rank may be gone.
    """
    world = runtime.world
    buffers = {id(buffer) for buffer in runtime.model.buffers()}
    # Buffers may differ between data ranks (statistics of a local batch norm); the first one's count, as always.
    first = everything or (world.data_rank == 0 and world.rank % world.layout.tp == 0)
    elsewhere = runtime.counted_elsewhere()
    found = {
        name: tensor.detach()
        for name, tensor in model_tensors(runtime).items()
        if id(tensor) not in elsewhere and (first or id(tensor) not in buffers)
    }
    for name, parameter in optimizer_parameters(runtime):
        if id(parameter) in elsewhere:
            continue
        for key, value in runtime.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value.detach()
    return found


def rank_tensors(world: World) -> dict[str, Tensor]:
    """The random generators of this rank, as they are now."""
    python, numpy, own = save_generators()
    text = json.dumps(pack({"python": python, "numpy": numpy}, "the random generators")).encode()
    found = {"torch": own.clone(), "others": torch.frombuffer(bytearray(text), dtype=torch.uint8)}
    if world.device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(world.device)
    return {f"rank/{world.rank}/{key}": value for key, value in found.items()}


def restore_random(world: World, read: Callable[[str], Tensor]) -> None:
    others = unpack(json.loads(bytes(read(f"rank/{world.rank}/others").tolist())))
    restore_generators((others["python"], others["numpy"], read(f"rank/{world.rank}/torch")))
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(read(f"rank/{world.rank}/cuda"), world.device)


def small_state(runtime: MeshRuntime) -> dict[str, Any]:
    """What is not a large tensor: parameter groups, schedule, scaler. The same on every rank but for `values`."""
    optimizer = runtime.optimizer
    groups = [
        {key: pack(value, f"{key!r} of the optimizer's group {n}") for key, value in group.items() if key != "params"}
        for n, group in enumerate(optimizer.param_groups)
    ]
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in optimizer_parameters(runtime):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                values.setdefault(name, {})[key] = pack(value, f"the optimizer's {key!r} of {name}")
    others = [
        [pack(key, "a key of the optimizer's state"), pack(value, f"the optimizer's state {key!r}")]
        for key, value in optimizer.state.items()
        if not isinstance(key, Tensor)
    ]
    schedule = None
    if runtime.schedule is not None:
        try:
            schedule = pack(runtime.schedule.state_dict(), "the schedule")
        except Unpackable:
            schedule = "replay"
    scaler = runtime.scaler
    return {
        "optimizer": {
            "class": type(optimizer).__name__,
            "groups": groups,
            "members": members_of(optimizer),
            "values": values,
            "others": others,
        },
        "schedule": schedule,
        "schedule_class": type(runtime.schedule).__name__ if runtime.schedule is not None else None,
        "total_steps": runtime.total_steps,
        "extra": _extra_state(runtime),
        "scaler": None if scaler is None else pack(scaler.state_dict(), "the scaler"),
    }


def model_names(runtime: MeshRuntime) -> dict[str, Any]:
    """For those who export: every key of the module's state dict, in its order, and what is saved for it.

    Tied tensors have several keys, buffers that are not persistent have none. What the module computes for its state
    dict (`get_extra_state`, hooks) is no parameter or buffer, and cannot be exported.
    """
    state = runtime.model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in _named(runtime.model)}
    return {
        "state_dict": {key: names[id(value)] for key, value in state.items() if id(value) in names},
        "computed": [key for key, value in state.items() if id(value) not in names],
    }


class Restorer:
    """Puts a checkpoint's state into a runtime that was built for whatever world there is now."""

    def __init__(self, runtime: MeshRuntime, manifest: Mapping[str, Any]) -> None:
        self._runtime = runtime
        self._manifest = manifest
        self._tensors: Mapping[str, Any] = manifest["tensors"]
        self._state: list[tuple[int, str, str, Tensor]] = []  # parameter's number, its name, key, value
        self._check_model()
        self.targets: dict[str, Tensor] = {**model_tensors(runtime), **self._make_optimizer_state()}

    def _check_model(self) -> None:
        model = self._runtime.model
        here = {name: tuple(tensor.shape) for name, tensor in _named(model)}
        there = {
            n.removeprefix("model/"): tuple(t["shape"]) for n, t in self._tensors.items() if n.startswith("model/")
        }
        for name in set(there) - set(here):
            self._make_buffer(name)
        here = {name: tuple(tensor.shape) for name, tensor in _named(model)}
        missing, extra = sorted(set(here) - set(there)), sorted(set(there) - set(here))
        if missing or extra:
            told = [f"it has no {', '.join(missing[:3])}"] if missing else []
            told += [f"the model has no {', '.join(extra[:3])}"] if extra else []
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(told)}.")
        for name, shape in here.items():
            if shape != there[name]:
                raise CheckpointError(
                    f"the checkpoint is of another model: {name} is {list(there[name])} there and {list(shape)} here."
                )

    def _make_buffer(self, name: str) -> None:
        """Room for a buffer that is None until a forward pass makes it."""
        path, _, key = name.rpartition(".")
        try:
            owner = self._runtime.model.get_submodule(path)
        except AttributeError:
            return
        if key in owner._buffers and owner._buffers[key] is None:
            saved = self._tensors[f"model/{name}"]
            owner._buffers[key] = torch.zeros(
                saved["shape"], dtype=DTYPES[saved["dtype"]], device=self._runtime.world.device
            )

    def _make_optimizer_state(self) -> dict[str, Tensor]:
        """Room for what was saved. Made from what the checkpoint says, not by a trial step, which may change things."""
        keys: dict[str, list[str]] = {}
        for name in self._tensors:
            if name.startswith("optimizer/"):
                owner, _, key = name.removeprefix("optimizer/").rpartition("/")
                keys.setdefault(owner, []).append(key)
        targets: dict[str, Tensor] = {}
        numbers = {id(p): n for n, p in enumerate(p for g in self._runtime.optimizer.param_groups for p in g["params"])}
        for name, parameter in optimizer_parameters(self._runtime):
            for key in keys.get(name, ()):
                saved = self._tensors[f"optimizer/{name}/{key}"]
                shape, dtype = tuple(saved["shape"]), DTYPES[saved["dtype"]]
                if shape == tuple(parameter.shape) and (shape or key != "step"):
                    value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                elif isinstance(parameter, DTensor) and shape:
                    raise CheckpointError(
                        f"the optimizer keeps {key!r} of shape {list(shape)} for {name}, which is cut here: how that "
                        "is to be cut is not known. Resume under a strategy that leaves parameters whole, such as ddp."
                    )
                else:
                    value = torch.zeros(shape, dtype=dtype)
                targets[f"optimizer/{name}/{key}"] = value
                self._state.append((numbers[id(parameter)], name, key, value))
        return targets

    def finish(self) -> None:
        """After the tensors were read into `targets`: hand them to the optimizer, and set the rest."""
        runtime, saved = self._runtime, self._manifest["optimizer"]
        optimizer = runtime.optimizer
        if saved["class"] != type(optimizer).__name__ or len(saved["groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint has the state of {saved['class']} with {len(saved['groups'])} parameter groups; the "
                f"task now makes {type(optimizer).__name__} with {len(optimizer.param_groups)}."
            )
        fresh = optimizer.state_dict()
        built = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in fresh["param_groups"]])
        state: dict[Any, Any] = {unpack(key): unpack(value) for key, value in saved.get("others", [])}
        for number, _, key, value in self._state:
            state.setdefault(number, {})[key] = value
        numbers = {id(p): n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        for name, parameter in optimizer_parameters(runtime):
            for key, packed in saved["values"].get(name, {}).items():
                state.setdefault(numbers[id(parameter)], {})[key] = unpack(packed)
        groups = [
            {**group, **{key: unpack(value) for key, value in old.items() if key not in _IMPLEMENTATION}}
            for group, old in zip(fresh["param_groups"], saved["groups"], strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        self._undo_conversions()
        self._finish_schedule(built)
        self._note_changed_groups(built)
        self._note_changed_members()
        _set_extra_state(runtime, self._manifest.get("extra", {}))
        if runtime.scaler is not None and self._manifest["scaler"] is not None:
            runtime.scaler.load_state_dict(unpack(self._manifest["scaler"]))

    def _undo_conversions(self) -> None:
        """An optimizer takes state in the type of its parameters; counters and wide moments must stay as they are."""
        optimizer = self._runtime.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, _, key, value in self._state:
            taken = optimizer.state[parameters[number]][key]
            if key != "step" and taken.dtype != value.dtype:
                optimizer.state[parameters[number]][key] = value.to(taken.device)

    def _note_changed_groups(self, built: list[dict[str, Any]]) -> None:
        """Say where the task asks for other values than the checkpoint has, and which of them are used."""
        kept: list[tuple[str, Any, Any]] = []
        replaced: list[tuple[str, Any, Any]] = []
        groups, saved = self._runtime.optimizer.param_groups, self._manifest["optimizer"]["groups"]
        for number, (now, packed, group) in enumerate(zip(built, saved, groups, strict=True)):
            old = {key: unpack(value) for key, value in packed.items()}
            moved = {"lr"} if "initial_lr" in old else set()  # a schedule has changed it since
            if "base_momentum" in old:  # a schedule that cycles the momentum, too
                moved |= {"momentum", "betas"}
            for key in now.keys() & old.keys() - moved - {*_IMPLEMENTATION}:
                if _plain(now[key]) != _plain(old[key]):
                    name = "lr" if key == "initial_lr" else key
                    row = (f"{name} of group {number}" if len(groups) > 1 else name, now[key], old[key])
                    (kept if _plain(group.get(key)) == _plain(old[key]) else replaced).append(row)
        if kept:
            self._runtime.notes.append(f"optimizer: {_differences(kept)}: the checkpoint's is used; {_ANEW}")
        if replaced:
            self._runtime.notes.append(
                f"optimizer: {_differences(replaced)}: the task's is used, because the schedule begins anew for "
                f"{self._runtime.total_steps} steps"
            )

    def _note_changed_members(self) -> None:
        """Say which parameters are in other groups than they were: a group's values are those of its number."""
        saved = self._manifest["optimizer"].get("members")
        if saved is None:
            return
        now, old = (
            {name: f"group {number}" for number, names in enumerate(groups) for name in names}
            for groups in (members_of(self._runtime.optimizer), saved)
        )
        changed = [name for name in {**old, **now} if now.get(name) != old.get(name)]
        if changed:
            row = (changed[0], now.get(changed[0], "in no group"), old.get(changed[0], "in no group"))
            others = f" (and {len(changed) - 1} more parameters)" if len(changed) > 1 else ""
            self._runtime.notes.append(
                f"optimizer: {_differences([row])}{others}: the task's groups are used, with the checkpoint's values"
            )

    def _note_changed_schedule(self, saved: Mapping[str, Any]) -> None:
        assert self._runtime.schedule is not None
        now, old = _schedule_settings(self._runtime.schedule.state_dict()), _schedule_settings(saved)
        changed = [(key, now[key], old[key]) for key in now if key in old and now[key] != old[key]]
        if changed:
            self._runtime.notes.append(f"schedule: {_differences(changed)}: the checkpoint's is used; {_ANEW}")

    def _finish_schedule(self, built: list[dict[str, Any]]) -> None:
        """`built` is what the schedule made of the groups before the checkpoint's came."""
        schedule, saved = self._runtime.schedule, self._manifest["schedule"]
        if schedule is None:
            if saved is not None:
                rate = self._runtime.optimizer.param_groups[0].get("lr")
                self._runtime.notes.append(
                    f"schedule: the task has none now, and the checkpoint was saved with one: lr stays at {rate:g}, "
                    f"which it had reached; {_ANEW}"
                )
            return
        if saved is None:
            raise CheckpointError("the task has a schedule now, and the checkpoint was saved without one.")
        same_length = self._manifest.get("total_steps", self._runtime.total_steps) == self._runtime.total_steps
        kind, was = type(schedule).__name__, self._manifest.get("schedule_class")
        if was not in (None, kind):
            if same_length:
                raise CheckpointError(
                    f"the checkpoint has the state of a {was}, and schedule() of the task now returns a {kind}. Return "
                    f"that again; {_ANEW}."
                )
            self._runtime.notes.append(f"schedule: {was} in the checkpoint, {kind} in the task: the task's is used")
        if saved != "replay" and same_length:
            self._note_changed_schedule(unpack(saved))
            schedule.load_state_dict(unpack(saved))
            return
        # Its state holds the old length, or cannot be saved: take it through the steps again, from where it began.
        groups = self._runtime.optimizer.param_groups
        reached = [group.get("lr") for group in groups]
        for group, values in zip(groups, built, strict=True):
            group.update(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer step went before
            for _ in range(int(self._manifest["step"])):
                schedule.step()
        gone = [(float(a), float(group["lr"])) for a, group in zip(reached, groups, strict=True) if a is not None]
        if same_length and any(abs(a - b) > 1e-9 * max(abs(a), abs(b)) for a, b in gone):
            raise CheckpointError(
                f"the schedule cannot be resumed: it has state that only pickle could save, and going through its "
                f"{self._manifest['step']} steps again gives a rate of {gone[0][1]:.6g} instead of {gone[0][0]:.6g}."
            )


def _differences(changed: list[tuple[str, Any, Any]]) -> str:
    rows = [f"{name} is {_plain(now)} in the task and {_plain(old)} in the checkpoint" for name, now, old in changed]
    return ", ".join(sorted(rows)[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


def _plain(value: Any) -> Any:
    """A value of a parameter group such that equal ones compare equal, whatever holds them."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _schedule_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a schedule, and of the ones it is made up of, by name."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found |= {f"{name} of part {number}": setting for name, setting in _schedule_settings(inner).items()}
        elif not key.startswith("_") and key not in _COUNTERS:
            found[key] = _plain(value)
    return found


def _extra_state(runtime: MeshRuntime) -> dict[str, Any]:
    """What modules add to their state dict by themselves, where it is plain."""
    found = {}
    for path, module in runtime.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found[path] = pack(module.get_extra_state(), f"the extra state of {path or 'the model'}")
    return found


def _set_extra_state(runtime: MeshRuntime, saved: Mapping[str, Any]) -> None:
    for path, value in saved.items():
        runtime.model.get_submodule(path).set_extra_state(unpack(value))


def optimizer_parameters(runtime: MeshRuntime) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters with the names that the module has for them."""
    slices = runtime.parameter_slices()  # zero1's optimizer sees parts of the parameters
    names = {id(slices.get(id(p), p)): name for name, p in runtime.model.named_parameters()}
    for group in runtime.optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def topology(layout: Layout) -> dict[str, Any]:
    """What must be the same for a run to go on bit by bit."""
    found = {"axes": layout.axes, "zero": layout.zero, "schedule": layout.schedule if layout.pp > 1 else None}
    alone = {"kind": layout.kind, "servers": layout.servers, "devices": layout.devices}
    return found if layout.kind == "mesh" else {**found, **alone}


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
