"""Checks of settings against strategy and task, and settings that follow from the strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rung.errors import ConfigError, StrategyError
from rung.spec.abilities import can, why_not
from rung.spec.best_metric import parse_best
from rung.spec.config import SETTINGS, RunConfig
from rung.spec.gradient_sync import validate_gradient_sync
from rung.spec.lora import parse_lora
from rung.spec.observability import profiled_steps
from rung.spec.presets import ABILITIES, Ability, ability_settings
from rung.spec.strategy import Layout
from rung.spec.task import Task
from rung.spec.turns import turns_of


def validate_config(config: RunConfig, layout: Layout) -> None:
    """Refuse settings that cannot work with the layout, before a process starts."""
    for name, ability in ABILITIES.items():
        reason = why_not(layout, name, as_given(config, ability.settings[0])) if is_requested(config, ability) else None
        if reason is not None:
            raise ConfigError(reason)
    validate_gradient_sync(config)
    if config.ema is not None and config.swa_start is not None:
        raise ConfigError(
            f"--ema {config.ema} and --swa-start {config.swa_start} are two averages of the weights, and a run keeps "
            "one. Leave one of them out."
        )
    averages = next((name for name in ("ema", "swa_start") if getattr(config, name) is not None), None)
    if averages is not None and config.local_steps > 1:
        raise ConfigError(
            f"{as_given(config, averages)} averages the weights of every step, and with --local-steps "
            f"{config.local_steps} each rank has others. Leave one of them out."
        )
    if config.eval_weights != "average" and averages is None:
        raise ConfigError(f"eval_weights={config.eval_weights} is for --ema and --swa-start, and neither is set.")
    if config.ema_every > 1 and config.ema is None:
        raise ConfigError(f"ema_every={config.ema_every} is for --ema, which is not set.")
    if config.swa_start is not None and config.steps is not None and config.swa_start > config.steps:
        raise ConfigError(f"--swa-start {config.swa_start} is after the last step, {config.steps}.")
    if config.lora is not None and parse_lora(config.lora).base == "bf16" and config.precision != "bf16":
        raise ConfigError(
            f"--lora {config.lora}: layers that are kept in bf16 compute in it, and --precision is {config.precision}. "
            "Use --precision bf16, or leave base out."
        )
    if config.profile is not None and config.steps is not None and profiled_steps(config.profile)[0] > config.steps:
        raise ConfigError(f"--profile {config.profile} begins after the last step, {config.steps}.")
    if config.micro_batch is not None and config.micro_batch > batch_units(config):
        raise ConfigError(f"a micro-batch of {config.micro_batch} does not fit into a batch of {batch_units(config)}.")


def refuse_task(task: Task, layout: Layout) -> None:
    """Refuse what the task has and the layout cannot do."""
    logs = [f"log in {name}()" for name in task.logging_functions()]
    asked = {
        "hooks": [*(f"{name}()" for name in task.hooks()), *logs],
        "forward_log": [text for text in logs if "forward" in text],
        "turns": ["a dict of losses"] if turns_of(task.loss) is not None else [],
    }
    for ability, found in asked.items():
        reason = why_not(layout, ability, found[0]) if found else None
        if reason is not None:
            raise StrategyError(f"{task.name}: {reason}")


def is_requested(config: RunConfig, ability: Ability) -> bool:
    """Whether the settings request an ability."""
    if not ability.settings:
        return False
    value = getattr(config, ability.settings[0])
    return value in ability.values if ability.values else value != SETTINGS[ability.settings[0]].default


def as_given(config: RunConfig, name: str) -> str:
    """A setting as a user writes it: --offload cpu, --compile or rpc_host=eth0."""
    value = getattr(config, name)
    if not SETTINGS[name].metadata["flag"]:
        return f"{name}={value}"
    return f"--{name.replace('_', '-')}{'' if value is True else f' {value}'}"


def refuse_best_without_evaluation(task: Task, config: RunConfig) -> None:
    """Refuse `keep_best` without evaluations, and `--patience` without it. The metric's name is checked later."""
    goal = parse_best(config.keep_best)
    if goal is None:
        if config.patience is not None:
            raise ConfigError(
                f"--patience {config.patience} needs what to watch: --set keep_best=loss, or a metric as top1:max."
            )
        return
    if config.eval_every == "never":
        raise ConfigError(
            f"keep_best={config.keep_best} needs evaluations, and eval_every=never turns them off. Leave one out: "
            "keep_best=none, or eval_every=epoch."
        )
    if task.eval_data is None:
        raise ConfigError(
            f"keep_best={config.keep_best} needs evaluations, and {task.name} has no eval_data(). Add it, or leave "
            "keep_best out."
        )
    if goal.metric != "loss" and task.metrics is None:
        raise ConfigError(
            f"keep_best={config.keep_best}: {task.name} has no metrics(), so an evaluation gives only the loss. "
            "Use keep_best=loss."
        )


def inapplicable_settings(layout: Layout) -> set[str]:
    """Settings of abilities that the layout lacks, and which therefore do not apply to it."""
    some_can = [name for name, ability in ABILITIES.items() if ability.lacking is not None and not ability.values]
    return ability_settings(*(name for name in some_can if not can(layout, name)))


def fit_settings(config: RunConfig, layout: Layout) -> RunConfig:
    """Reset the settings that do not apply to the layout to their defaults."""
    defaults: dict[str, Any] = {name: SETTINGS[name].default for name in inapplicable_settings(layout)}
    return replace(config, **defaults)


def batch_units(config: RunConfig) -> int:
    """The samples of a batch, or with --batch-tokens its tokens; a micro-batch is in the same unit."""
    return config.batch_tokens if config.batch_tokens is not None else config.batch_size


def micro_batch_size(config: RunConfig, layout: Layout) -> int | None:
    """One micro-batch of a rank. A pipeline needs several micro-batches: by default two for each stage."""
    if config.micro_batch is not None or layout.num_stages == 1:
        return config.micro_batch
    return -(-batch_units(config) // (layout.num_data_ranks * 2 * layout.num_stages))


def largest_micro_batch(config: RunConfig, layout: Layout) -> int:
    """That of a rank: at most its share of a batch."""
    share = -(-batch_units(config) // layout.num_data_ranks)
    return min(micro_batch_size(config, layout) or share, share)


def half_micro_batch(config: RunConfig, layout: Layout) -> int | None:
    """Half of the current micro-batch, or None if it is one sample or token."""
    present = largest_micro_batch(config, layout)
    return -(-present // 2) if present > 1 else None
