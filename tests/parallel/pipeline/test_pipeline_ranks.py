"""Pipelines of models that were not written for one: whatever forward does between its parts, the numbers are those of
one process, or an error says which line cannot be cut."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rung.spec.compatibility import micro_batch_size
from rung.spec.config import RunConfig
from rung.spec.strategy import parse, required_num_ranks
from rung.spec.task import Task
from tests.harness import RankFailed, on_ranks
from tests.marks import slow
from tests.parity import Outcome, largest_difference, with_rung
from tests.tasks import TinyGPT, grouped_sgd, text_data, text_task

WIDTH, VOCABULARY = 8, 23


class Mixer(nn.Module):
    """A block that looks at other positions, where a mask allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, memory: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        source = y if memory is None else memory
        bias = None if mask is None else mask[:, None, :].bool()
        x = x + F.scaled_dot_product_attention(self.query(y), self.key(source), source, attn_mask=bias)
        return x + self.down(F.gelu(self.up(x)))


class Base(nn.Module):
    def __init__(self, *, layers: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Mixer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)


class Masked(Base):
    """Takes its arguments by name, and gives every block the mask that it made of one."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.token(input_ids)
        for layer in self.layers:
            x = layer(x, mask=attention_mask)
        return self.head(x)


class Skipping(Base):
    """The first blocks' results are used by the last ones, across every cut."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.token(tokens)
        kept = []
        for layer in self.layers[:2]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[2:]:
            x = layer(x + kept.pop())
        return self.head(x - start.mean(dim=1, keepdim=True))


class Looping(Base):
    """Two blocks, gone through twice: the second round may lie on another stage."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class EncoderDecoder(Base):
    """Two lists of blocks; every decoder block takes what the encoder made. Embedding and head are shared."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.decoder = nn.ModuleList([Mixer() for _ in range(3)])
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.token(tokens)
        for layer in self.layers:
            memory = layer(memory)
        x = self.token(tokens.flip(1))
        for layer in self.decoder:
            x = layer(x, memory=memory)
        return self.head(x)


class Carrying(nn.Module):
    """Takes and gives more than a tensor: a dict with a mask and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixer()

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        hidden = self.inner(state["hidden"], state["mask"])
        return {"hidden": hidden, "mask": state["mask"].roll(1, 1), "count": state["count"] + 1}


class DictBetweenBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Carrying() for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens % 5 != 0
        mask[:, 0] = mask[:, -1] = mask[:, 2] = True
        state: dict[str, Any] = {"hidden": self.token(tokens), "mask": mask, "count": 0}
        for layer in self.layers:
            state = layer(state)
            state["hidden"] = state["hidden"] * self.scale / state["count"]
        return self.head(state["hidden"])


class ChangingInPlace(Base):
    """Between its blocks it changes what they returned, on all stages alike, and fills a tensor piece by piece."""

    def forward(self, tokens: Tensor) -> Tensor:
        start = self.token(tokens)
        x = torch.zeros_like(start)
        x[:, 1:] = start[:, :-1]
        late = torch.zeros_like(start)
        late[:, 2:] = start[:, 2:] * 2
        for layer in self.layers:
            x = layer(x)
            x.mul_(0.5)
            x[:, 0] += 1
        return self.head(x + late)


class Remembering(nn.Module):
    """A block that is handed something by an attribute, not by an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Mixer()
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.memory[0].mean(dim=1, keepdim=True)


class ByAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Remembering() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            layer.memory[:] = [x if layer is self.layers[0] else self.layers[0].memory[0]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recurring(Base):
    """One block six times, and one parameter in every round: a stage uses both more than once."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for _ in range(6):
            x = self.layers[0](x) * self.scale
        return self.head(x)


class Deciding(Base):
    """Decides by the values of a tensor."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 100:
                x = x / 100
        return self.head(x)


def masked_task() -> Task:
    """Sequences of different lengths, padded to the longest of their batch; a dict whose entries go to the model."""
    tokens, _ = text_data(26).tensors
    lengths = torch.randint(2, 7, (26,), generator=torch.Generator().manual_seed(3))
    samples = [row[: int(length)] for row, length in zip(tokens, lengths, strict=True)]

    def collate(batch: list[Tensor]) -> dict[str, Tensor]:
        ids = pad_sequence([row[:-1] for row in batch], batch_first=True)
        labels = pad_sequence([row[1:] for row in batch], batch_first=True, padding_value=-100)
        return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}

    return text_task(
        model=Masked,
        train_data=lambda: samples,
        eval_data=lambda: samples[:7],
        collate=collate,
        loss_weight=lambda target: (target != -100).sum(),
    )


def task_of(model: type[nn.Module]) -> Task:
    return text_task(model=model, train_data=lambda: text_data(26), eval_data=lambda: text_data(7))


