"""Settings of a run: one frozen dataclass, filled from defaults, the task, a TOML file and flags, in that order.

The origin of each value is kept, and the resolved settings are written to the run directory as a TOML file that
`--config` reads. This module has the settings' names, types and limits, not their effects.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rung.errors import ConfigError, nearest
from rung.spec.best_metric import parse_best
from rung.spec.gradient_sync import parse_compression
from rung.spec.lora import parse_lora
from rung.spec.observability import profiled_steps, tracker_names
from rung.spec.presets import SCHEDULES
from rung.spec.task import ROLES, Task, coerce
from rung.system.untrusted import read_regular, refuse_extremes

_MAX_FILE = 2**20  # bytes of a settings file
CP_FORMS = ("ulysses", "gather", "ring")  # how context parallelism exchanges positions


def _setting(default: Any, help: str, kind: type, choices: tuple[str, ...] = (), flag: bool = False) -> Any:
    return field(default=default, metadata={"help": help, "kind": kind, "choices": choices, "flag": flag})


@dataclass(frozen=True)
class RunConfig:
    """Every setting of a run. Those with a flag are the stable core; --set, a file or the task sets the rest."""

    strategy: str | None = _setting(
        None, "how to parallelize the task, or auto; default: single, or ddp for several processes", str, flag=True
    )
    nproc: str | None = _setting(
        None, "processes on each machine, or MIN:MAX if they may change; default: one per GPU, or 1", str, flag=True
    )
    nnodes: str = _setting("1", "machines of the job, or MIN:MAX; each starts the same command", str, flag=True)
    rdzv: str | None = _setting(None, "where the machines of a job find each other: HOST:PORT", str, flag=True)
    rdzv_key: str | None = _setting(
        None,
        "file with the key that all machines share; default: RUNG_RDZV_KEY, or the user's",
        str,
        flag=True,
    )
    batch_size: int = _setting(32, "samples in one step, over all processes", int, flag=True)
    batch_tokens: int | None = _setting(
        None, "in place of --batch-size: tokens in one step, by the task's sample_lengths()", int, flag=True
    )
    micro_batch: int | None = _setting(
        None, "samples (tokens) in a forward pass of a process; gradients are accumulated over several", int, flag=True
    )
    steps: int | None = _setting(None, "stop after this many steps", int, flag=True)
    epochs: int | None = _setting(None, "stop after this many passes over the data; default: 1", int, flag=True)
    init: str | None = _setting(
        None, "weights to begin with: a .safetensors or .pt file, or a Hugging Face folder", str, flag=True
    )
    init_partial: bool = _setting(False, "take what fits of --init, and leave the rest as it is", bool, flag=True)
    lora: str | None = _setting(
        None, "train low-rank adapters beside frozen layers: r=16,alpha=32,targets=q_proj+v_proj", str, flag=True
    )
    seed: int = _setting(0, "seed of weights, sample order and random streams", int, flag=True)
    shuffle: bool | None = _setting(None, "a new sample order every epoch, or the data set's own", bool, flag=True)
    skip_bad_samples: int = _setting(
        0, "samples of the run that may raise when they are read, and are left out", int, flag=True
    )
    precision: str = _setting(
        "fp32",
        "fp32 (default), bf16, fp16, fp8 or fp64; weights are kept in fp32, or in fp64",
        str,
        ("fp32", "bf16", "fp16", "fp8", "fp64"),
        flag=True,
    )
    clip: float | None = _setting(None, "clip gradients to this global norm", float, flag=True)
    ema: float | None = _setting(None, "keep an average of the weights that decays by this, as 0.999", float, flag=True)
    swa_start: int | None = _setting(
        None, "keep the equal average of the weights after this update and all later ones (SWA)", int, flag=True
    )
    compile: bool = _setting(False, "torch.compile the model", bool, flag=True)
    activation_checkpointing: str = _setting(
        "none",
        "recompute activations in backward: none (default), full or selective",
        str,
        ("none", "full", "selective"),
        flag=True,
    )
    offload: str = _setting(
        "none", "keep sharded parameters and optimizer state in host memory", str, ("none", "cpu"), flag=True
    )
    schedule: str | None = _setting(
        None,
        "order of a pipeline's micro-batches: gpipe, 1f1b (default), interleaved or zb",
        str,
        tuple(SCHEDULES),
        flag=True,
    )
    split: str | None = _setting(
        None, "modules at which a pipeline's stages begin, as in blocks.2,head; default: by cost", str, flag=True
    )
    sequence_parallel: bool = _setting(
        False, "shard activations between tensor-parallel layers along the sequence", bool, flag=True
    )
    async_tp: bool = _setting(
        False,
        "let the compiler send messages of tensor parallelism during the products beside them (GPUs, --compile, "
        "--sequence-parallel)",
        bool,
    )
    cp_form: str = _setting(
        "auto",
        "context parallel: exchange heads (ulysses) or keys (gather, ring), or auto",
        str,
        ("auto", *CP_FORMS),
        flag=True,
    )
    expert_load: float = _setting(
        1.0,
        "plans with experts: rows of the busiest rank over those of an even choice, as expert_rank_load_max in metrics",
        float,
    )
    shard_by: str = _setting("block", "parameters to gather at a time: block, size:10M or whole", str, flag=True)
    servers: int | None = _setting(
        None, "processes that hold parameters (ps, ps-async, ddp+ps); default: 1", int, flag=True
    )
    staleness: int | None = _setting(
        None, "ps-async: updates by which a gradient may be late; default: 2 for each trainer", int, flag=True
    )
    backend: str = _setting(
        "auto",
        "auto, gloo, nccl, or mpi under mpirun; gloo lets processes share a GPU",
        str,
        ("auto", "gloo", "nccl", "mpi"),
        flag=True,
    )
    compress: str = _setting(
        "none", "compress ddp gradients: fp16, bf16, powersgd[:rank], topk[:ratio], onebit, ternary", str, flag=True
    )
    local_steps: int = _setting(1, "steps that each rank takes alone between two averagings", int, flag=True)
    outer: str = _setting(
        "average",
        "how weights are combined after local steps: average (default) or diloco",
        str,
        ("average", "diloco"),
        flag=True,
    )
    checkpoint_every: int | None = _setting(
        None, "steps between two checkpoints; the end of the run is saved, too", int, flag=True
    )
    keep: int = _setting(3, "number of newest checkpoints to keep", int, flag=True)
    patience: int | None = _setting(
        None, "stop after this many evaluations without a new best one (keep_best)", int, flag=True
    )
    replicate_state: bool = _setting(
        False, "copy each rank's state into a neighbour's memory in every step", bool, flag=True
    )
    max_restarts: int | None = _setting(
        None,
        "restarts without progress before the job fails; default: 3 if elastic, else 0",
        int,
        flag=True,
    )
    check: bool = _setting(
        True, "compare the first step on several ranks with one process; --no-check leaves it out", bool, flag=True
    )
    timeout: int = _setting(600, "seconds without progress after which a job counts as hung", int, flag=True)
    out: str | None = _setting(
        None, "run directory, or s3://BUCKET/RUN; default: runs/<task>-<strategy>-<time>", str, flag=True
    )

    profile: str | None = _setting(
        None, "trace a step with torch's profiler on every rank, or several: 10:13 (RUN/profile/)", str, flag=True
    )
    log: str | None = _setting(
        None, "send metrics to wandb, mlflow or trackio, or to several: wandb,mlflow", str, flag=True
    )

    device: str = _setting("auto", "auto, cpu or cuda", str, ("auto", "cpu", "cuda"))
    topk_values: str = _setting(
        "auto", "how topk sends a value: auto, full, half (bf16) or sign", str, ("auto", "full", "half", "sign")
    )
    compress_warmup: int | None = _setting(
        None, "steps over which topk's ratio falls (default: 4 %), or before powersgd starts (default: 0)", int
    )
    outer_lr: float = _setting(0.7, "--outer diloco: learning rate of the outer step", float)
    outer_momentum: float = _setting(0.9, "--outer diloco: Nesterov momentum of the outer step", float)
    rpc_host: str | None = _setting(
        None, "address or interface on which RPC listens; default: loopback, or the network of --rdzv", str
    )
    workers: int | str = _setting(
        0, "data-loading processes for each rank, or auto: as many as the first steps show to be needed", int
    )
    batch_norm: str = _setting(
        "sync", "statistics of the whole micro-batch, or of each rank's part", str, ("sync", "local")
    )
    unused_parameters: str = _setting(
        "error", "parameters without a gradient: an error, or skipped as torch does", str, ("error", "allow")
    )
    chunked_loss: str = _setting(
        "auto", "cross entropy without keeping logits: auto (large output layers), never, or rows in a chunk", str
    )
    fp8_scaling: str = _setting(
        "tensor", "--precision fp8: one scale for each tensor, or for each row (tensor, row)", str, ("tensor", "row")
    )
    fp8_emulate: bool = _setting(False, "--precision fp8 on a CPU, slowly, to try its numbers", bool)
    dropout: bool = _setting(True, "false turns every dropout off", bool)
    fused: bool = _setting(True, "use torch's fused optimizer when the task leaves the choice open", bool)
    memory_format: str = _setting(
        "contiguous",
        "memory layout of image batches and convolution weights: contiguous or channels_last",
        str,
        ("contiguous", "channels_last"),
    )
    gather: str = _setting(
        "auto", "type of gathered parameters: auto (on GPUs that of the computation) or fp32", str, ("auto", "fp32")
    )
    log_every: int = _setting(
        10, "steps between two reads of metrics from the device; unless 1, quick steps are read every 0.1 s", int
    )
    eval_every: str = _setting("epoch", "epoch, never, or a number of steps; always at the end unless never", str)
    ema_every: int = _setting(1, "--ema: steps between two updates of the average", int)
    eval_weights: str = _setting(
        "average", "evaluate the average of --ema or --swa-start, or the own weights", str, ("average", "own")
    )
    save_weights: bool = _setting(True, "write model.safetensors at the end", bool)
    keep_every: int | None = _setting(None, "also keep every checkpoint whose step is a multiple of this", int)
    keep_best: str = _setting(
        "none", "also keep the checkpoint of the best evaluation: loss, or a metric as top1:max or error:min", str
    )
    on_nan: str = _setting(
        "stop", "after a loss or gradient norm of nan or infinity: stop, or warn and continue", str, ("stop", "warn")
    )
    check_every: int = _setting(
        100, "steps between two comparisons of the weights that ranks hold in common; 0: never", int
    )
    store_timeout: int = _setting(60, "seconds for which a request that a store refuses is tried again", int)
    async_save: bool = _setting(True, "write checkpoints in the background", bool)
    grace_seconds: int = _setting(30, "seconds to save and exit after SIGTERM or SIGUSR1", int)
    oom_retry: bool = _setting(True, "when out of memory, continue with half the micro-batch", bool)


_MAX_CHARACTERS = 4096  # of a value; Python converts at most 4300 digits to an integer
_COUNT = re.compile("[0-9]{1,15}")
_AT_LEAST_ONE = (
    "batch_size", "batch_tokens", "micro_batch", "steps", "epochs", "log_every", "timeout", "checkpoint_every", "keep",
    "keep_every", "grace_seconds", "servers", "local_steps", "patience", "swa_start", "store_timeout",
    "ema_every",
)  # fmt: skip
_AT_LEAST_ZERO = (
    "workers", "seed", "max_restarts", "staleness", "compress_warmup", "check_every", "skip_bad_samples",
)  # fmt: skip
_WORDS_OR_COUNT = {"eval_every": (("epoch", "never"), "steps"), "chunked_loss": (("auto", "never"), "rows")}
# Upper limits as powers of 2. Other counts are below 2**48, as in checkpoints.
_BITS = {
    "seed": 63,
    "timeout": 31,
    "store_timeout": 31,
    "grace_seconds": 31,
    "workers": 16,
    "servers": 20,
    "max_restarts": 31,
    "skip_bad_samples": 20,  # checkpoints have their names
}
SETTINGS = {f.name: f for f in fields(RunConfig)}
FLAGS = [name for name, f in SETTINGS.items() if f.metadata["flag"]]


@dataclass(frozen=True)
class Resolved:
    """Settings with the origin of each, and the arguments of the task's functions with theirs."""

    config: RunConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


