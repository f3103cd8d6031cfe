"""The table of what a strategy can do: the code obeys it, and no other code decides by the name of a strategy."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rung.compare.options import DEFAULT_STRATEGIES
from rung.compare.verify import all_strategies
from rung.distributed.world import open_fake_world
from rung.errors import ConfigError, StrategyError
from rung.spec.abilities import can, describe_layout, presets_of, rung_of, stand_in, topology, why_not
from rung.spec.compatibility import as_given, fit_settings, inapplicable_settings, is_requested, validate_config
from rung.spec.config import SETTINGS, RunConfig
from rung.spec.presets import ABILITIES, PRESETS, SCHEDULES, Preset, Refusal, givers
from rung.spec.strategy import Layout, parse, required_num_ranks

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "src" / "rung"

# -- who may look at the strategy -----------------------------------------------------------------------------------

DECIDES = {
    "spec": "strategies are its subject",
    "distributed/world.py": "open_world",
    "parallel/__init__.py": "parallelize",
    "runtime/__init__.py": "build_runtime",
}
EXCEPTIONS = {
    "distributed/devices.py": "torch's own MPI backend is good for DDP alone, for open_world",
    "parallel/sharding.py": "applies FSDP2, for parallelize",
    "parallel/materialize.py": "fills what FSDP2 will shard with contiguous memory, for parallelize",
    "runtime/mesh.py": "wraps the model in DDP or compiles it, for build_runtime",
    "runtime/unused.py": "DDP and FSDP2 treat unused parameters each in its own way",
}
# What tells one strategy from another. Sizes are structure: `layout.num_stages > 1` is as good as a number.
_READS = ("kind", "zero", "uses_ddp", "uses_fully_shard")
_COMPARED = ("name", "pp", "cp", "tp", "servers")


def looks_at_strategy(source: str) -> set[int]:
    """Lines that read the kind of a layout, or compare its name or a size that stands for a kind."""
    return {line for node in ast.walk(ast.parse(source)) for line in _lines(node)}


def _lines(node: ast.AST) -> Iterator[int]:
    if _of_layout(node, _READS):
        yield node.lineno  # type: ignore[attr-defined]
    if isinstance(node, ast.If | ast.IfExp) and _of_layout(node.test, _COMPARED):
        yield node.test.lineno
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        listed = [part for side in sides for part in getattr(side, "elts", [side])]
        values = [part.value for part in listed if isinstance(part, ast.Constant)]
        by_name = any(value in (*PRESETS, "mesh") for value in values)
        by_size = any(_of_layout(side, _COMPARED) for side in sides) and any(value in (0, 1) for value in values)
        if by_name or by_size:
            yield node.lineno


def _of_layout(node: ast.AST, names: tuple[str, ...]) -> bool:
    if not isinstance(node, ast.Attribute) or node.attr not in names:
        return False
    owner = node.value
    return str(getattr(owner, "attr", getattr(owner, "id", ""))).endswith("layout")


def test_only_spec_and_three_functions_look_at_the_strategy() -> None:
    found = {}
    for path in SOURCES.rglob("*.py"):
        name = path.relative_to(SOURCES).as_posix()
        lines = looks_at_strategy(path.read_text())
        if lines and name not in DECIDES and name.split("/")[0] not in DECIDES:
            found[name] = sorted(lines)
    others = {name: lines for name, lines in found.items() if name not in EXCEPTIONS}
    assert not others, f"ask rung.spec.abilities instead: {others}"
    assert set(EXCEPTIONS) <= set(found), "an exception that is needed no more"


@pytest.mark.parametrize(
    "source",
    [
        'if world.layout.kind == "mesh": pass',
        "x = variant.layout.zero",
        'a if strategy in ("ps", "ddp+ps") else b',
        'x = layout.name != "single"',
        "if layout.pp > 1: pass",
        "x = 1 if layout.servers else 2",
        "f(self.world.layout.uses_ddp)",
    ],
)
def test_a_line_that_looks_at_the_strategy_is_found(source: str) -> None:
    assert looks_at_strategy(source) == {1}


def test_structure_is_not_taken_for_a_strategy() -> None:
    source = 'layout.num_stages > 1\nrank // layout.tp\nat["pp"] == 1\nlayout.servers + 1\nother.kind == "file"\n'
    assert looks_at_strategy(source) == set()


# -- the table and what is done ------------------------------------------------------------------------------------

# How a user asks for each ability that has a setting.
ASKED: dict[str, dict[str, Any]] = {
    "offload": {"offload": "cpu"},
    "schedule": {"schedule": "gpipe"},
    "other_schedules": {"schedule": "interleaved"},
    "split": {"split": "blocks.1"},
    "sequence_parallel": {"sequence_parallel": True},
    "async_tp": {"async_tp": True},
    "cp_form": {"cp_form": "gather"},
    "servers": {"servers": 1},
    "staleness": {"staleness": 2},
    "compress": {"compress": "topk"},
    "local_steps": {"local_steps": 4},
    "fp16": {"precision": "fp16"},
    "replicate_state": {"replicate_state": True},
    "patience": {"patience": 2},
    "profile": {"profile": "3"},
    "rpc": {"rpc_host": "lo"},
    "mpi": {"backend": "mpi"},
    "compile": {"compile": True},
    "activation_checkpointing": {"activation_checkpointing": "full"},
    "accumulate": {"micro_batch": 4},
    "clip": {"clip": 1.0},
    "ema": {"ema": 0.9},
    "swa": {"swa_start": 2},
    "lora": {"lora": "r=4"},
    "skip_bad_samples": {"skip_bad_samples": 2},
}
COMPOSED = ("ddp2,tp2", "pp2,ddp2", "pp2,fsdp2", "pp2:zb,fsdp2", "fsdp2,tp2", "pp2,tp2", "pp1,ddp4")
NAMES = (*PRESETS, *(f"pp:{schedule}" for schedule in SCHEDULES), *COMPOSED)


def layout_of(name: str, size: int = 4) -> Layout:
    return parse(name, required_num_ranks(name) or size)


def test_every_setting_of_the_table_is_asked_for() -> None:
    assert list(ASKED) == [name for name, ability in ABILITIES.items() if ability.settings]
    assert all(is_requested(RunConfig(**settings), ABILITIES[name]) for name, settings in ASKED.items())
    assert not any(is_requested(RunConfig(), ability) for ability in ABILITIES.values())


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_refused_where_the_table_says_so_and_nowhere_else(name: str) -> None:
    layout = layout_of(name)
    for ability, settings in ASKED.items():
        config = RunConfig(**settings)
        abilities = [other for other in ABILITIES if is_requested(config, ABILITIES[other])]
        if all(can(layout, other) for other in abilities):
            validate_config(config, layout)
            continue
        with pytest.raises(ConfigError) as error:
            validate_config(config, layout)
        given = [as_given(config, ABILITIES[other].settings[0]) for other in abilities]
        assert str(error.value) in [why_not(layout, *pair) for pair in zip(abilities, given, strict=True)], ability


@pytest.mark.parametrize("name", NAMES)
def test_what_means_nothing_to_a_strategy_can_be_left_out_for_it(name: str) -> None:
    layout = layout_of(name)
    for ability, settings in ASKED.items():
        if ABILITIES[ability].lacking is not None and not ABILITIES[ability].values:
            validate_config(fit_settings(RunConfig(**settings), layout), layout)
            kept = all(key not in inapplicable_settings(layout) for key in settings)
            assert kept == can(layout, ability), ability


@pytest.mark.parametrize("name", NAMES)
def test_every_refusal_is_a_sentence_with_a_choice(name: str) -> None:
    for ability in ABILITIES:
        text = why_not(layout_of(name), ability, "--some-flag")
        assert (text is None) == can(layout_of(name), ability)
        assert text is None or re.fullmatch(r"[^{}]+\. (Use|Leave|For|Run) [^{}]+\.", text), text


def test_rows_name_abilities_that_there_are() -> None:
    for row in (*PRESETS.values(), *SCHEDULES.values()):
        assert set(row.refuses) <= set(ABILITIES)
    for preset in PRESETS.values():
        assert all(ABILITIES[ability].lacking is not None for ability in preset.gives)
        assert not set(preset.gives) & set(preset.refuses)
    assert all(givers(name) for name, ability in ABILITIES.items() if ability.lacking is not None)
    assert all(set(ability.settings) <= set(SETTINGS) for ability in ABILITIES.values())


def test_a_composition_can_do_what_a_part_gives_and_none_refuses() -> None:
    assert can(layout_of("pp2:zb,fsdp2"), "offload") and not can(layout_of("pp2:zb,fsdp2"), "compile")
    assert can(layout_of("pp2,fsdp2"), "compile") and can(layout_of("fsdp2,tp2"), "sequence_parallel")
    assert can(layout_of("ddp"), "compress") and not can(layout_of("ddp2,tp2"), "compress")
    assert not can(layout_of("pp1,ddp4"), "split"), "a pipeline of one stage is none"


@pytest.mark.parametrize("name", [name for name in PRESETS if not can(layout_of(name), "plan")])
def test_what_cannot_be_planned_has_a_stand_in_that_can(name: str) -> None:
    layout = layout_of(name)
    with pytest.raises(StrategyError, match=f"cannot be planned.* or plan {re.escape(stand_in(layout).name)}"):
        with open_fake_world(layout):
            pass
    assert can(stand_in(layout), "plan")


def test_verify_runs_all_that_give_the_numbers_of_one_process() -> None:
    found = {preset for name in all_strategies(8, has_remote=True) for preset in presets_of(layout_of(name, 8))}
    assert found == {name for name in PRESETS if can(layout_of(name), "verify")} - {"single"}


def test_a_session_is_refused_where_the_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.train.session import open_session

    monkeypatch.setenv("WORLD_SIZE", "4")
    task = str(ROOT / "examples" / "gpt" / "task.py")
    for name in (name for name in PRESETS if not can(layout_of(name), "session")):
        with pytest.raises(StrategyError, match=f"{name} has no steps that all processes take together. Use"):
            open_session(task, strategy=name)


# -- a new strategy is a row ---------------------------------------------------------------------------------------


def test_a_row_makes_a_strategy_known_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a data-parallel strategy with a runtime of its own needs beside that runtime."""
    refusal = Refusal("{name} has a ring of its own, and {asked} does not know it.", "Use ddp.")
    row = Preset("dp_replicate", 0, "each rank averages with its neighbour", title="gossip", rung=2, kind="gossip",
                 composes=False, tried=("alone",), refuses={"compile": refusal})  # fmt: skip
    monkeypatch.setitem(PRESETS, "gossip", row)
    layout = parse("gossip", 4)
    assert (layout.num_ranks, layout.num_data_ranks, layout.kind) == (4, 4, "gossip")
    assert parse("gossip4", 4).num_data_ranks == 4 and "4 replicas" in describe_layout(layout)
    assert topology(layout)["kind"] == "gossip" and rung_of(layout) == 2
    with pytest.raises(StrategyError, match="but the job has 4"):
        parse("gossip2", 4)
    with pytest.raises(StrategyError, match="gossip has a runtime of its own and cannot be composed"):
        parse("gossip2,tp2", 4)
    with pytest.raises(ConfigError, match="gossip has a ring of its own, and --compile does not know it"):
        validate_config(RunConfig(compile=True), layout)
    with pytest.raises(ConfigError, match="--compress topk changes how ddp synchronizes gradients; gossip"):
        validate_config(RunConfig(compress="topk"), layout)
    validate_config(RunConfig(clip=1.0, precision="fp16", micro_batch=2), layout)
    assert "gossip" in all_strategies(4) and can(layout, "plan")


def test_compare_tries_what_the_table_lists() -> None:
    assert DEFAULT_STRATEGIES == ("single", "ddp", "zero1", "zero2", "zero3")


def test_the_document_s_table_is_made_from_the_code_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    reference = importlib.import_module("reference")
    text = (ROOT / "docs" / "strategies.md").read_text()
    table = re.search(r"<!-- abilities: [^>]*-->\n(.*?)\n<!-- end of abilities -->", text, flags=re.DOTALL)
    assert table is not None
    assert table.group(1) == reference.ability_table(), "CONTRIBUTING.md, Documents, says how to renew it"
