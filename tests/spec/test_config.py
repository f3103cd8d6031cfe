from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rung.errors import ConfigError
from rung.spec.compatibility import validate_config
from rung.spec.config import FLAGS, SETTINGS, RunConfig, resolve, shard_size, write_toml
from rung.spec.strategy import parse
from rung.spec.task import Task


def task(**defaults: Any) -> Task:
    return Task(
        model=lambda depth=2: depth,
        train_data=lambda: 0,
        loss=lambda output, target: 0,
        optimizer=lambda model: 0,
        defaults=defaults,
    )


def test_flags_win_over_file_over_task_over_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("seed = 2\nclip = 2.0\n[model]\ndepth = 5\n")
    resolved = resolve(task(batch_size=8, seed=1, clip=1.0), file=file, flags={"clip": "3", "steps": None})
    assert (resolved.config.batch_size, resolved.config.seed, resolved.config.clip) == (8, 2, 3.0)
    assert resolved.arguments == {"model.depth": 5}
    origins = resolved.origins
    assert [origins[k] for k in ("batch_size", "seed", "clip", "model.depth", "precision")] == [
        "task",
        "file run.toml",
        "flag",
        "file run.toml",
        "default",
    ]


def test_the_written_settings_can_be_read_again(tmp_path: Path) -> None:
    first = resolve(task(batch_size=8), flags={"shuffle": False, "clip": 0.5}, assignments={"model.depth": "7"})
    write_toml(first, tmp_path / "config.toml", "heading")
    second = resolve(task(), file=tmp_path / "config.toml")
    assert second.config == first.config
    assert second.arguments == first.arguments
    assert "batch_size = 8  # task" in (tmp_path / "config.toml").read_text()


def test_one_epoch_is_the_default_length() -> None:
    assert resolve(task()).config.epochs == 1
    assert resolve(task(), flags={"steps": 5}).config.epochs is None


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        ({"batch_sise": "3"}, "no setting 'batch_sise' (from --set). Did you mean 'batch_size'"),
        ({"modle.depth": "3"}, "Did you mean 'model'"),
        ({"model.dept": "3"}, "Did you mean 'depth'"),
        ({"precision": "bf61"}, "Did you mean 'bf16'"),
        ({"batch_size": "0"}, "at least 1"),
        ({"batch_size": "many"}, "whole number"),
        ({"clip": "-1"}, "above 0"),
        ({"clip": "nan"}, "above 0"),
        ({"workers": "-1"}, "negative"),
        ({"workers": "automatic"}, "workers"),
        ({"shard_by": "size:big"}, "size:10M"),
        ({"eval_every": "sometimes"}, "'epoch', 'never'"),
        ({"nproc": "1.5"}, "MIN:MAX"),
        ({"nproc": "4:2"}, "MIN at most MAX"),
        ({"nnodes": "0"}, "at least 1"),
        ({"rdzv": "head"}, "as in node1:29500"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(assignments: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(task(), assignments=assignments)
    assert words in str(error.value)


def test_a_wrong_default_of_the_task_names_its_origin() -> None:
    with pytest.raises(ConfigError, match=r"'batch' \(from the task\)"):
        resolve(task(batch=3))


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        resolve(task(), flags={"clip": 1.0}, assignments={"clip": "2"})


def test_files_that_are_no_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no settings file"):
        resolve(task(), file=tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("= 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        resolve(task(), file=tmp_path / "bad.toml")


def test_shard_sizes_are_counted_in_parameters() -> None:
    assert shard_size("size:10M") == 10_000_000
    assert shard_size("size:1.5k") == 1500
    assert shard_size("size:300") == 300
    assert shard_size("block") is None


def test_contradictions_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="ddp shards no parameters"):
        validate_config(RunConfig(offload="cpu"), parse("ddp", 2))
    with pytest.raises(ConfigError, match="does not fit into a batch"):
        validate_config(RunConfig(batch_size=4, micro_batch=8), parse("ddp", 2))


def test_every_flag_of_the_issue_is_a_setting_of_file_and_task() -> None:
    asked = (
        "strategy nproc nnodes rdzv rdzv_key batch_size micro_batch steps epochs seed shuffle precision clip compile "
        "activation_checkpointing offload shard_by out schedule split sequence_parallel checkpoint_every keep "
        "replicate_state max_restarts timeout backend servers staleness compress local_steps outer "
        "profile log check init init_partial lora ema swa_start patience cp_form skip_bad_samples batch_tokens"
    )
    assert set(FLAGS) == set(asked.split())
    assert set(FLAGS) <= set(SETTINGS)


def test_arguments_of_any_kind_are_written_and_read(tmp_path: Path) -> None:
    own = replace(task(), model=lambda width=None, sizes=(1, 2), name="x": 0)
    first = resolve(own, assignments={"model.sizes": "3,4", "model.name": "\N{GRINNING FACE}"})
    assert first.arguments["model.sizes"] == (3, 4)
    write_toml(first, tmp_path / "config.toml", "heading")
    assert resolve(own, file=tmp_path / "config.toml").arguments == first.arguments
    with pytest.raises(ConfigError, match="is a list"):
        resolve(own, assignments={"model.sizes": "{"})
    with pytest.raises(ConfigError, match="below 2"):
        resolve(own, flags={"seed": 2**64})