def resolve(
    task: Task,
    *,
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Mapping[str, str] | None = None,
    base: Mapping[str, Any] | None = None,
) -> Resolved:
    """Merge settings from all sources. `flags` are typed values, `assignments` the pairs of --set, `base` the settings
    of the run to resume."""
    values: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    known_arguments = task.arguments()

    def assign(key: str, value: Any, origin: str, given_by: str = "") -> None:
        if key in SETTINGS:
            values[key] = check(key, value)
        elif "." in key and key.partition(".")[0] in ROLES:
            task.bind({key: value})  # refuses an argument that the task does not have
            arguments[key] = coerce(key, value, known_arguments[key])
        else:
            raise ConfigError(_unknown(key, known_arguments, given_by or f"the {origin}"))
        origins[key] = origin

    for key, value in task.defaults.items():
        assign(key, value, "task")
    for key, value in (base or {}).items():
        assign(key, value, "run")
    if file is not None:
        for key, value in read_toml(file).items():
            assign(key, value, f"file {Path(file).name}")
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    for key, value in given.items():
        assign(key, value, "flag")
    for key, text in (assignments or {}).items():
        if key in given:
            raise ConfigError(f"{key} is given twice: as --{key.replace('_', '-')} and with --set.")
        assign(key, text, "flag", given_by="--set")
    _keep_one_batch(values, origins)
    config = RunConfig(**values)
    if config.steps is None and config.epochs is None:
        config = replace(config, epochs=1)
    return Resolved(config, arguments, origins)


