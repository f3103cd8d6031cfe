"""The task: the functions that a user writes in a plain Python file, found by their names.

Required
    model() -> nn.Module                  a plain module with plain initialisation
    train_data() -> Dataset               map-style or iterable
    loss(output, target) -> Tensor        the mean over its units; or a dict of losses, which take turns in each step
    optimizer(model) -> Optimizer         ordinary torch code, parameter groups welcome; or a list or dict of several,
                                          which share the parameters out among them

Optional
    eval_data() -> Dataset                evaluated after each epoch and at the end, each sample once
    metrics(output, target) -> dict       each value either one number per sample (a tensor of the batch's length),
                                          averaged over the samples; or a pair (sum, count), reported as
                                          total sum / total count (accuracy per token, say)
    loss_weight(target) -> int | Tensor   how many units the loss averaged over (tokens that count);
                                          by default the number of samples
    loss_scope = "batch"                  the loss is that of a whole micro-batch (CLIP), no mean over samples
    schedule(optimizer, total_steps)      an LRScheduler, advanced once a step; called for each of several optimizers,
                                          with its `name` if it takes one
    collate(samples) -> batch             instead of torch's default
    eval_collate(samples) -> batch        of evaluation data, where that differs
    forward(model, batch) -> output       when the model does not take the input alone
    sample_weights(data) -> numbers       draws samples by weight, with replacement
    sample_lengths(data) -> numbers       batches of samples of similar length, or by the setting batch_tokens
    mixture = [0.7, 0.3]                  the shares of the parts of a ConcatDataset
    initial_weights() -> path or dict     a file, a Hugging Face folder or a state dict to begin with
    on_start(state), on_step(state), on_evaluation(state), on_checkpoint(state), on_end(state)
                                          called on every rank (see rung.train.hooks)
    blocks = "blocks.*"                   the repeated blocks; detected by default
    tensor_parallel = {"blocks.*.up": "colwise", ...}   tensor-parallel plan; derived by default
    remote = ["embedding", ...]           modules that are on the servers of ddp+ps
    defaults = {"batch_size": 64, ...}    any setting of the run

A batch is a pair (input, target), or a dict. Of a dict, "target" (or "labels", "label") goes to the loss and the
rest is passed to the model by name. A `forward` gets the whole batch; if that has no target, the loss gets the batch
itself.

Arguments with defaults (`def model(depth=4)`) can be set from outside: `--set model.depth=8`. A `loss` or `forward`
with an argument `log` gets a function for figures of its own: `log(name, value, reduce="mean")`. With a dict of losses,
a `forward` with an argument `turn` is told the key of the one whose turn it is.

This module reads and checks the file; processes, devices and strategies are not its concern.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rung.errors import ConfigError, TaskError, nearest
from rung.spec.turns import make_turns


@dataclass(frozen=True)
class _Role:
    """The arguments with which Rung calls a function of a task."""

    arguments: tuple[str, ...]
    required: bool = False
    may_log: bool = False  # an argument `log` gets the function that logs figures
    further: tuple[str, ...] = ()  # given to a function that takes them, without a default

    def call(self, name: str) -> str:
        return f"{name}({', '.join(self.arguments)})"


HOOKS = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end")
ROLES: dict[str, _Role] = {
    "model": _Role((), required=True),
    "train_data": _Role((), required=True),
    "loss": _Role(("output", "target"), required=True, may_log=True),
    "optimizer": _Role(("model",), required=True),
    "eval_data": _Role(()),
    "metrics": _Role(("output", "target")),
    "loss_weight": _Role(("target",)),
    "schedule": _Role(("optimizer", "total_steps"), further=("name",)),
    "collate": _Role(("samples",)),
    "eval_collate": _Role(("samples",)),
    "forward": _Role(("model", "batch"), may_log=True),
    "sample_weights": _Role(("data",)),
    "sample_lengths": _Role(("data",)),
    "initial_weights": _Role(()),
    **{name: _Role(("state",)) for name in HOOKS},
}
VALUES: dict[str, type] = {
    "blocks": str,
    "tensor_parallel": dict,
    "remote": list,
    "loss_scope": str,
    "mixture": list,
    "defaults": dict,
}
LOSS_SCOPES = ("samples", "batch")
TARGET_KEYS = ("target", "labels", "label")


@dataclass(frozen=True)
class Task:
    """A training task: the functions of a task file, under the same names, for programs that build tasks in code.

    The first four are required. `bind` sets further arguments that have defaults. `defaults` are settings of the run,
    `name` is the task's name in messages. A dict given as `loss` is kept as one function.
    """

    model: Callable[..., Any]
    train_data: Callable[..., Any]
    loss: Callable[..., Any]
    optimizer: Callable[..., Any]
    eval_data: Callable[..., Any] | None = None
    metrics: Callable[..., Any] | None = None
    loss_weight: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None
    collate: Callable[..., Any] | None = None
    eval_collate: Callable[..., Any] | None = None  # by default `collate`
    forward: Callable[..., Any] | None = None
    sample_weights: Callable[..., Any] | None = None
    sample_lengths: Callable[..., Any] | None = None
    initial_weights: Callable[..., Any] | None = None
    on_start: Callable[..., Any] | None = None
    on_step: Callable[..., Any] | None = None
    on_evaluation: Callable[..., Any] | None = None
    on_checkpoint: Callable[..., Any] | None = None
    on_end: Callable[..., Any] | None = None
    blocks: str | None = None
    tensor_parallel: Mapping[str, str] | None = None
    remote: list[str] | None = None
    loss_scope: str = "samples"  # the loss is a mean over samples; "batch": over the whole micro-batch, as InfoNCE
    mixture: list[float] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    name: str = "task"

    def __post_init__(self) -> None:
        if self.loss_scope not in LOSS_SCOPES:
            raise TaskError(
                f"{self.name}: loss_scope cannot be {self.loss_scope!r}.{nearest(self.loss_scope, LOSS_SCOPES)} "
                f"It is one of: {', '.join(LOSS_SCOPES)}."
            )
        if self.loss_scope == "batch" and self.loss_weight is not None:
            raise TaskError(
                f'{self.name}: loss_weight() counts the units of a mean, and with loss_scope = "batch" the loss is '
                "that of a whole micro-batch. Leave one of them out."
            )
        self.order()
        given: Any = self.loss
        if isinstance(given, Mapping):
            for key, loss in given.items():
                if callable(loss):
                    check_signature(f"loss[{key!r}]", loss, ROLES["loss"], where=self.name)
            turns = make_turns(given, self.name)
            object.__setattr__(self, "loss", turns)
            if self.forward is not None:
                object.__setattr__(self, "forward", turns.told_forward(self.forward))
        for name, role in ROLES.items():
            function = getattr(self, name)
            if function is not None:
                check_signature(name, function, role, where=self.name)
        # So that every caller can leave `log` out: dry runs, evaluations, the user's own code.
        for name in self.logging_functions():
            if _log_default(getattr(self, name)) is None:
                object.__setattr__(self, name, functools.partial(getattr(self, name), log=_log_nothing))

    def logging_functions(self) -> list[str]:
        """The functions that take the argument `log`."""
        return [name for name, role in ROLES.items() if role.may_log and _takes_log(getattr(self, name))]

    def order(self) -> str | None:
        """What gives the training samples another order than a shuffled one. Raises if several do."""
        names = {"sample_weights": "sample_weights()", "sample_lengths": "sample_lengths()", "mixture": "mixture"}
        found = [text for name, text in names.items() if getattr(self, name) is not None]
        if len(found) > 1:
            raise TaskError(f"{self.name}: {' and '.join(found)} each give the samples an order. Keep one of them.")
        return found[0] if found else None

    def hooks(self) -> list[str]:
        return [name for name in HOOKS if getattr(self, name) is not None]

    def with_log(self, logs: Mapping[str, Callable[..., None]]) -> Task:
        """The task whose functions log through these, by function."""
        changes: dict[str, Any] = {
            name: functools.partial(getattr(self, name), log=logs[name]) for name in self.logging_functions()
        }
        return replace(self, **changes) if changes else self

    def arguments(self) -> dict[str, Any]:
        """Every argument that can be set, as `function.argument`, and its default."""
        found = {}
        for name, role in ROLES.items():
            function = getattr(self, name)
            if function is not None:
                for parameter in _settable(function, role):
                    found[f"{name}.{parameter.name}"] = parameter.default
        return found

    def remote_patterns(self) -> list[str]:
        """The patterns of modules on servers. Raises if the task names none."""
        if not self.remote:
            raise TaskError(
                f"{self.name}: ddp+ps needs the modules to place on the servers. Name the large ones in the task, as "
                'in remote = ["embedding"], or use ddp.'
            )
        return list(self.remote)

    def bind(self, settings: Mapping[str, Any]) -> Task:
        """The task with arguments set, as in `{"model.depth": 8}`. Raises `ConfigError` for unknown ones."""
        known = self.arguments()
        bound: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            if key not in known:
                raise ConfigError(f"{self.name}: {_explain_unknown(self, key, known)}")
            function, _, argument = key.partition(".")
            bound.setdefault(function, {})[argument] = coerce(key, value, known[key])
        changes: dict[str, Any] = {
            name: functools.partial(getattr(self, name), **kwargs) for name, kwargs in bound.items()
        }
        return replace(self, **changes) if changes else self


def task_file(path: str | Path) -> Path:
    """The task's file: `path`, or `task.py` in that folder."""
    file = Path(path)
    return file / "task.py" if file.is_dir() else file


