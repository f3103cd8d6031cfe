"""The training state under names that do not depend on the strategy, as in a single process.

    model/<name>                a parameter or buffer of the module, by its own name
    optimizer/<name>/<key>      the optimizer's state of that parameter; <key>[<n>] of a list of tensors
    rank/<number>/<what>        random generators, restored only on the same topology; see also `rank_local_state`

Tensors are listed as this rank holds them: DTensors where they are sharded, so that torch's planner knows which part of
the whole they are. Everything else is small and goes into the manifest.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rung.checkpoint.files import DTYPES, dtype_name
from rung.checkpoint.packing import NeedsPickleError, pack, unpack
from rung.data.rng import restore_generators, save_generators
from rung.distributed.torch_private import buffers_of
from rung.distributed.world import World
from rung.errors import CheckpointError
from rung.parallel.adapters import describe_adapters
from rung.parallel.combined_optimizer import is_stepped_whole, kind_of
from rung.parallel.materialize import is_absent
from rung.runtime.base import Runtime

# Options that select a kernel, not its result: the current world's are kept.
_IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable")
# Of a schedule's state: what is no setting. Rates are compared by the groups' `initial_lr`.
_NO_SETTINGS = ("last_epoch", "base_lrs", "T_cur", "T_i", "verbose")
_SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "base_momentum", "max_momentum")
_LIST_ITEM = re.compile(r"(.+)\[(\d{1,9})\]")
_START_ANEW = "for the task's, start a new run from the weights (rung export)"


def model_tensors(runtime: Runtime) -> dict[str, Tensor]:
    """Parameters and buffers that this rank holds: tied ones once, non-persistent buffers included. Not what is frozen
    beside adapters, which is made as for a new run."""
    base = runtime.parallel.base
    return {f"model/{n}": tensor for n, tensor in _named(runtime.model) if n not in base and not is_absent(tensor)}


def tensors_to_save(runtime: Runtime, *, everything: bool = False) -> dict[str, Tensor]:
    """The tensors that this rank offers to save. Those that several ranks hold are written by one of them.

    `everything`: also buffers that another rank would write, because that rank may be gone.
    """
    world = runtime.world
    buffers = {id(buffer) for buffer in runtime.model.buffers()}
    # Buffers may differ between data ranks (statistics of a local batch norm): those of the first are saved.
    saves_buffers = everything or (world.role.data_rank == 0 and world.layout.is_first_of_samples(world.rank))
    elsewhere = runtime.counted_elsewhere
    found = {
        name: tensor.detach()
        for name, tensor in model_tensors(runtime).items()
        if id(tensor) not in elsewhere and (saves_buffers or id(tensor) not in buffers)
    }
    for name, parameter in optimizer_parameters(runtime):
        if id(parameter) in elsewhere:
            continue
        for key, value in runtime.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"optimizer/{name}/{key}"] = value.detach()
            elif _is_list_of_tensors(value):
                found |= {f"optimizer/{name}/{key}[{n}]": one.detach() for n, one in enumerate(value)}
    return found


def rank_tensors(world: World) -> dict[str, Tensor]:
    """The current state of this rank's random generators."""
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


def small_state(runtime: Runtime) -> dict[str, Any]:
    """All but large tensors: parameter groups, schedule, scaler. The same on every rank, but for the `values` of its
    parameters and the `extra` state of its modules."""
    optimizer = runtime.optimizer
    groups = [
        {key: pack(value, f"{key!r} of the optimizer's group {n}") for key, value in group.items() if key != "params"}
        for n, group in enumerate(optimizer.param_groups)
    ]
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in optimizer_parameters(runtime):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor) and not _is_list_of_tensors(value):
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
        except NeedsPickleError:
            schedule = "replay"  # `Restorer` steps a new schedule to this position
    scaler = runtime.scaler
    return {
        "optimizer": {
            "class": kind_of(optimizer),
            "groups": groups,
            "members": runtime.optimizer_groups,
            "values": values,
            "others": others,
        },
        "schedule": schedule,
        "schedule_class": kind_of(runtime.schedule) if runtime.schedule is not None else None,
        "total_steps": runtime.total_steps,
        "extra": extra_state(runtime),
        "scaler": None if scaler is None else pack(scaler.state_dict(), "the scaler"),
    }