def _keep_one_batch(values: dict[str, Any], origins: dict[str, str]) -> None:
    """A batch is so many samples, or so many tokens: the stronger source decides, and one source gives one of them."""
    if values.get("batch_tokens") is None or origins["batch_size"] == "default":
        return
    by_samples, by_tokens = (_strength(origins[key]) for key in ("batch_size", "batch_tokens"))
    if by_samples == by_tokens:
        raise ConfigError(
            f"--batch-size {values['batch_size']} and --batch-tokens {values['batch_tokens']} are two sizes of a "
            "batch: in samples, and in tokens. Keep one of them."
        )
    weaker = "batch_tokens" if by_samples > by_tokens else "batch_size"
    values.pop(weaker)
    origins[weaker] = "default"


def _strength(origin: str) -> int:
    """Of a source of settings; the later ones override the others."""
    return ["default", "task", "run", "file", "flag"].index(origin.partition(" ")[0])


def check(key: str, value: Any) -> Any:
    """Convert the value of a setting to its type, and check its limits."""
    meta = SETTINGS[key].metadata
    if value is None:
        if SETTINGS[key].default is None:
            return None
        raise ConfigError(f"{key} needs a value.")
    if key == "workers" and isinstance(value, str) and not value.strip().lstrip("-").isdigit():
        if value != "auto":
            raise ConfigError(f"workers is a whole number or auto, not {value!r}.")
        return value
    if key in ("nproc", "nnodes", "profile") and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    value = coerce(key, value, meta["kind"]() if meta["kind"] is not str else "")
    if isinstance(value, str) and len(value) > _MAX_CHARACTERS:
        raise ConfigError(f"{key} has {len(value):,} characters; at most {_MAX_CHARACTERS:,} are valid.")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(
            f"{key} cannot be {value!r}.{nearest(value, meta['choices'])} It is one of: {', '.join(meta['choices'])}."
        )
    if key == "expert_load" and not value >= 1:
        raise ConfigError(f"expert_load must be at least 1, where all ranks have as many rows, not {value}.")
    if key in _AT_LEAST_ONE and value < 1:
        raise ConfigError(f"{key} must be at least 1, not {value}.")
    if key == "ema" and not 0 < value < 1:
        raise ConfigError(f"ema must be above 0 and below 1, as 0.999, not {value}.")
    if key == "clip" and not value > 0:
        raise ConfigError(f"clip must be above 0, not {value}.")
    if key in ("nproc", "nnodes"):
        count_range(value, key)
    if key == "rdzv" and not (value.rpartition(":")[0] and _COUNT.fullmatch(value.rpartition(":")[2])):
        raise ConfigError(
            f"rdzv is the name or address of one of the machines and a port there, as in node1:29500, not {value!r}."
        )
    if key == "rdzv" and value.rpartition(":")[0].strip("[]") in ("0.0.0.0", "::"):
        raise ConfigError(f"rdzv={value} is not an address that other machines can reach: name one of the machines.")
    if key in _AT_LEAST_ZERO and value < 0:
        raise ConfigError(f"{key} cannot be negative.")
    if isinstance(value, int) and value >= 2 ** _BITS.get(key, 48):
        raise ConfigError(f"{key} must be below 2**{_BITS.get(key, 48)}, not {value}.")
    if key in _PARSED:
        _PARSED[key](value)
    if (key == "outer_lr" and not value > 0) or (key == "outer_momentum" and not 0 <= value < 1):
        raise ConfigError(f"{key} must be {'above 0' if key == 'outer_lr' else 'at least 0 and below 1'}, not {value}.")
    if key in _WORDS_OR_COUNT:
        words, what = _WORDS_OR_COUNT[key]
        if value not in words and not (_COUNT.fullmatch(value) and int(value) > 0):
            raise ConfigError(f"{key} is {words[0]!r}, {words[1]!r} or a number of {what}, not {value!r}.")
    return value


