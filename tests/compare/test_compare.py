"""What `rung compare` makes of figures: spans, shares, reasons, rows in turns, words. No process is started here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import rung.compare.run
from rung.cli.main import main
from rung.compare.measure import RankMeasurement, timed_run
from rung.compare.options import CompareOptions, check_options
from rung.compare.predict import Predictor
from rung.compare.rows import fill_up, loss_difference, make_row, prediction_error, without_infinities
from rung.compare.run import Bench, reason_of
from rung.compare.spans import Span, seconds_outside, spans_of_step
from rung.compare.variants import choose_variants, make_variant
from rung.compare.verdict import make_verdict
from rung.compare.view import bar, show
from rung.errors import ConfigError, StrategyError
from rung.launch.spawn import RankFailedError
from rung.spec.config import RunConfig
from rung.train.records import StepRecord
from tests.comparison import sample
from tests.tasks import TASKS

CONFIG = RunConfig(batch_size=8, steps=6, device="cpu")


# -- what is compared ----------------------------------------------------------------------------------------------


def test_one_process_comes_first_and_names_bring_their_sizes() -> None:
    found = choose_variants(["ddp", "tp4", "dp", "ddp"], 2, CONFIG)
    assert [(one.text, one.strategy, one.num_ranks) for one in found] == [
        ("single", "single", 1), ("ddp", "ddp", 2), ("tp4", "tp4", 4), ("dp", "dp2", 1),
    ]  # fmt: skip


def test_settings_for_all_reach_those_that_have_a_use_for_them() -> None:
    config = RunConfig(schedule="gpipe", servers=2, offload="cpu", compress="fp16")
    ddp, pipeline, named, fsdp, ps = choose_variants(["ddp", "pp2", "pp2:zb", "fsdp", "ps"], 3, config)[1:]
    assert ddp.refused is None and (ddp.config.compress, ddp.config.offload) == ("fp16", "none")
    assert pipeline.config.schedule == "gpipe" and pipeline.config.compress == "none"
    assert named.refused is None and named.config.schedule is None
    assert fsdp.config.offload == "cpu"
    assert ps.config.servers == 2 and ps.layout is not None and ps.layout.servers == 2


def test_a_row_may_have_settings_of_its_own() -> None:
    variant = make_variant("fsdp activation_checkpointing=full precision=bf16", 2, CONFIG)
    assert variant.config.activation_checkpointing == "full" and variant.config.precision == "bf16"
    assert variant.text == "fsdp activation_checkpointing=full precision=bf16"


def test_what_contradicts_itself_is_a_row() -> None:
    refused = make_variant("ddp schedule=zb", 2, CONFIG)
    assert refused.refused is not None and "is for a pipeline" in refused.refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ddp bf16", "KEY=VALUE"),
        ("ddp batch_size=4", "the same for all"),
        ("ddp precison=bf16", "Did you mean 'precision'"),
        ("ddp precision=bf17", "precision cannot be"),
    ],
)
def test_words_that_mean_nothing_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_variant(text, 2, CONFIG)


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(StrategyError, match="Did you mean 'fsdp'"):
        make_variant("fsp", 2, CONFIG)
    with pytest.raises(ConfigError, match="no strategy"):
        choose_variants([" "], 2, CONFIG)


# -- a step as spans -----------------------------------------------------------------------------------------------


def test_waits_are_cut_out_of_what_they_interrupt() -> None:
    log = [("wait", 1.2, 1.4), ("forward", 1.0, 2.0), ("wait", 2.5, 3.0), ("backward", 2.0, 3.0), ("update", 3.0, 4.0)]
    assert spans_of_step(log, [], 0.5) == [
        Span("data", 0.5, 1.0),
        Span("forward", 1.0, 1.2),
        Span("communication", 1.2, 1.4),
        Span("forward", 1.4, 2.0),
        Span("backward", 2.0, 2.5),
        Span("communication", 2.5, 3.0),
        Span("update", 3.0, 4.0),
    ]


def test_micro_batches_are_numbered() -> None:
    phases = [("forward", 0, 1), ("forward", 1, 2), ("backward", 2, 3), ("forward", 3, 4), ("backward", 4, 5)]
    found = spans_of_step([(what, float(a), float(b)) for what, a, b in phases], [], 0.0)
    assert [(span.what, span.micro_batch) for span in found] == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1),
    ]  # fmt: skip
    assert (found[0].start, found[0].end) == (0.0, 2.0)


def test_a_pipeline_shows_what_its_stages_computed() -> None:
    log = [("forward", 0.0, 2.0), ("wait", 1.0, 1.5), ("backward", 2.0, 3.0), ("update", 3.0, 4.0)]
    found = spans_of_step(log, [("F", 0, 0.0, 0.5), ("F", 1, 0.5, 1.0), ("B", 0, 2.0, 2.5), ("W", 0, 2.5, 3.0)], 0.0)
    assert [(span.what, span.micro_batch) for span in found] == [
        ("forward", 0), ("forward", 1), ("communication", None), ("backward", 0), ("backward", 0), ("update", None),
    ]  # fmt: skip


def test_hidden_is_what_nobody_waited_for() -> None:
    assert seconds_outside([(0.0, 2.0), (1.0, 3.0)], [(2.5, 4.0)]) == pytest.approx(2.5)
    assert seconds_outside([], [(0.0, 1.0)]) == 0.0


# -- figures -------------------------------------------------------------------------------------------------------


def test_kinds_add_up_to_the_whole() -> None:
    kinds = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 50, "other": 3}
    assert fill_up(kinds, 100) == {**kinds, "other": 10}
    less = fill_up(kinds, 50)
    assert sum(less.values()) == 50 and less["activations"] < 50


def test_losses_are_compared_step_by_step() -> None:
    assert loss_difference([[1, 2.0], [2, 1.0]], [[1, 2.0], [2, 1.25]]) == pytest.approx(0.2)
    assert loss_difference([[1, 2.0]], [[1, 2.0], [2, 1.25]]) is None
    lost = loss_difference([[1, 2.0], [2, float("nan")]], [[1, 2.0], [2, 1.25]])
    assert lost is not None and math.isnan(lost)  # not the difference of the steps before
    assert without_infinities({"a": [float("nan"), 1.0], "b": float("inf")}) == {"a": [None, 1.0], "b": None}


def figures(rank: int, seconds: list[float], **phases: float) -> RankMeasurement:
    records = [
        StepRecord(n, 0, 8 * n, 1.0 / n, None, 0.1, one, 8 / one, 0.001, 0, 0) for n, one in enumerate(seconds, start=1)
    ]
    own = [{"data": 0.0, "forward": 0.01, "backward": 0.02, "update": 0.001, **phases}] * len(seconds)
    return RankMeasurement(
        rank, records, own, [0.005] * len(seconds), 11.0 + rank, 0, 1000, 100, {"parameters": 40}, {}
    )


def test_a_row_leaves_the_warm_up_out_and_shows_the_spread() -> None:
    runs = [[figures(0, [9.0, 9.0, 1.0, 2.0]), figures(1, [9.0] * 4)], [figures(0, [9.0, 9.0, 3.0, 4.0])] * 2]
    row = make_row(make_variant("ddp", 2, CONFIG), runs, [10.0, 10.0], [], warmup=2, on_gpu=False)
    assert row["step_seconds"] == {"median": 2.5, "low": 1.3, "high": 3.7, "runs": [1.5, 3.5]}
    assert row["samples_per_second"]["median"] == pytest.approx(8 / 2.5)
    assert row["first_step_seconds"] == pytest.approx(1.5)  # of 2 and 1 seconds
    assert row["losses"][1] == [2, 0.5]
    assert row["communication"]["exposed_seconds"] == pytest.approx(0.005)
    assert [sum(rank["kinds"].values()) for rank in row["memory"]] == [100, 100]


def test_a_batch_that_the_data_do_not_fill_counts_its_samples() -> None:
    alone = figures(0, [1.0, 2.0, 2.0])
    short = [replace(one, samples=3 * one.step) for one in alone.records]
    row = make_row(
        make_variant("single", 1, CONFIG), [[replace(alone, records=short)]], [10.0], [], warmup=1, on_gpu=False
    )
    assert row["samples_per_second"]["median"] == pytest.approx(1.5)


def test_each_predicted_figure_has_its_error() -> None:
    row = {
        "predicted": {"step_seconds": None, "peak_bytes": 110, "bytes_per_step": 0},
        "step_seconds": {"median": 1.0},
        "memory": [{"peak_bytes": 50}, {"peak_bytes": 100}],
        "bytes_per_step": 0,
    }
    error = prediction_error(row)
    assert error == {"step_seconds": None, "peak_bytes": pytest.approx(0.1), "bytes_per_step": 0.0}
    assert prediction_error({**row, "predicted": None}) is None


def test_a_slow_rank_is_in_the_row_with_its_phase() -> None:
    seconds = [0.1] * 8
    runs = [[figures(0, seconds), figures(1, seconds, backward=0.2), figures(2, seconds), figures(3, seconds)]]
    row = make_row(make_variant("ddp", 4, CONFIG), runs, [10.0], [], warmup=2, on_gpu=False)
    assert [(one["rank"], one["phase"]) for one in row["slow"]] == [(1, "backward")]
    assert row["slow"][0]["seconds"] == pytest.approx(0.2) and row["slow"][0]["others_seconds"] == pytest.approx(0.02)


# -- in turns, and what fails --------------------------------------------------------------------------------------


def test_strategies_take_turns_and_one_that_fails_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    order: list[str] = []

    def on_ranks(function: Any, size: int, job: Any = None, *args: Any, **options: Any) -> list[Any]:
        if function is timed_run:
            order.append(job.strategy)
            if job.strategy == "zero3":
                raise RankFailedError(1, "failed", 'Traceback\n  File "x"\nrung.errors.ModelError: it cannot be cut\n')
            return [figures(rank, [0.1] * 6) for rank in range(size)]
        return [None] * size

    monkeypatch.setattr(rung.compare.run, "on_ranks", on_ranks)
    bench = Bench("task.py", {}, tmp_path, repeats=2, warmup=2, on_gpu=False)
    variants = choose_variants(["single", "zero3", "ddp", "ddp schedule=zb"], 2, CONFIG)
    rows = bench.rows(bench.compare(variants, lambda what, step: None))
    assert order == ["single", "zero3", "ddp", "single", "ddp"]
    assert [(row["strategy"], row["status"]) for row in rows] == [
        ("single", "ok"), ("zero3", "failed"), ("ddp", "ok"), ("ddp schedule=zb", "failed"),
    ]  # fmt: skip
    assert rows[1]["reason"] == "rank 1: it cannot be cut"
    assert "it cannot be cut" in (tmp_path / "zero3-1" / "failure.txt").read_text()
    assert rows[2]["speedup"] == pytest.approx(1.0)


def test_a_failure_is_told_in_a_line() -> None:
    trace = 'Traceback (most recent call last):\n  File "x.py", line 3\nRuntimeError: sizes\ndo not match\n'
    assert reason_of(RankFailedError(0, "failed", trace), 1) == "RuntimeError: sizes do not match"
    memory = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert reason_of(RankFailedError(1, "failed", memory), 2).startswith("rank 1: OutOfMemoryError: CUDA out of memory")
    assert "out of memory" in reason_of(RankFailedError(1, "was ended by SIGKILL"), 2)


# -- words ---------------------------------------------------------------------------------------------------------


def rows_of(**seconds: float) -> list[dict[str, Any]]:
    return [
        {
            "strategy": name,
            "ranks": 1 if name == "single" else 2,
            "status": "ok",
            "step_seconds": {"median": one},
            "speedup": seconds["single"] / one,
            "memory": [{"peak_bytes": 2**20}],
            "largest_difference": {"loss": 1e-7, "parameters": 1e-7},
        }
        for name, one in seconds.items()
    ]


def test_a_lower_rung_is_recommended_when_a_higher_gains_little() -> None:
    variants = choose_variants(["single", "ddp", "zero3"], 2, CONFIG)
    verdict = make_verdict(rows_of(single=0.2, ddp=0.1, zero3=0.098), variants)
    assert verdict["strategy"] == "ddp" and "not worth a higher rung" in verdict["recommendation"]
    assert verdict["sentence"].startswith(
        "zero3 is the quickest of 3, with 98 ms a step, 2.0 times as quick as one process"
    )
    assert make_verdict(rows_of(single=0.2, ddp=0.1, zero3=0.08), variants)["strategy"] == "zero3"
    alone = make_verdict(rows_of(single=0.1, ddp=0.2, zero3=0.3), variants)
    assert alone["strategy"] == "single" and alone["sentence"].startswith("One process is the quickest of 3")


def test_what_failed_beside_one_that_ran_is_told() -> None:
    variants = choose_variants(["single", "ddp"], 2, CONFIG)
    rows = [*rows_of(single=0.1), {"strategy": "ddp", "status": "failed", "reason": "no"}]
    verdict = make_verdict(rows, variants)
    assert verdict["sentence"] == "One process takes 100 ms a step; the other failed."


def test_losses_that_are_no_numbers_are_told_with_the_recommendation() -> None:
    rows = rows_of(single=0.2, ddp=0.1)
    rows[1]["losses"] = [[1, 2.0], [2, None]]
    assert "not all numbers" in make_verdict(rows, choose_variants(["single", "ddp"], 2, CONFIG))["recommendation"]


def test_a_busy_machine_is_told_with_the_recommendation() -> None:
    rows, variants = rows_of(single=0.2, ddp=0.1), choose_variants(["single", "ddp"], 2, CONFIG)
    rows[0]["other_cores"], rows[1]["other_cores"] = 0.0, None
    assert "busy" not in make_verdict(rows, variants)["recommendation"]
    rows[0]["other_cores"] = 1.2
    assert make_verdict(rows, variants)["recommendation"].endswith("compare again when it is idle.")


def test_losses_that_are_off_are_told_with_what_may_be_behind_it() -> None:
    rows = rows_of(single=0.2, ddp=0.1)
    rows[1]["largest_difference"]["loss"] = 0.12
    told = make_verdict(rows, choose_variants(["single", "ddp"], 2, CONFIG))["recommendation"]
    assert "by up to 12 %" in told and "--set dropout=false" in told
    without = make_verdict(rows, choose_variants(["single", "ddp"], 2, replace(CONFIG, dropout=False)))
    assert "dropout" not in without["recommendation"]


def test_a_row_that_cannot_be_planned_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*args: Any, **kwargs: Any) -> None:
        raise TypeError("not like that")

    for step in ("dry_run", "Predictor._peak"):
        with monkeypatch.context() as patch:
            patch.setattr(f"rung.compare.predict.{step}", breaks)
            found = Predictor(TASKS["recurrent"](), "cpu").predict(make_variant("ddp", 2, CONFIG), None)
        assert found.figures is None and found.why_not == "planning it failed with TypeError: not like that"


def test_files_that_cannot_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(ConfigError, match=r"page\.html is a directory"):
        check_options(CompareOptions("task.py", out=str(tmp_path / "page.html")))
    kept = tmp_path / "kept.json"
    kept.write_text("as it was")
    check_options(CompareOptions("task.py", out=str(tmp_path / "new.html"), json_file=str(kept)))
    assert kept.read_text() == "as it was" and not (tmp_path / "new.html").exists()
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "made later.html")
    check_options(CompareOptions("task.py", out=str(link)))
    assert link.is_symlink() and not link.exists()


def test_a_flag_of_another_command_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", "task.py", "--profile", "3"])
    assert "there is no argument '--profile' here. It is a flag of rung train." in capsys.readouterr().err


def test_when_all_fail_there_is_no_recommendation() -> None:
    variants = choose_variants(["single", "ddp"], 2, CONFIG)
    rows = [{"strategy": one.text, "status": "failed", "reason": "no"} for one in variants]
    assert make_verdict(rows, variants)["strategy"] is None


def test_the_table_fits_and_says_what_failed_and_who_is_slow(capsys: pytest.CaptureFixture[str]) -> None:
    for width in (80, 200):
        show(sample(), Console(width=width, highlight=False))
        text = capsys.readouterr().out
        assert "…" not in text
        assert "tp2 failed: RuntimeError" in text and "is slow" in text
    assert "predicted" in text and "█" in text
    for error in ("(+10 %)", "(-2 %)", "(+0 %)"):  # of the time, the memory and the bytes
        assert error in text
    assert "ps-async: the planner knows nothing of servers" in text
    lost = sample()
    lost["rows"][1]["losses"][-1][1], lost["rows"][1]["largest_difference"]["loss"] = None, None
    show(lost, Console(width=200, highlight=False))
    assert "not a number" in capsys.readouterr().out
    assert bar(1.0) == "█" * 10 and bar(0.0) == "" and bar(0.05) == "▌"
