"""Plans of tensor parallelism: what is cut how, proven or refused. One process, no mesh."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rung.distributed import fake_world
from rung.errors import StrategyError, TaskError
from rung.parallel.linear_layers import can_shard
from rung.parallel.tensor.plan import TensorPlan, make_plan
from rung.parallel.tensor.survey import Survey
from tests.tasks import TinyGPT
from tests.tensor_models import CASES, Attention, Decoder, Leaking, PreNormGPT, SwiGLU


def plan_of(model: nn.Module, inputs: Tensor, num_ranks: int, **options: Any) -> TensorPlan:
    mode = fake_world.new_fake_mode()
    with fake_world.fake_tensors(mode):
        fake = torch.empty(inputs.shape, dtype=inputs.dtype)
    survey = Survey(model, num_ranks, lambda: model(fake), torch.device("cpu"), mode, options.pop("blocks", None))
    return make_plan(survey, **options)


def case_plan(case: str, num_ranks: int = 2, **options: Any) -> TensorPlan:
    with torch.device("meta"):
        model = CASES[case].make().double()
    return plan_of(model, CASES[case].inputs(torch.Generator()), num_ranks, **options)


def words(plan: TensorPlan, prefix: str = "") -> dict[str, str]:
    return {name.removeprefix(prefix): word for name, word in plan.styles.items() if name.startswith(prefix)}


GATHERED = dict.fromkeys(("query", "key", "value", "out"), "colwise_gather")
PAIRED = {"query": "colwise", "key": "colwise", "value": "colwise", "out": "rowwise"}


def test_chunks_must_leave_no_rank_empty() -> None:
    assert [n for n in range(1, 11) if can_shard(9, n)] == [1, 2, 3, 5, 9]
    assert can_shard(23, 4) and not can_shard(23, 16)


def test_layers_outside_blocks_are_paired_through_their_parent() -> None:
    plan = case_plan("mlp", 2)
    assert words(plan) == {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}
    assert plan.source == "derived"
    assert plan.whole == plan.notes == ()
    assert case_plan("mlp", 4).whole == ("head",)  # five rows leave one of four ranks empty


def test_gates_and_heads_found_by_their_size_are_proven() -> None:
    for case in ("decoder", "frozen"):
        plan = case_plan(case)
        assert words(plan, "blocks.1.0.") == PAIRED
        assert words(plan, "blocks.0.1.") == {"gate": "colwise", "up": "colwise", "down": "rowwise"}
        assert words(plan)["token"] == "embedding"
        assert words(plan)["head"] == "vocabulary_head"
        assert plan.whole == ("blocks.*.*.norm",)


def test_fixed_heads_are_gathered_and_said() -> None:
    plan = case_plan("fixed heads")
    assert words(plan, "blocks.0.0.") == GATHERED
    assert words(plan, "blocks.0.1.")["down"] == "rowwise"
    assert "blocks.*.*.query" in plan.notes[0]


def test_heads_that_cannot_be_dealt_out_are_gathered() -> None:
    assert words(case_plan("six heads", 2), "blocks.0.0.") == PAIRED
    assert words(case_plan("six heads", 3), "blocks.0.0.") == PAIRED
    assert words(case_plan("six heads", 4), "blocks.0.0.") == GATHERED
    assert words(case_plan("grouped", 2), "blocks.0.0.") == PAIRED
    assert words(case_plan("grouped", 4), "blocks.0.0.") == GATHERED


def test_norms_between_cut_layers_sum_their_gradients() -> None:
    plan = case_plan("normed heads")
    assert words(plan, "blocks.0.0.") == {**PAIRED, "query_norm": "summed", "key_norm": "summed"}
    assert plan.pairs[0].summed == ("blocks.0.0.key_norm", "blocks.0.0.query_norm")


def test_tied_head_and_attention_without_output_layer() -> None:
    plan = case_plan("tiny gpt", 4)
    gathered = dict.fromkeys(("query", "key", "value"), "colwise_gather")
    assert words(plan, "blocks.0.") == {**gathered, "up": "colwise", "down": "rowwise"}
    assert (plan.styles["token"], plan.styles["head"]) == ("embedding", "vocabulary_head")
    assert case_plan("tiny gpt", 4, vocabulary_loss=False).styles["head"] == "colwise_gather"
    assert case_plan("tiny gpt", 9).whole[0] == "token"  # 23 rows leave one of 9 ranks empty


def test_tied_weights_that_cannot_be_cut_alike_stay_whole() -> None:
    with torch.device("meta"):
        model = TinyGPT()
        model.norm = nn.Linear(12, 12, bias=False)
        model.extra = nn.LayerNorm((23, 12), bias=False)
        model.extra.weight = model.token.weight
    plan = plan_of(model, torch.zeros(2, 6, dtype=torch.long), 2)
    assert {"token", "head", "extra"} <= set(plan.whole)
    assert any("share token.weight" in note for note in plan.notes)


def test_disagreement_on_one_tie_undoes_another() -> None:
    """As in BERT: the head shares its bias with a module that is whole, and its weight with the embedding."""
    with torch.device("meta"):
        model = TinyGPT()
        model.head.bias = nn.Parameter(torch.zeros(23))
        model.blocks[0].spare_bias = model.head.bias
    plan = plan_of(model, torch.zeros(2, 6, dtype=torch.long), 2)
    assert {"token", "head"} <= set(plan.whole)


def test_a_weight_used_by_hand_stays_whole() -> None:
    plan = case_plan("directly tied")
    assert words(plan) == {"up": "colwise", "down": "rowwise"}
    assert plan.whole == ("token",)


def test_torch_s_encoder_layer_keeps_its_attention_whole() -> None:
    plan = case_plan("encoder")
    assert words(plan, "layers.0.") == {"linear1": "colwise", "linear2": "rowwise"}
    assert "layers.*.self_attn" in plan.whole
    assert "layers.*.self_attn.out_proj" in plan.whole


def test_of_a_cnn_only_linear_layers_are_cut() -> None:
    plan = case_plan("cnn")
    assert words(plan) == {"frozen": "colwise", "head": "rowwise"}
    assert "first.*" in plan.whole


def test_conv1d_counts_as_a_linear_layer() -> None:
    plan = case_plan("conv1d")
    assert words(plan, "blocks.0.") == {"mixed": "colwise_gather", "up": "colwise", "down": "rowwise"}


def test_the_example_is_paired() -> None:
    plan = case_plan("example gpt")
    assert words(plan, "blocks.1.attention.") == PAIRED
    assert plan.styles["position"] == "embedding"


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_pair_that_leaks_is_no_pair(kind: str) -> None:
    """Looked at by something else, or with a gradient that goes around the first layer."""
    plan = plan_of(Leaking(kind), torch.zeros(4, 8), 2)
    assert plan.styles["up"] == plan.styles["down"] == "colwise_gather"


def test_layers_called_twice_are_no_pair() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.up(x)))

    assert set(words(plan_of(Twice(), torch.zeros(4, 8), 2)).values()) == {"colwise_gather"}


def test_unequal_parts_with_dropout_in_between_are_gathered() -> None:
    """Ranks would draw unequally many random numbers, and masks that must be alike would differ."""

    def block(dropout: float) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 23), nn.Dropout(dropout), nn.Linear(23, 8))

    assert words(plan_of(block(0.0), torch.zeros(4, 8), 2)) == {"0": "colwise", "2": "rowwise"}
    assert set(words(plan_of(block(0.1), torch.zeros(4, 8), 2)).values()) == {"colwise_gather"}


def test_embeddings_with_habits_of_their_own_stay_whole() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Embedding(9, 4, max_norm=1.0), nn.Embedding(9, 4, sparse=True)
            self.c, self.head = nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.a(x) + self.b(x) + self.c(x))

    plan = plan_of(Odd(), torch.zeros(2, 3, dtype=torch.long), 2)
    assert words(plan) == {"head": "colwise_gather"}
    assert plan.whole == ("a", "b", "c")


def test_a_model_with_nothing_to_cut_is_refused() -> None:
    with pytest.raises(StrategyError, match="on 2 ranks finds nothing to shard"):
        plan_of(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten()), torch.zeros(1, 1, 5, 5), 2)


def test_a_plan_leaves_model_and_random_numbers_alone() -> None:
    model = Decoder()
    before, flags = {n: p.clone() for n, p in model.named_parameters()}, [m.training for m in model.modules()]
    state = torch.get_rng_state()
    first, second = (plan_of(model, torch.zeros(2, 6, dtype=torch.long), 2) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert not any("forward" in vars(m) for m in model.modules())
    assert all(torch.equal(p, before[n]) and p.requires_grad for n, p in model.named_parameters())


def test_a_plan_can_be_made_among_fake_tensors() -> None:
    mode = fake_world.new_fake_mode()
    with fake_world.fake_tensors(mode):
        model, tokens = Decoder(), torch.zeros(2, 6, dtype=torch.long)
        plan = make_plan(Survey(model, 4, lambda: model(tokens), torch.device("cpu"), mode, None))
    assert plan.styles == case_plan("decoder", 4).styles


def test_large_batches_are_tried_small() -> None:
    """A block costs what a few tokens cost, however long the batch is."""
    with torch.device("meta"):
        model = Decoder(16, 4, width=256, hidden=512)
    plan = plan_of(model, torch.empty(100_000, 4096, dtype=torch.long, device="meta"), 4)
    assert words(plan, "blocks.0.0.") == PAIRED


# Plans that are given.

PAIR = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def given(plan: dict[str, str], num_ranks: int = 2, case: str = "tiny gpt", **options: Any) -> TensorPlan:
    return case_plan(case, num_ranks, given=plan, **options)


def test_a_task_s_plan_is_taken_as_it_is() -> None:
    plan = given({**PAIR, "head": "colwise_gather", "token": "rowwise"})
    assert plan.source == "task"
    assert words(plan, "blocks.1.") == {"up": "colwise", "down": "rowwise"}
    assert words(plan)["token"] == "embedding"
    assert "blocks.*.query" in plan.whole
    assert plan.pairs[1].rows == "blocks.1.down"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"blocks.*.upp": "colwise"}, r"'blocks\.\*\.upp' matches no module.*Did you mean 'blocks\.\*\.up'"),
        ({"blocks.*.up": "columnwise"}, "'columnwise' for .* is not one of colwise, rowwise.*Did you mean 'colwise'"),
        ({"blocks.*.norm": "colwise"}, r"blocks\.0\.norm is a LayerNorm and cannot be colwise"),
        ({"*.up": "colwise"}, "matches no module"),
    ],
)
def test_typing_errors_in_a_task_s_plan_are_named(plan: dict[str, str], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        given(plan)


@pytest.mark.parametrize(
    ("plan", "num_ranks", "case", "message"),
    [
        (PAIR, 24, "tiny gpt", r"blocks\.0\.up is colwise, and its 36 rows.* Valid: 1, 2, 3"),
        ({"head": "rowwise"}, 10, "tiny gpt", r"its 12 columns .* Valid: 1, 2, 3, 4, 6, 12\."),
        ({"blocks.*.up": "colwise"}, 2, "tiny gpt", r"blocks\.0\.up is colwise and has no partner"),
        (
            {"blocks.*.query": "colwise", "blocks.*.up": "rowwise"},
            2,
            "tiny gpt",
            "gives other results than whole, on any",
        ),
        (
            {f"blocks.*.0.{n}": word for n, word in PAIRED.items()},
            4,
            "grouped",
            r"on 4 ranks: with blocks\.0\.0\.query.*Valid below 4: 1, 2\.",
        ),
        ({"token": "embedding"}, 2, "directly tied", "its weight is also used by other code"),
    ],
)
def test_a_wrong_plan_is_refused(plan: dict[str, str], num_ranks: int, case: str, message: str) -> None:
    with pytest.raises((StrategyError, TaskError), match=message):
        given(plan, num_ranks, case)


class Carrying(nn.Module):
    """As a Hugging Face model carries its plan: the base model's in its configuration, the head's at the class."""

    base_model_prefix = "model"
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, changes: dict[str, str] | None = None, groups: int = 4) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed = nn.Embedding(23, 16)
        self.model.layers = nn.ModuleList(
            nn.ModuleDict({"attention": Attention(16, 4, groups), "mlp": SwiGLU(16, 24)}) for _ in range(2)
        )
        for layer in self.model.layers:
            layer.forward = lambda x, layer=layer: layer["mlp"](layer["attention"](x))
        self.lm_head = nn.Linear(16, 23)
        plan = {f"layers.*.attention.{n}": word for n, word in PAIRED.items()}
        plan |= {"layers.*.mlp.gate": "colwise", "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
        self.config = SimpleNamespace(base_model_tp_plan={**plan, **(changes or {})})

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = self.model.embed(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return {"logits": self.lm_head(x), "past_key_values": [x]}


def test_a_model_s_own_plan_is_honoured_and_completed() -> None:
    plan = plan_of(Carrying(), torch.zeros(2, 6, dtype=torch.long), 2)
    assert plan.source == "model"
    assert words(plan, "model.layers.1.attention.") == PAIRED
    assert words(plan)["model.embed"] == "embedding"
    assert words(plan)["lm_head"] == "vocabulary_head"


def test_a_model_s_own_plan_that_does_not_hold_is_derived() -> None:
    """One head of keys for four of queries, which the plan would cut in two."""
    plan = plan_of(Carrying(groups=1), torch.zeros(2, 6, dtype=torch.long), 2)
    assert plan.source == "derived"
    assert words(plan, "model.layers.1.mlp.") == {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    assert any("the model's own plan does not hold" in note for note in plan.notes)


def test_a_cache_does_not_keep_a_block_from_being_tried() -> None:
    class DynamicCache(list):  # type: ignore[type-arg]
        pass

    class Caching(Attention):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            if cache is not None:
                cache.append(x)
                torch.cat(list(cache))  # with a tensor of the rehearsal, this fails
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Caching(16, 4, 4), Caching(16, 4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            cache = DynamicCache()
            for block in self.blocks:
                x = block(x, cache)
            return x

    assert words(plan_of(Model(), torch.zeros(2, 6, 16), 2), "blocks.0.") == PAIRED


def test_words_of_a_model_that_are_not_known_leave_the_block_to_derivation() -> None:
    model = Carrying({"layers.*.attention.query": "packed_colwise"})
    plan = plan_of(model, torch.zeros(2, 6, dtype=torch.long), 2)
    assert words(plan, "model.layers.1.attention.") == PAIRED
    assert "model.layers.*.attention.query: the model's plan uses packed_colwise" in plan.notes[0]


def test_a_model_s_plan_that_is_wrong_on_so_many_ranks_is_refused() -> None:
    with pytest.raises(StrategyError, match="Valid below 4: 1, 2"):
        plan_of(Carrying(groups=2), torch.zeros(2, 6, dtype=torch.long), 4)


# Sequence parallelism.


def test_sequences_are_cut_between_blocks_of_pairs_and_norms() -> None:
    plan = case_plan("pre-norm", 4, sequence_parallel=True)
    assert plan.sequence_blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert words(plan, "blocks.0.")["attention.query"] == "colwise_sequence"
    assert words(plan, "blocks.0.")["mlp.3"] == "rowwise_sequence"
    assert words(plan, "blocks.0.")["mlp_norm"] == "summed"
    assert plan.gathers["blocks.0.attention"] == ("hidden",)
    assert plan.whole == ("norm",)


def test_sequences_are_left_whole_where_a_block_is_not_of_that_kind() -> None:
    for case, reason in (
        ("tiny gpt", "query is neither in a pair of sharded layers nor a norm"),
        ("decoder", "outside of its sharded layers mixes positions"),
        ("encoder", "self_attn is neither"),
    ):
        plan = case_plan(case, sequence_parallel=True)
        assert plan.sequence_blocks == ()
        assert any(note.startswith("sequence parallelism is off") and reason in note for note in plan.notes), case
        assert not any(word.endswith("_sequence") for word in plan.styles.values())


def test_sequences_are_left_whole_where_positions_are_mixed() -> None:
    class Shifting(PreNormGPT):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.mlp_norm.forward = lambda x: F.layer_norm(x.roll(1, dims=1), x.shape[-1:])

    plan = plan_of(Shifting(), torch.zeros(2, 8, dtype=torch.long), 2, sequence_parallel=True)
    assert "mixes positions" in plan.notes[-1]


def test_sequences_are_cut_only_in_blocks_that_follow_each_other() -> None:
    class Skipping(PreNormGPT):
        def forward(self, tokens: Tensor) -> Tensor:
            first = self.blocks[0](self.token(tokens), self.mask)
            second = self.blocks[1](first, self.mask) + first
            return self.head(self.norm(self.blocks[2](second, self.mask)))

    plan = plan_of(Skipping(), torch.zeros(2, 8, dtype=torch.long), 2, sequence_parallel=True)
    assert len(plan.sequence_blocks) == 1
    assert "does not take the unchanged result of blocks." in plan.notes[-1]


def test_a_sequence_that_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"sequences of 6 among 4 ranks.* near by: 4, 8\."):
        plan_of(PreNormGPT(), torch.zeros(2, 6, dtype=torch.long), 4, sequence_parallel=True)