# Parsers of settings that have a syntax of their own.
_PARSED: dict[str, Callable[[str], object]] = {
    "shard_by": lambda text: shard_size(text),
    "compress": parse_compression,
    "keep_best": parse_best,
    "lora": parse_lora,
    "profile": profiled_steps,
    "log": tracker_names,
}


def count_range(text: str, what: str = "nproc") -> tuple[int, int]:
    """The minimum and maximum of 'N' or 'MIN:MAX'."""
    low, colon, high = str(text).partition(":")
    if not (_COUNT.fullmatch(low) and (_COUNT.fullmatch(high) or not colon)):
        raise ConfigError(f"{what} is a number, or MIN:MAX such as 2:4, not {text!r}.")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most:
        raise ConfigError(f"{what} must be at least 1, and MIN at most MAX, not {text}.")
    return least, most


def restarts_by_default(config: RunConfig) -> bool:
    """Whether a lost rank is replaced without --max-restarts: the number of processes may change during the run, or
    several machines take part."""
    ranges = [count_range(text) for text in (config.nproc or "1", config.nnodes)]
    return any(least != most for least, most in ranges) or ranges[1][1] > 1


def shard_size(text: str) -> int | None:
    """The number of parameters in 'size:10M'; None for 'block' and 'whole'."""
    if text in ("block", "whole"):
        return None
    head, _, size = text.partition(":")
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
    if head == "size" and size:
        number, unit = (size[:-1], units.get(size[-1].upper())) if size[-1].isalpha() else (size, 1)
        try:
            if unit is not None and float(number) > 0:
                return int(float(number) * unit)
        except ValueError:
            pass
    raise ConfigError(
        f"shard_by cannot be {text!r}. It is 'block', 'whole', or a size in parameters such as 'size:10M'."
    )


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a settings file into flat keys: settings at the top level, `function.argument` from the tables."""
    try:
        content = tomllib.loads(read_regular(Path(path), _MAX_FILE).decode("utf-8"))
        refuse_extremes(content)
    except FileNotFoundError:
        raise ConfigError(f"there is no settings file {str(path)!r}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{inner}": item for inner, item in value.items()})
        else:
            flat[key] = value
    return flat


def write_toml(resolved: Resolved, path: str | Path, heading: str) -> None:
    """Write the resolved settings, each with its origin, in a form that `--config` reads."""
    config, origins = resolved.config, resolved.origins
    lines = [f"# {heading}"]
    for name in SETTINGS:
        value = getattr(config, name)
        if name == "out":
            continue  # a run that reads this file must get a directory of its own
        if value is None or (name == "batch_size" and config.batch_tokens is not None):
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{name} = {_toml(value)}  # {origins[name]}")
    for function in ROLES:
        own = {k: v for k, v in resolved.arguments.items() if k.startswith(f"{function}.")}
        if own:
            lines.append(f"\n[{function}]")
            for key, value in own.items():
                argument = key.partition(".")[2]
                lines.append(
                    f"# {argument} is None" if value is None else f"{argument} = {_toml(value)}  # {origins[key]}"
                )
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _unknown(key: str, arguments: Mapping[str, Any], given_by: str) -> str:
    head, dot, _ = key.partition(".")
    near = nearest(key, [*SETTINGS, *arguments])
    if dot and head not in ROLES:
        near = nearest(head, ROLES) or near
    return f"there is no setting {key!r} (from {given_by}).{near}"
