"""Hugging Face's own GPT-2 or Llama, built from a configuration with random weights, on Python source code.

    rung train examples/huggingface/task.py --strategy pp2 --nproc 2
    rung train examples/huggingface/task.py --strategy fsdp2,tp2 --nproc 4 --set model.kind=llama

Nothing is downloaded. The models are transformers' classes as they are: nothing of them is rewritten for a strategy.
"""

import os
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

try:
    import torchvision  # transformers imports it if it is installed
except ImportError:
    pass
except RuntimeError:  # a wheel made for CUDA beside a torch without: two operators for object detection are missing
    missing = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        missing.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

defaults = {"batch_size": 16, "steps": 300, "clip": 1.0}


def model(kind="gpt2", layers=4, width=128, heads=4, context=64, vocabulary=128):
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=context,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return GPT2LMHeadModel(config)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=vocabulary,
            max_position_embeddings=context,
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 2),
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        return LlamaForCausalLM(config)
    raise ValueError(f"model.kind cannot be {kind!r}; it is gpt2 or llama")


class Text(Dataset):
    """Overlapping pieces of a text: a piece, and the same piece one character on."""

    def __init__(self, tokens, context):
        self.tokens, self.context = tokens, context

    def __len__(self):
        return max(0, (len(self.tokens) - 1 - self.context) // (self.context // 2) + 1)

    def __getitem__(self, index):
        start = index * (self.context // 2)
        piece = self.tokens[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


def train_data(context=64):
    tokens = read_sources()
    return Text(tokens[: len(tokens) * 19 // 20], context)


def eval_data(context=64):
    tokens = read_sources()
    return Text(tokens[len(tokens) * 19 // 20 :], context)


def loss(output, target):
    return F.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def metrics(output, target):
    return {"next_character": (output.logits.argmax(dim=-1) == target).float().mean(dim=1)}


def optimizer(model, lr=3e-3, weight_decay=0.1):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)


def read_sources(characters=400_000):
    """The standard library's own modules, one after the other, as ASCII codes."""
    text = ""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    return torch.frombuffer(bytearray(text[:characters].encode("ascii", errors="replace")), dtype=torch.uint8)