def skipping_task() -> Task:
    return task_of(Skipping)


def looping_task() -> Task:
    return task_of(Looping)


def encoder_decoder_task() -> Task:
    return task_of(EncoderDecoder)


def dict_task() -> Task:
    return task_of(DictBetweenBlocks)


def in_place_task() -> Task:
    return task_of(ChangingInPlace)


def attribute_task() -> Task:
    return task_of(ByAttribute)


def recurring_task() -> Task:
    return task_of(Recurring)


def deciding_task() -> Task:
    return task_of(Deciding)


def frozen_start_task() -> Task:
    def model() -> nn.Module:
        gpt = TinyGPT(layers=4)
        gpt.head.weight = nn.Parameter(torch.randn_like(gpt.token.weight))
        for part in (gpt.token, *gpt.blocks[:2]):
            part.requires_grad_(False)
        return gpt

    return replace(task_of(TinyGPT), model=model, optimizer=grouped_sgd)


CONFIG = RunConfig(batch_size=8, steps=4, precision="fp64", clip=0.5, device="cpu")


def difference_from_one_process(make_task: Callable[[], Task], strategy: str, config: RunConfig = CONFIG) -> float:
    num_ranks = required_num_ranks(strategy)
    assert num_ranks is not None
    found: list[Outcome] = on_ranks(with_rung, num_ranks, make_task, strategy, config)
    layout = parse(strategy, num_ranks)
    own = micro_batch_size(config, layout)
    alone = replace(config, micro_batch=None if own is None else own * layout.num_data_ranks)
    expected = with_rung(make_task, "single", alone)
    assert all(torch.isfinite(torch.tensor([*expected.losses, *expected.norms])))
    assert all(other.losses == found[0].losses for other in found)
    return largest_difference(expected, found[0])  # rank 0 has the whole weights


@pytest.mark.parametrize("strategy", ["pp2", slow("pp2,ddp2"), slow("pp2,tp2")])
def test_sequences_of_changing_lengths_and_a_mask_passed_by_name(strategy: str) -> None:
    assert difference_from_one_process(masked_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", slow("pp4"), slow("pp2,fsdp2")])
def test_skip_connection_across_the_cut(strategy: str) -> None:
    assert difference_from_one_process(skipping_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", "pp2:interleaved", slow("pp2,fsdp2")])
def test_blocks_that_are_called_in_two_stages(strategy: str) -> None:
    assert difference_from_one_process(looping_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", slow("pp4:zb"), slow("pp2,tp2")])
def test_encoder_and_decoder(strategy: str) -> None:
    assert difference_from_one_process(encoder_decoder_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", slow("pp4")])
def test_blocks_that_exchange_dicts_with_masks_and_numbers(strategy: str) -> None:
    assert difference_from_one_process(dict_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", slow("pp4:zb")])
def test_results_that_are_changed_in_place_between_blocks(strategy: str) -> None:
    assert difference_from_one_process(in_place_task, strategy) < 1e-9


def test_what_a_block_is_handed_by_an_attribute() -> None:
    assert difference_from_one_process(attribute_task, "pp2") < 1e-9


@pytest.mark.parametrize("strategy", ["pp2:zb", slow("pp2,fsdp2")])
def test_parameters_that_a_stage_uses_twice(strategy: str) -> None:
    assert difference_from_one_process(recurring_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2:zb", slow("pp2,fsdp2")])
def test_first_stage_is_frozen(strategy: str) -> None:
    assert difference_from_one_process(frozen_start_task, strategy) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", slow("pp2:gpipe")])
def test_batch_that_does_not_divide(strategy: str) -> None:
    config = replace(CONFIG, batch_size=7, micro_batch=2)  # micro-batches of 2, 2, 2, 1, and 5 samples at the end
    assert difference_from_one_process(skipping_task, strategy, config) < 1e-9


@pytest.mark.parametrize("strategy", [slow("pp4"), "pp4:zb", slow("pp2:interleaved")])
def test_fewer_micro_batches_than_stages(strategy: str) -> None:
    config = replace(CONFIG, batch_size=5, micro_batch=3)  # two micro-batches, and one at the end
    assert difference_from_one_process(skipping_task, strategy, config) < 1e-9


@pytest.mark.parametrize("strategy", ["pp2", "tp2"])
def test_forward_that_decides_by_values_is_refused_with_its_line(strategy: str) -> None:
    lines, first = inspect.getsourcelines(Deciding)
    line = first + next(number for number, text in enumerate(lines) if "if x.abs()" in text)
    with pytest.raises(RankFailed) as failure:
        on_ranks(with_rung, 2, deciding_task, strategy, CONFIG)
    assert f"{Path(__file__)}:{line}: if x.abs().max() > 100" in failure.value.error
    assert "forward branches on tensor values" in failure.value.error
