"""Whether settings, strategy and task go together, and what a strategy makes of the settings."""

from __future__ import annotations

from rung.best import parse_best
from rung.config import RunConfig
from rung.errors import ConfigError
from rung.exchange import refuse_exchange
from rung.looking import profiled_steps
from rung.strategy import Layout
from rung.task import Task


def refuse_contradictions(config: RunConfig, layout: Layout) -> None:
    """What can be known to be impossible before a process starts."""
    if config.offload != "none" and not layout.shards_parameters:
        raise ConfigError(
            f"--offload {config.offload} keeps sharded state in host memory, and {layout.name} shards no parameters. "
            "Use zero2, zero3, fsdp or hsdp."
        )
    for key in ("schedule", "split"):
        value = getattr(config, key)
        if value is not None and layout.pp == 1:
            raise ConfigError(f"--{key} {value} is for a pipeline, and {layout.name} is none. Use pp, or leave it out.")
    if config.sequence_parallel and layout.tp == 1:
        raise ConfigError(
            f"--sequence-parallel belongs to tensor parallelism, and {layout.name} has none. Use tp, as in 'fsdp,tp2'."
        )
    if config.servers is not None and not layout.servers:
        raise ConfigError(
            f"--servers {config.servers} is for ps, ps-async and ddp+ps, and {layout.name} has no servers."
        )
    if config.staleness is not None and layout.kind != "ps-async":
        raise ConfigError(
            f"--staleness {config.staleness} is for ps-async, and under {layout.name} no gradient is late."
        )
    refuse_exchange(config, layout)
    if config.precision == "fp16" and layout.uses_rpc:
        raise ConfigError(
            f"{layout.name} updates where no loss is seen, so nobody there can tell a gradient that overflowed. "
            "Use --precision bf16 or fp32."
        )
    if config.replicate_state and layout.kind == "ps-async":
        raise ConfigError(
            "--replicate-state keeps the state of each step, and under ps-async steps overlap: there is none between "
            "two checkpoints. Use --checkpoint-every, or ps."
        )
    if config.profile is not None:
        first = profiled_steps(config.profile)[0]
        if config.steps is not None and first > config.steps:
            raise ConfigError(f"--profile {config.profile} begins after the last step, which is {config.steps}.")
        if layout.kind == "ps-async":
            raise ConfigError(
                "--profile traces steps that all ranks take together, and under ps-async none are. Use ps."
            )
    if config.rpc_host is not None and not layout.uses_rpc:
        raise ConfigError(f"rpc_host={config.rpc_host} is for strategies over RPC, and {layout.name} is none.")
    if config.compile and layout.kind == "dp":
        raise ConfigError(
            f"{layout.name} runs copies of the model in threads, and torch.compile is not made for that. Use ddp with "
            "--compile, or leave it out."
        )
    if layout.kind == "rpc-pp" and config.schedule not in (None, layout.schedule):
        raise ConfigError(
            f"{layout.name} runs all forwards, then all backwards. For --schedule {config.schedule} use pp{layout.pp}."
        )
    apart = {"compiled code": config.compile, "activation checkpointing": config.activation_checkpointing != "none"}
    for what, asked in apart.items():
        if asked and layout.pp > 1 and layout.schedule == "zb":
            raise ConfigError(
                f"the zero-bubble schedule takes backward apart, which cannot be done with {what}. "
                "Use --schedule 1f1b or interleaved, or leave the other out."
            )
    if config.micro_batch is not None and config.micro_batch > config.batch_size:
        raise ConfigError(f"a micro-batch of {config.micro_batch} does not fit into a batch of {config.batch_size}.")


def refuse_best_without_evaluation(task: Task, config: RunConfig) -> None:
    """What `keep_best` needs of a task. Whether its metrics have the name is seen when the ranks have built it."""
    goal = parse_best(config.keep_best)
    if goal is None:
        return
    if config.eval_every == "never":
        raise ConfigError(
            f"keep_best={config.keep_best} looks at evaluations, and eval_every=never asks for none. Leave one out: "
            "keep_best=none, or eval_every=epoch."
        )
    if task.eval_data is None:
        raise ConfigError(
            f"keep_best={config.keep_best} looks at evaluations, and {task.name} has no eval_data(). Add it, or leave "
            "keep_best out."
        )
    if goal.metric != "loss" and task.metrics is None:
        raise ConfigError(
            f"keep_best={config.keep_best}: {task.name} has no metrics(), so an evaluation gives the loss alone. "
            "Use keep_best=loss."
        )


def without_use(layout: Layout) -> set[str]:
    """Settings that say how a strategy does its work, and mean nothing to a layout of another kind."""
    useless = {
        "schedule": layout.pp == 1,
        "split": layout.pp == 1,
        "sequence_parallel": layout.tp == 1,
        "offload": not layout.shards_parameters,
        "servers": not layout.servers,
        "staleness": layout.kind != "ps-async",
        "rpc_host": not layout.uses_rpc,
    }
    return {name for name, is_useless in useless.items() if is_useless}


def micro_batch_size(config: RunConfig, layout: Layout) -> int | None:
    """Samples a rank takes at a time. A pipeline needs several micro-batches: by default two for each stage."""
    if config.micro_batch is not None or layout.pp == 1:
        return config.micro_batch
    return -(-config.batch_size // (layout.num_data_ranks * 2 * layout.num_stages))


def half_micro_batch(config: RunConfig, layout: Layout) -> int | None:
    """Half of what a rank takes at a time, if that can be halved."""
    share = -(-config.batch_size // layout.num_data_ranks)
    present = min(micro_batch_size(config, layout) or share, share)
    return -(-present // 2) if present > 1 else None
