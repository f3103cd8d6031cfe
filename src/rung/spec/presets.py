"""The table of strategies and their abilities, for checks, commands and documents. It does not use layouts.

A row of `PRESETS` is a name that `--strategy` takes. `ABILITIES` lists the features that a strategy may support. Most
strategies support most of them, so a row lists those that it refuses, each with a reason and the nearest choice. A
feature of few strategies is listed under `gives` in their rows, and its `lacking` is the reason of all others. A
composition supports a feature if one of its parts gives it and none refuses it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Refusal:
    """Why a strategy does not support a feature, and the nearest choice.

    {asked} is the setting as the user gave it, {name} the layout, {stages} its number of stages, {givers} the
    strategies that support the feature, {stand_in} a layout that can be planned instead.
    """

    why: str
    instead: str

    def text(self, **values: object) -> str:
        return f"{self.why} {self.instead}".format(**values)


@dataclass(frozen=True)
class Ability:
    """A feature that a strategy may support.

    settings: the first requests it, with one of `values` if some are listed; the others refine it.
    lacking: for a feature of few strategies, the reason of the others. Its settings do not apply to them.
    """

    title: str
    settings: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    lacking: Refusal | None = None


_NO_PIPELINE = Refusal("{asked} is for a pipeline, and {name} has none.", "Use pp, or leave it out.")
_OR_LEAVE_OUT = "Use --strategy {givers}, or leave it out."
_OR_NEVER = "Leave it out: chunked_loss=auto does without where it must."
_ONLY_DDP = Refusal("{asked} changes how ddp synchronizes gradients; {name} does so in another way.", _OR_LEAVE_OUT)

ABILITIES: dict[str, Ability] = {
    "offload": Ability("`--offload cpu`", ("offload",), lacking=Refusal(
        "{asked} keeps sharded state in host memory, and {name} shards no parameters.", "Use {givers}.")),
    "schedule": Ability("`--schedule`", ("schedule",), lacking=_NO_PIPELINE),
    "other_schedules": Ability(
        "`--schedule` other than gpipe", ("schedule",), ("1f1b", "interleaved", "zb"), lacking=_NO_PIPELINE),
    "split": Ability("`--split`", ("split",), lacking=_NO_PIPELINE),
    "sequence_parallel": Ability("`--sequence-parallel`", ("sequence_parallel",), lacking=Refusal(
        "{asked} belongs to tensor parallelism, and {name} has none.", "Use tp, as in 'fsdp,tp2'.")),
    "async_tp": Ability("`async_tp`", ("async_tp",), lacking=Refusal(
        "{asked} belongs to tensor parallelism, and {name} has none.", "Use tp, as in 'fsdp,tp2'.")),
    "cp_form": Ability("`--cp-form`", ("cp_form",), lacking=Refusal(
        "{asked} belongs to context parallelism, and {name} has none.", "Use cp, as in 'fsdp,cp2'.")),
    "servers": Ability("`--servers`", ("servers",), lacking=Refusal(
        "{asked} is for strategies with servers, and {name} has no servers.", _OR_LEAVE_OUT)),
    "staleness": Ability("`--staleness`", ("staleness",), lacking=Refusal(
        "{asked} is for {givers}, and under {name} no gradient is late.", _OR_LEAVE_OUT)),
    "compress": Ability("`--compress`", ("compress", "compress_warmup", "topk_values"), lacking=_ONLY_DDP),
    "local_steps": Ability(
        "`--local-steps`", ("local_steps", "outer", "outer_lr", "outer_momentum"), lacking=_ONLY_DDP),
    "fp16": Ability("`--precision fp16`", ("precision",), ("fp16",)),
    "replicate_state": Ability("`--replicate-state`", ("replicate_state",)),
    "patience": Ability("`--patience`", ("patience",)),
    "profile": Ability("`--profile`", ("profile",)),
    "rpc": Ability("`rpc_host`", ("rpc_host",), lacking=Refusal(
        "{asked} is for strategies over RPC, and {name} uses none.", _OR_LEAVE_OUT)),
    "mpi": Ability("`--backend mpi`", ("backend",), ("mpi",)),
    "compile": Ability("`--compile`", ("compile",)),
    "activation_checkpointing": Ability("`--activation-checkpointing`", ("activation_checkpointing",)),
    "accumulate": Ability("`--micro-batch`", ("micro_batch",)),
    "clip": Ability("`--clip`", ("clip",)),
    "ema": Ability("`--ema`", ("ema", "eval_weights", "ema_every")),
    "swa": Ability("`--swa-start`", ("swa_start",)),
    "lora": Ability("`--lora`", ("lora",)),
    "batch_norm_sync": Ability("`batch_norm=sync`"),
    "chunked_loss": Ability("`chunked_loss`: cross entropy without keeping logits"),
    "remote_modules": Ability(
        "a task's `remote` modules", lacking=Refusal("{name} keeps no modules on servers.", _OR_LEAVE_OUT)),
    "iterable_data": Ability("an iterable data set"),
    "skip_bad_samples": Ability("`--skip-bad-samples`", ("skip_bad_samples",)),
    "hooks": Ability("a task's hooks and `log`"),
    "forward_log": Ability("`log` in a task's `forward`"),
    "turns": Ability("a dict of losses, which take turns"),
    "resume": Ability("`--resume`, from any other strategy"),
    "elastic": Ability("`--nproc MIN:MAX`, `--nnodes MIN:MAX`"),
    "session": Ability("`rung.open_session`"),
    "check": Ability("the first step compared with one process"),
    "verify": Ability("`rung verify`: the numbers of one process"),
    "plan": Ability("`rung plan`, `rung explain`"),
    "trace": Ability("`rung compare`: every message of a step"),
}  # fmt: skip


@dataclass(frozen=True)
class Preset:
    """A name for a family of layouts.

    axis: the axis that an unsized name fills, or "none" (single), "both" (hsdp), "devices" (dp's threads).
    zero: the state that is sharded along it (see `Layout`).
    title: the field's name for it. rung: its complexity, by the concepts that a user needs to run it.
    kind: "mesh" for a point of the device mesh, else the name of a strategy with a runtime of its own.
    runtime: the module below `rung.runtime` that builds such a strategy (see `build_runtime`).
    composes: whether it can be part of a composition. tried: whether commands that try several strategies include it
    on its own ("alone") or in compositions ("composed").
    has_common_steps: whether all ranks take each step together. stand_in: the layout to plan instead.
    """

    axis: str
    zero: int
    summary: str
    title: str = ""
    rung: float = 1
    kind: str = "mesh"
    runtime: str = ""
    composes: bool = True
    tried: tuple[str, ...] = ()
    has_common_steps: bool = True
    stand_in: str = ""
    gives: tuple[str, ...] = ()
    refuses: Mapping[str, Refusal] = field(default_factory=dict)


@dataclass(frozen=True)
class Schedule:
    """An order of a pipeline's micro-batches."""

    summary: str
    stages_per_rank: int = 1
    refuses: Mapping[str, Refusal] = field(default_factory=dict)


_SENDS_CALLS = {
    "plan": Refusal(
        "{name} cannot be planned or explained: it sends calls between processes or threads, and a plan traces "
        "collectives and a pipeline's messages only.",
        "Run it with `rung train`, or plan {stand_in}.",
    ),
    "trace": Refusal("{name} sends calls between processes or threads, which are not traced.", "Use {stand_in}."),
}
_ONE_LOSS = Refusal("{asked}: {name} trains all parameters with one loss.", "Use ddp, zero1 to zero3, hsdp or tp.")
_OVER_RPC = {
    "turns": _ONE_LOSS,
    "fp16": Refusal(
        "{name} updates parameters on ranks without a loss, which cannot detect an overflow of gradients.",
        "Use --precision bf16 or fp32.",
    ),
    "mpi": Refusal(
        "{asked} is for collectives, and {name} sends tensors over RPC, which has its own transport.",
        "Leave --backend out; mpirun can start it as well.",
    ),
    **_SENDS_CALLS,
}
_ONE_PROCESS = Refusal("{asked}: one process sends no gradients.", "Use --nproc 2 or more, with ddp, or leave it out.")
_CUTS_MODEL = {"compress": _ONLY_DDP, "local_steps": _ONLY_DDP}
_KEEPS_LOGITS = Refusal("{asked}: under {name} the logits are an output that is handed on before the loss.", _OR_NEVER)
_NO_COMMON_STEP = Refusal(
    "{asked}: under {name} trainers take no steps together, and no rank has the figures of one.",
    "Use ps, or leave it out.",
)
_EVERYWHERE = ("alone", "composed")
_SHARDED = ("offload",)

PRESETS: dict[str, Preset] = {
    "single": Preset(
        "none", 0, "one process, no communication",
        rung=0, composes=False, refuses={"compress": _ONE_PROCESS, "local_steps": _ONE_PROCESS},
    ),
    "ddp": Preset(
        "dp_replicate", 0, "DistributedDataParallel: whole model on each rank, gradients averaged",
        title="DDP", rung=1, tried=_EVERYWHERE, gives=("compress", "local_steps"),
    ),
    "zero1": Preset(
        "dp_shard", 1, "ddp with the optimizer state sharded",
        title="ZeRO-1", rung=2, tried=_EVERYWHERE,
    ),
    "zero2": Preset(
        "dp_shard", 2, "gradients and optimizer state sharded; parameters kept from forward to backward",
        title="ZeRO-2", rung=3, tried=_EVERYWHERE, gives=_SHARDED,
    ),
    "zero3": Preset(
        "dp_shard", 3, "parameters, gradients and optimizer state sharded (FSDP2)",
        title="FSDP", rung=4, tried=("alone",), gives=_SHARDED,
    ),
    "fsdp": Preset(
        "dp_shard", 3, "another name for zero3",
        title="FSDP", rung=4, tried=("composed",), gives=_SHARDED,
    ),
    "hsdp": Preset(
        "both", 3, "fsdp inside groups, replicated across them: hsdpRxS, R replicas of S shards",
        title="HSDP", rung=4, gives=_SHARDED,
    ),
    "tp": Preset(
        "tp", 0, "tensor parallel: the matrices of each layer sharded over the ranks",
        rung=5, gives=("sequence_parallel", "async_tp"),
        refuses=_CUTS_MODEL,
    ),
    "pp": Preset(
        "pp", 0, "pipeline parallel: the layers divided into stages; pp2:gpipe also sets the schedule",
        rung=5, gives=("schedule", "other_schedules", "split"),
        refuses={"turns": _ONE_LOSS, **_CUTS_MODEL},
    ),
    "cp": Preset(
        "cp", 0, "context parallel: the positions of each sequence shared out; attention exchanges keys and values",
        title="context parallel", rung=5, gives=("cp_form",),
        refuses={"turns": _ONE_LOSS, **_CUTS_MODEL},
    ),
    "ep": Preset(
        "ep", 0, "expert parallel: data-parallel neighbours share out the experts of a layer and exchange tokens",
        title="expert parallel", rung=5, refuses=_CUTS_MODEL,
    ),
    "dp": Preset(
        "devices", 0, "DataParallel: one process with a thread for each device; dp4 uses four devices",
        rung=1.5, kind="dp", runtime="data_parallel.runtime", composes=False, stand_in="single",
        refuses={
            "compile": Refusal(
                "{name} runs copies of the model in threads, which torch.compile does not support.",
                "Use ddp with --compile, or leave it out."),
            "check": Refusal("{name} is one process.", "Use `rung verify`."),
            "forward_log": Refusal(
                "{asked}: {name} runs forward in threads, on parts of a batch that may differ in size.",
                "Use log in loss(), or ddp."),
            "chunked_loss": _KEEPS_LOGITS,
            "turns": _ONE_LOSS,
            "batch_norm_sync": Refusal("under {name} a batch norm sees one replica's part of the batch.", "Use ddp."),
            **_SENDS_CALLS,
        },
    ),
    "ps": Preset(
        "dp_replicate", 0, "parameter server: trainers push gradients and pull parameters, in step",
        rung=4, kind="ps", runtime="parameter_server.sync", composes=False, stand_in="ddp", gives=("servers", "rpc"),
        refuses=_OVER_RPC,
    ),
    "ps-async": Preset(
        "dp_replicate", 0, "parameter server, each trainer at its own pace (--staleness)",
        rung=4, kind="ps-async", runtime="parameter_server.async_trainer", composes=False, stand_in="ddp",
        has_common_steps=False, gives=("servers", "rpc", "staleness"),
        refuses={
            "replicate_state": Refusal(
                "{asked} copies the state of each step, and under {name} steps overlap: only checkpoints have a "
                "consistent state.", "Use --checkpoint-every, or ps."),
            "patience": Refusal(
                "{asked} ends all ranks after the same step, and under {name} they take none together.", "Use ps."),
            "profile": Refusal(
                "{asked} traces steps that all ranks take together, and under {name} there are none.", "Use ps."),
            "session": Refusal("{name} has no steps that all processes take together.", "Use `rung train`, or ps."),
            "hooks": _NO_COMMON_STEP,
            "forward_log": _NO_COMMON_STEP,
            "iterable_data": Refusal(
                "{name} hands out batches in any order, and an iterable data set has a fixed one.", "Use ps."),
            "skip_bad_samples": Refusal(
                "{asked} counts what all ranks leave out of a batch, and under {name} a trainer has whole batches of "
                "its own.", "Use ps, or let the data set catch the error."),
            "check": Refusal("{name} has no steps that all processes take together.", "Use ps."),
            "verify": Refusal("{name} gives other numbers than one process: gradients are stale.", "Use ps."),
            **_OVER_RPC,
        },
    ),
    "ddp+ps": Preset(
        "dp_replicate", 0, "ddp among trainers, the task's `remote` modules on servers",
        rung=4, kind="ddp+ps", runtime="parameter_server.remote_modules", composes=False, stand_in="ddp",
        gives=("servers", "rpc", "remote_modules"), refuses={"chunked_loss": _KEEPS_LOGITS, **_OVER_RPC},
    ),
    "rpc-pp": Preset(
        "pp", 0, "pipeline over RPC, with distributed autograd and optimizer",
        rung=8, kind="rpc-pp", runtime="rpc_pipeline", composes=False, stand_in="pp{stages}:gpipe",
        gives=("schedule", "split", "rpc"),
        refuses={
            "chunked_loss": _KEEPS_LOGITS,
            "other_schedules": Refusal("{name} runs all forwards, then all backwards.", "For {asked} use pp{stages}."),
            **_OVER_RPC,
        },
    ),
}  # fmt: skip

_WITH_ZERO_BUBBLE = {
    name: Refusal(
        f"the zero-bubble schedule splits the backward pass, which is not possible with {what}.",
        "Use --schedule 1f1b or interleaved, or leave the other out.",
    )
    for name, what in (("compile", "compiled code"), ("activation_checkpointing", "activation checkpointing"))
}

SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("all forwards, then all backwards"),
    "1f1b": Schedule("one forward, one backward: fewer activations held (default)"),
    "interleaved": Schedule("1f1b with two stages on each rank: a smaller bubble, more messages", stages_per_rank=2),
    "zb": Schedule("zero bubble: weight gradients fill the bubble", refuses=_WITH_ZERO_BUBBLE),
}


def givers(ability: str) -> list[str]:
    """The presets that list an ability under `gives`."""
    return [name for name, preset in PRESETS.items() if ability in preset.gives]


def tried(where: Literal["alone", "composed"]) -> list[str]:
    """The data-parallel presets to try "alone" or in compositions ("composed")."""
    return [name for name, preset in PRESETS.items() if where in preset.tried]


def ability_settings(*abilities: str) -> set[str]:
    """The settings that request or refine some abilities."""
    return {setting for ability in abilities for setting in ABILITIES[ability].settings}