def files_of(task: str | Path) -> list[Path]:
    """The file of a task that was loaded, and those of imported modules in its folder."""
    file = task_file(task).resolve()
    real_folder = functools.cache(os.path.realpath)  # some thousand modules lie in some hundred folders
    found = {file}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        # Some modules of torch have a __file__ without a directory, which would resolve to the working directory.
        if name is not None and os.path.isabs(name):
            found.add(Path(real_folder(os.path.dirname(name)), os.path.basename(name)))
    own = (path for path in found if path.is_relative_to(file.parent) and path.suffix == ".py")
    return sorted(path for path in own if not {"site-packages", ".venv"} & set(path.relative_to(file.parent).parts))


def load_task(path: str | Path) -> Task:
    """Import a task file, or the `task.py` of a folder, and check its functions without calling them."""
    file = task_file(path)
    if not file.is_file():
        siblings = [str(p) for p in sorted(file.parent.glob("*.py"))] if file.parent.is_dir() else []
        raise TaskError(f"there is no task file {str(path)!r}.{nearest(str(file), siblings)}")
    module = _import_file(file)
    found = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    _refuse_misspelt(file, module, found)
    missing = [name for name, role in ROLES.items() if role.required and name not in found]
    if missing:
        own = [key for key, value in found.items() if callable(value)]
        hints = "".join(f"\n  missing: def {ROLES[name].call(name)}{_hint_for(name, own)}" for name in missing)
        raise TaskError(f"{file} is not a complete task.{hints}\n`rung new NAME` writes a task file that runs.")
    chosen = {key: found[key] for key in (*ROLES, *VALUES) if key in found}
    for key, kind in VALUES.items():
        if key in chosen and not isinstance(chosen[key], kind):
            raise TaskError(f"{file}: {key} must be a {kind.__name__}, but it is {chosen[key]!r}.")
    for key in ROLES:
        if key in chosen and not callable(chosen[key]) and not (key == "loss" and isinstance(chosen[key], dict)):
            raise TaskError(f"{file}: {key} must be a function, called as {ROLES[key].call(key)}.")
    name = file.resolve().parent.name if file.stem == "task" else file.stem
    return Task(**chosen, name=name)


