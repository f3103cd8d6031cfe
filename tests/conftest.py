"""What the tests share beyond fixtures: what the usual suite leaves out, and what ranks are forked with."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile

import pytest

from tests.harness import _PRELOADED

# Ranks that others start sign with a key of the user's: not with one in the home directory of whoever runs the tests.
_HOME = tempfile.TemporaryDirectory(prefix="rung-tests-")
os.environ["XDG_CONFIG_HOME"] = _HOME.name

# The usual suite has twenty minutes on two cores. These rows repeat under one more strategy or on one more rank what
# others of their list show; `make test-all` runs them.
REPETITIONS = [
    r"test_failure.*exception_anywhere.*\[(model|optimizer|data|data in a worker|backward|saving)-fsdp-[01]\]",
    r"test_failure.*exception_anywhere.*\[(forward|update|metrics)-fsdp-0\]",
    r"test_failure.*exception_anywhere.*\[(model|optimizer|data|forward|backward|update)-ddp-0\]",
    r"test_failure.*test_a_killed_rank_is_named.*-(ddp|fsdp)-\d-[a-z ]+-0\]",
    r"test_failure.*test_a_rank_that_leaves_early.*-0\]",
    r"test_parity.*matches_one_process\[(ddp|zero1|zero2|zero3|hsdp)-\w+-1ranks",
    r"test_parity.*matches_one_process\[(zero1|zero2|zero3|hsdp)-gpt-4ranks\]",
    r"test_parity.*weighted_by_tokens.*\[None-(zero1|zero2|hsdp|pp2,fsdp2|pp2:zb,ddp2)\]",
    r"test_composed.*fewer_samples.*-3\]",
    r"test_composed.*test_settings\[pp2,tp2-",
    r"test_pipeline.*\[(pp2,ddp2|pp2,tp2|pp4|pp2,fsdp2)\]",
    r"test_models.*(vision_transformer|gpt2)_of_\w+\[pp2\]",
    r"test_models.*llama_of_\w+\[tp2\]",
    r"test_damage.*(cut|missing|pickle)-rank-00001",
    r"test_damage.*(torch.save|pickle)-",
    r"test_checkpoint.*stopped_at_sample_37.*(epoch|twice)",
    r"test_hangs.*sleeps_for_ever\[fsdp",
    r"test_hangs.*loader_that_stalls\[0\]",
    r"test_worlds.*(joins\[pp2,ddp\]|one_step_at_most\[pp2\])",
    r"test_explain.*real_ranks_do.*\[(hsdp2x2|pp2,ddp2)\]",
    r"test_slow.*changes[1356789]\]",
    r"test_parity.*matches_one_process\[ps-\w+-2ranks",
    r"test_servers.*test_ps_equals_one_process\[text\]",
    r"test_data_parallel.*weighted_by_tokens.*\[dp2-(2|7)\]",
    r"test_compression.*bit_by_bit.*(ternary|powersgd)",
    r"test_hangs.*(one_rank_calls_one_more_and_meets|computes_for_ever)",
    r"test_elastic.*(ranks_that_cannot_stop|second_sigterm)",
    r"test_state_copies.*rescued_state\[zero[12]-",
    r"test_trainers.*that_fails_is_told_of",
    r"test_faults.*test_comes_through\[(tp2|zero1|zero3|ps-async)\]",
    r"test_pretend_world.*test_64_stages",
    r"test_pretend_world.*in_each_stage\[(pp4,zero1|pp4:zb,ddp|ddp,tp4|pp4,ddp|pp4:gpipe,ddp|pp4,zero2)-",
    r"test_plan.*few_blocks_agrees_with_the_whole\[pp2,ddp2",
    r"test_semantics.*compiled_model_gives_the_same",
    r"test_pulse.*stop_in_the_same_call\[2\]",
    r"test_oom.*goes_on_with_less\[(single-1-4-8-3|ddp-2-4-4-3)\]",
    r"test_composed.*test_models\[pp2,ddp2-recurrent",
    r"test_mpi.*collectives_and_strategies_on_four_ranks",
    r"test_worlds.*a_rank_dies_and_one_joins",
    r"test_tensor.*five_steps_are_those_of_one_process\[4\]",
    r"test_oom.*can_be_turned_off",
    r"test_checkpoint.*(any_to_any\[cut-sgd\]|bit_identical\[pp2,fsdp2-4-epoch\])",
    r"test_parity.*weighted_by_tokens.*\[None-(pp2,tp2|fsdp2,tp2|pp4)\]",
    r"test_parity.*far_below_the_norm.*\[(tp4|pp4)\]",
    r"test_parity.*matches_one_process\[[^\]]*,[^\]]*-gpt-4ranks\]",
    r"test_explain.*real_ranks_do.*\[tp2\]",
    r"test_composed.*fewer_samples.*\[(pp2:zb,ddp2|pp4)-1\]",
    r"test_worlds.*one_step_at_most",
    r"test_tensor.*\[4\]",
    r"test_worlds.*cut_off_and_comes_back",
    r"test_damage.*resumes_from_the_older_one",
    r"test_export.*exports_of_every_strategy",
    r"test_mpi.*cause_of_a_failure_is_told_once",
    r"test_trainers.*killed_server_ends_the_job",
    r"test_pretend_world.*in_each_stage\[pp4,fsdp,tp4-",
    r"test_composed.*test_settings\[pp2,fsdp2-gpt-settings(0|4|10)\]",
    r"test_pipeline.*(encoder_and_decoder|changed_in_place_between_blocks)\[pp4:zb\]",
    r"test_repeat.*run_again\[zero3x2,tp2",
    r"test_models.*resnet18_of_torchvision\[pp2\]",
    r"test_explain.*explain_gpt\[(pp4-|pp2:interleaved)",
    r"test_state_copies.*without_a_shared_disk\[zero3\]",
    r"test_explain.*real_ranks_do",  # as test_messages has them
    r"test_pretend_world.*in_each_stage\[(fsdp,tp4|pp2:interleaved,fsdp)-",
    r"test_parity.*(far_below_the_norm.*\[fsdp2,tp2\]|weighted_by_tokens.*\[2-(fsdp2|pp2),tp2\])",
    r"test_composed.*test_settings\[fsdp2,tp2-gpt-settings(2|5|13)\]",
    r"test_order.*small_sets_reach_every_permutation.*\[5\]",
    r"test_failure.*two_jobs_at_once",
    r"test_collectives.*collective_and_type_is_right\[3\]",
    r"test_memory.*hsdp_shards_inside",
    r"test_decisions.*(machines_with_quick_links|one_device_and_the_model_fits_it)",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    patterns = [re.compile(pattern) for pattern in REPETITIONS]
    for item in items:
        if any(pattern.search(item.nodeid) for pattern in patterns):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish(session: pytest.Session) -> None:
    """transformers and torchvision take seconds to import: once, not on every rank of every test. Without those tests,
    ranks are forked without these packages, as they are for most users."""
    if any(item.path.name == "test_models.py" for item in session.items):
        multiprocessing.set_forkserver_preload([*_PRELOADED, "tests.multi.test_models"])
