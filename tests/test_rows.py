"""Every behaviour has a row in `make test`: `slow` is for further rows of one that has others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROWS

# Test functions of which `make test` runs no row, each with the reason.
LEFT_OUT = {
    "test_a_job_longer_than_its_time_limit_ends_in_several_parts": "Slurm counts limits in minutes, so it takes four; "
    "test_a_job_that_is_told_of_its_time_limit_goes_on_later sends the signal that comes before one by hand",
    "test_a_machine_is_cut_off_and_comes_back": "with three machines and one disk, it is "
    "test_a_host_taken_away_and_brought_back_leaves_no_trace_in_the_weights",
    "test_the_drawn_schedules_are_those_of_the_training_code": "traces every schedule on four ranks in 50 s; "
    "test_explain_gpt and test_real_ranks_do_what_pretended_ones_tell have rows of what it draws",
    "test_the_site_is_whole": "needs Sphinx, which `make test-all` installs",
}


def test_every_behaviour_has_a_row_in_make_test(request: pytest.FixtureRequest) -> None:
    config = request.config
    if Path(__file__).parent not in {(config.invocation_params.dir / path).resolve() for path in config.args}:
        pytest.skip("judges the whole suite only: pytest -k every_behaviour")
    without = {name.rpartition("::")[2] for name, is_slow in config.stash[ROWS].items() if all(is_slow)}
    assert without - LEFT_OUT.keys() == set(), "take the mark from one row of each, or say in LEFT_OUT why none can run"
    assert LEFT_OUT.keys() - without == set(), "`make test` runs rows of these"