def check_signature(name: str, function: Callable[..., Any], role: _Role, where: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin without a signature: errors show when it is called
    logs = {"log": None} if role.may_log and _takes_log(function) else {}
    if logs and not (_log_default(function) is None or callable(_log_default(function))):
        raise TaskError(
            f"{where}: the argument log of {name}() gets a function, log(name, value), and its default is "
            f"{_log_default(function)!r}. Leave the default out, or rename the argument."
        )
    taken = [p.name for p in signature.parameters.values() if p.name in role.further and p.default is p.empty]
    try:
        signature.bind(*role.arguments, **logs, **dict.fromkeys(taken))
    except TypeError as error:
        raise TaskError(
            f"{where}: {name}{signature} cannot be called as {role.call(name)}: {error}. "
            f"Further arguments need defaults; they are set with --set {name}.ARGUMENT=VALUE."
        ) from None


def takes_name(schedule: Callable[..., Any]) -> bool:
    """Whether a schedule is to be told the name of its optimizer. With a default it is a setting like others."""
    try:
        name = inspect.signature(schedule).parameters.get("name")
    except (TypeError, ValueError):
        return False
    return name is not None and name.default is name.empty


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a batch into the model's input and the loss's target."""
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
        return batch, batch
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    return batch, batch


def has_target(batch: Any) -> bool:
    if isinstance(batch, Mapping):
        return any(key in batch for key in TARGET_KEYS)
    return isinstance(batch, tuple | list) and len(batch) == 2


def coerce(key: str, value: Any, default: Any) -> Any:
    """Convert a value from a flag (a string) or a file (typed) to the type of the default."""
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off", "1", "0"):
            return value.lower() in ("true", "yes", "on", "1")
        raise ConfigError(f"{key} is a switch (true or false), not {value!r}.")
    if isinstance(default, int):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str):
            try:
                return int(value.replace("_", ""))
            except ValueError:
                pass
        raise ConfigError(f"{key} is a whole number, not {value!r}.")
    if isinstance(default, float):
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                pass
        raise ConfigError(f"{key} is a number, not {value!r}.")
    if isinstance(default, str):
        return str(value)
    if isinstance(default, list | tuple):
        items = _literal(value if value.strip().startswith("[") else f"[{value}]") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{key} is a list, such as [1, 2], not {value!r}.")
        return type(default)(items)
    return _literal(value) if isinstance(value, str) else value


def _literal(text: str) -> Any:
    """Parse text of unknown type: a TOML value if it is one, else the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _parameters(function: Callable[..., Any] | None) -> Mapping[str, inspect.Parameter]:
    """The named parameters of a function; none if it is a builtin without a signature."""
    try:
        parameters = inspect.signature(function).parameters if function is not None else {}
    except (TypeError, ValueError):
        return {}
    return {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _settable(function: Callable[..., Any], role: _Role) -> list[inspect.Parameter]:
    named = list(_parameters(function).values())[len(role.arguments) :]
    reserved = ("log",) if role.may_log else ()
    return [p for p in named if p.default is not inspect.Parameter.empty and p.name not in reserved]


def _takes_log(function: Callable[..., Any] | None) -> bool:
    return "log" in _parameters(function)


def _log_default(function: Callable[..., Any]) -> Any:
    default = _parameters(function)["log"].default
    return None if default is inspect.Parameter.empty else default


def _log_nothing(name: str, value: Any, reduce: str = "mean") -> None:
    """In place of `log` where nothing is trained."""


def _explain_unknown(task: Task, key: str, known: Mapping[str, Any]) -> str:
    function, dot, argument = key.partition(".")
    if dot and function in ROLES and getattr(task, function, None) is None:
        return f"there is no {function}() in this task, so {key!r} cannot be set."
    own = [name.partition(".")[2] for name in known if name.startswith(f"{function}.")]
    if dot and function in ROLES:
        settable = ", ".join(own) if own else "nothing"
        return f"{function}() has no argument {argument!r}.{nearest(argument, own)} It takes: {settable}."
    return f"there is no setting {key!r}.{nearest(key, known)}"


def _import_file(file: Path) -> ModuleType:
    module_name = f"rung_task_{file.resolve().parent.name}_{file.stem}".replace("-", "_").replace(".", "_")
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise TaskError(f"{file} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    # Registered, because data workers and pickled data sets look their classes up by module name.
    sys.modules[module_name] = module
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # a task may import helpers from files beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = traceback.format_exception(error)
        own = [line for line in lines if str(file) in line]
        place = f"\n{own[-1].rstrip()}" if own else ""
        raise TaskError(f"{file} does not load: {type(error).__name__}: {error}{place}") from error
    return module


def _refuse_misspelt(file: Path, module: ModuleType, found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if key in ROLES or key in VALUES:
            continue
        own_function = inspect.isfunction(value) and value.__module__ == module.__name__
        if own_function and key.startswith("on_"):
            raise TaskError(
                f"{file}: there is no hook {key!r}, and it would never be called.{nearest(key, HOOKS)} The hooks are "
                f"{', '.join(HOOKS)}; rename the function if it is none."
            )
        candidates = [n for n in ROLES if n not in found] if own_function else []
        if isinstance(value, str | dict):
            candidates = [n for n in VALUES if n not in found]
        match = difflib.get_close_matches(key, candidates, n=1, cutoff=0.85)
        if match:
            raise TaskError(
                f"{file}: {key!r} looks like a misspelt {match[0]!r} and would be ignored. "
                f"Rename it to {match[0]!r}, or to a less similar name."
            )


def _hint_for(name: str, own: list[str]) -> str:
    match = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    return f"   (is it {match[0]!r}?)" if match else ""