def model_names(runtime: Runtime) -> dict[str, Any]:
    """For `rung export`: every key of the module's state dict, in its order, and the name it is saved under.

    Tied tensors have several keys, non-persistent buffers have none. Values that the module computes for its state dict
    (`get_extra_state`, hooks) are neither parameter nor buffer and cannot be exported. What is frozen beside adapters
    has digests instead of tensors.
    """
    state = runtime.model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in _named(runtime.model)}
    base, adapters = runtime.parallel.base, describe_adapters(runtime.model)
    return {
        **({"adapters": adapters} if adapters is not None else {}),
        "base": {
            name: {"digest": base[name], "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
            for name, tensor in _named(runtime.model)
            if name in base
        },
        "state_dict": {key: names[id(value)] for key, value in state.items() if id(value) in names},
        "computed": [key for key, value in state.items() if id(value) not in names],
    }


class Restorer:
    """Restores a checkpoint's state into a runtime of any topology."""

    def __init__(self, runtime: Runtime, manifest: Mapping[str, Any]) -> None:
        self._runtime = runtime
        self._manifest = manifest
        self._tensors: Mapping[str, Any] = manifest["tensors"]
        self._state: list[tuple[int, str, Tensor]] = []  # parameter index, key, value
        self._check_model()
        self.targets: dict[str, Tensor] = {**model_tensors(runtime), **self._make_optimizer_state()}

    def _check_model(self) -> None:
        model = self._runtime.model
        base = self._runtime.parallel.base
        self._check_base(base)
        here = {name: tuple(tensor.shape) for name, tensor in _named(model) if name not in base}
        there = {
            n.removeprefix("model/"): tuple(t["shape"]) for n, t in self._tensors.items() if n.startswith("model/")
        }
        for name in set(there) - set(here):
            self._make_buffer(name)
        here = {name: tuple(tensor.shape) for name, tensor in _named(model) if name not in base}
        missing, extra = sorted(set(here) - set(there)), sorted(set(there) - set(here))
        if missing or extra:
            differences = [f"it has no {', '.join(missing[:3])}"] if missing else []
            differences += [f"the model has no {', '.join(extra[:3])}"] if extra else []
            raise CheckpointError(f"the checkpoint is of another model: {'; '.join(differences)}.")
        for name, shape in here.items():
            if shape != there[name]:
                raise CheckpointError(
                    f"the checkpoint is of another model: {name} is {list(there[name])} there and {list(shape)} here."
                )

    def _check_base(self, here: Mapping[str, str]) -> None:
        """Refuse to train adapters further beside other weights than those that they were trained with."""
        there = {name: saved["digest"] for name, saved in self._manifest.get("base", {}).items()}
        other = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        if there and here and other:
            raise CheckpointError(
                f"the adapters in the checkpoint were trained beside another base: {', '.join(other[:3])}"
                f"{f' and {len(other) - 3} more tensors' if len(other) > 3 else ''} had other values. Give the weights "
                "with which the run began (--init, or model() of the task)."
            )

    def _make_buffer(self, name: str) -> None:
        """Allocate a buffer that is None until a forward pass creates it."""
        path, _, key = name.rpartition(".")
        try:
            owner = self._runtime.model.get_submodule(path)
        except AttributeError:
            return
        buffers = buffers_of(owner)
        if key in buffers and buffers[key] is None:
            saved, world = self._tensors[f"model/{name}"], self._runtime.world
            buffer = torch.zeros(saved["shape"], dtype=DTYPES[saved["dtype"]], device=world.device)
            if not self._runtime.parallel.runs(path, world):
                buffer.is_absent = True  # type: ignore[attr-defined]  # or this rank would save it as it is now
            buffers[key] = buffer

    def _make_optimizer_state(self) -> dict[str, Tensor]:
        """Allocate the saved optimizer state by the manifest, not by a trial step, which may change other state."""
        keys: dict[str, list[str]] = {}
        for name in self._tensors:
            if name.startswith("optimizer/"):
                owner, _, key = name.removeprefix("optimizer/").rpartition("/")
                keys.setdefault(owner, []).append(key)
        targets: dict[str, Tensor] = {}
        optimizer = self._runtime.optimizer
        numbers = {id(p): n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        for name, parameter in optimizer_parameters(self._runtime):
            for key in keys.get(name, ()):
                saved = self._tensors[f"optimizer/{name}/{key}"]
                shape, dtype = tuple(saved["shape"]), DTYPES[saved["dtype"]]
                # The step of a scalar parameter stays on the host, where `load_state_dict` leaves it.
                if shape == tuple(parameter.shape) and (shape or key != "step"):
                    value = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                elif isinstance(parameter, DTensor) and shape and not is_stepped_whole(optimizer, parameter):
                    raise CheckpointError(
                        f"the optimizer keeps {key!r} of shape {list(shape)} for {name}, which is sharded here: state "
                        "of another shape than the parameter has no sharding. Resume under a strategy that leaves "
                        "parameters whole, such as ddp."
                    )
                else:
                    value = torch.zeros(shape, dtype=dtype)
                targets[f"optimizer/{name}/{key}"] = value
                self._state.append((numbers[id(parameter)], key, value))
        return targets

    def finish(self) -> None:
        """Load the rest, after the tensors were read into `targets`: optimizer, schedule, extra state, scaler."""
        runtime, saved = self._runtime, self._manifest["optimizer"]
        optimizer = runtime.optimizer
        if saved["class"] != kind_of(optimizer) or len(saved["groups"]) != len(optimizer.param_groups):
            raise CheckpointError(
                f"the checkpoint has the state of {saved['class']} with {len(saved['groups'])} parameter groups; the "
                f"task now makes {kind_of(optimizer)} with {len(optimizer.param_groups)}. Return the optimizers of the "
                f"checkpoint; {_START_ANEW}."
            )
        fresh = optimizer.state_dict()
        built = copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in fresh["param_groups"]])
        state: dict[Any, Any] = {unpack(key): unpack(value) for key, value in saved.get("others", [])}
        lists: dict[tuple[int, str], dict[int, Tensor]] = {}
        for number, key, value in self._state:
            if (item := _LIST_ITEM.fullmatch(key)) is not None:
                lists.setdefault((number, item[1]), {})[int(item[2])] = value
            else:
                state.setdefault(number, {})[key] = value
        for (number, key), items in lists.items():
            state.setdefault(number, {})[key] = [items[n] for n in sorted(items)]
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
        set_extra_state(runtime.model, self._manifest.get("extra", {}))
        if runtime.scaler is not None and self._manifest["scaler"] is not None:
            runtime.scaler.load_state_dict(unpack(self._manifest["scaler"]))

    def _undo_conversions(self) -> None:
        """Restore the dtypes of the saved state: `load_state_dict` casts it to that of the parameters."""
        optimizer = self._runtime.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, key, value in self._state:
            if _LIST_ITEM.fullmatch(key) is not None:
                continue  # of LBFGS, which has the parameters' type
            loaded = optimizer.state[parameters[number]][key]
            if key != "step" and loaded.dtype != value.dtype:
                optimizer.state[parameters[number]][key] = value.to(loaded.device)

    def _note_changed_groups(self, built: list[dict[str, Any]]) -> None:
        """Note for the user where values of the task and the checkpoint differ, and which are used."""
        kept: list[tuple[str, Any, Any]] = []
        replaced: list[tuple[str, Any, Any]] = []
        groups, saved = self._runtime.optimizer.param_groups, self._manifest["optimizer"]["groups"]
        for number, (now, packed, group) in enumerate(zip(built, saved, groups, strict=True)):
            old = {key: unpack(value) for key, value in packed.items()}
            moved = {"lr"} if "initial_lr" in old else set()  # a schedule has changed it since
            if "base_momentum" in old:  # a schedule that also cycles the momentum
                moved |= {"momentum", "betas"}
            for key in (now.keys() & old.keys()) - moved - {*_IMPLEMENTATION}:
                if _plain(now[key]) != _plain(old[key]):
                    name = "lr" if key == "initial_lr" else key
                    row = (f"{name} of group {number}" if len(groups) > 1 else name, now[key], old[key])
                    (kept if _plain(group.get(key)) == _plain(old[key]) else replaced).append(row)
        if kept:
            self._runtime.notes.append(f"optimizer: {_differences(kept)}: the checkpoint's is used; {_START_ANEW}")
        if replaced:
            self._runtime.notes.append(
                f"optimizer: {_differences(replaced)}: the task's is used, because its schedule is stepped "
                f"anew, for {self._runtime.total_steps} steps"
            )

    def _note_changed_members(self) -> None:
        """Note parameters that changed groups: a group's values are restored by its index."""
        saved = self._manifest["optimizer"].get("members")
        if saved is None:
            return
        now, old = (
            {name: f"group {number}" for number, names in enumerate(groups) for name in names}
            for groups in (self._runtime.optimizer_groups, saved)
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
            self._runtime.notes.append(f"schedule: {_differences(changed)}: the checkpoint's is used; {_START_ANEW}")

    def _finish_schedule(self, built: list[dict[str, Any]]) -> None:
        """Restore the schedule. `built`: the groups after the schedule was built, before the checkpoint was loaded."""
        schedule, saved = self._runtime.schedule, self._manifest["schedule"]
        if schedule is None:
            if saved is not None:
                rate = self._runtime.optimizer.param_groups[0].get("lr")
                self._runtime.notes.append(
                    f"schedule: the task has none now, and the checkpoint was saved with one: lr stays at {rate:g}, "
                    f"the value it had reached; {_START_ANEW}"
                )
            return
        if saved is None:
            raise CheckpointError(
                "the task has a schedule now, and the checkpoint was saved without one. Leave schedule() out; "
                f"{_START_ANEW}."
            )
        same_length = self._manifest.get("total_steps", self._runtime.total_steps) == self._runtime.total_steps
        kind, was = kind_of(schedule), self._manifest.get("schedule_class")
        if was not in (None, kind):
            if same_length:
                raise CheckpointError(
                    f"the checkpoint has the state of a {was}, and schedule() of the task now returns a {kind}. Return "
                    f"a {was} again; {_START_ANEW}."
                )
            self._runtime.notes.append(f"schedule: {was} in the checkpoint, {kind} in the task: the task's is used")
        if saved != "replay" and same_length:
            self._note_changed_schedule(unpack(saved))
            schedule.load_state_dict(unpack(saved))
            return
        # The saved state has the old length, or could not be saved: replay the steps from the start.
        groups = self._runtime.optimizer.param_groups
        reached = [group.get("lr") for group in groups]
        loaded = [dict(group) for group in groups]
        for group, values in zip(groups, built, strict=True):
            group.update(values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that no optimizer step came first
            for _ in range(int(self._manifest["step"])):
                schedule.step()
        for group, values, old in zip(groups, built, loaded, strict=True):
            # What the schedule leaves alone is the optimizer's own, such as Prodigy's estimate of the rate.
            kept = [key for key in values if key not in _SCHEDULED and _plain(group[key]) == _plain(values[key])]
            group.update({key: old[key] for key in kept if key in old})
        rates = [(float(a), float(group["lr"])) for a, group in zip(reached, groups, strict=True) if a is not None]
        if same_length and any(abs(a - b) > 1e-9 * max(abs(a), abs(b)) for a, b in rates):
            raise CheckpointError(
                f"the schedule cannot be resumed: it has state that only pickle could save, and replaying its "
                f"{self._manifest['step']} steps gives a rate of {rates[0][1]:.6g} instead of {rates[0][0]:.6g}."
            )


def _is_list_of_tensors(value: Any) -> bool:
    """As LBFGS keeps its history, each of the size of the model."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Tensor) for one in value)


def _differences(changed: list[tuple[str, Any, Any]]) -> str:
    rows = [f"{name} is {_plain(now)} in the task and {_plain(old)} in the checkpoint" for name, now, old in changed]
    return ", ".join(sorted(rows)[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")


def _plain(value: Any) -> Any:
    """A value of a parameter group in a form that compares by content: tensors and tuples become lists."""
    if isinstance(value, Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _schedule_settings(state: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a schedule's state and in those of its parts, by name."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found |= {f"{name} of part {number}": setting for name, setting in _schedule_settings(inner).items()}
        elif not key.startswith("_") and key not in _NO_SETTINGS:
            found[key] = _plain(value)
    return found


def extra_state(runtime: Runtime) -> dict[str, Any]:
    """The values that modules return from `get_extra_state`. Those of a module that another rank runs are old here."""
    found = {}
    for path, module in runtime.model.named_modules():
        computes = type(module).get_extra_state is not nn.Module.get_extra_state
        if computes and runtime.parallel.runs(path, runtime.world):
            found[path] = pack(module.get_extra_state(), f"the extra state of {path or 'the model'}")
    return found


def set_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    for path, value in saved.items():
        model.get_submodule(path).set_extra_state(unpack(value))


def optimizer_parameters(runtime: Runtime) -> Iterator[tuple[str, nn.Parameter]]:
    """The optimizer's parameters with their names in the module."""
    slices = runtime.parameter_slices  # zero1's optimizer holds slices of the parameters
    names = {id(slices.get(id(p), p)): name for name, p in runtime.model.named_parameters()}
    for group in runtime.optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
