"""GPT: a character-level transformer with tied embedding, on the Python sources found on any Python installation.

    rung train examples/gpt/task.py --strategy fsdp --nproc 2 --set model.layers=4
    rung train examples/gpt/task.py --set model.size=124m

`size` picks the shape: 0.8m, 3m, 10m, 25m, 124m, 350m or 1.3b (the last three are named as is usual, with the embedding
of a large vocabulary counted in, which this one has not). `layers`, `width`, `heads` override parts of it.
"""

import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = len(CHARACTERS) + 1  # and one for every character that is not among them

#         layers, width, heads
SIZES = {
    "0.8m": (4, 128, 4),
    "3m": (6, 192, 6),
    "10m": (6, 384, 6),
    "25m": (8, 512, 8),
    "124m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "1.3b": (24, 2048, 16),
}

defaults = {"batch_size": 16, "steps": 400, "clip": 1.0}
blocks = "blocks.*"


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary, dropout):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # the residual stream must not grow with depth
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * layers) ** 0.5)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        if tokens.shape[1] > self.position.num_embeddings:
            raise ValueError(
                f"pieces of {tokens.shape[1]} characters do not fit a context of {self.position.num_embeddings}; "
                "set model.context, train_data.context and eval_data.context alike"
            )
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(size="0.8m", layers=0, width=0, heads=0, context=64, vocabulary=VOCABULARY, dropout=0.0):
    if size not in SIZES:
        raise ValueError(f"model.size cannot be {size!r}; it is one of {', '.join(SIZES)}")
    shape = [chosen or default for chosen, default in zip((layers, width, heads), SIZES[size])]
    return GPT(*shape, context, vocabulary, dropout)


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


def train_data(context=64, characters=1_000_000):
    tokens = read_sources(characters)
    return Text(tokens[: len(tokens) * 19 // 20], context)


def eval_data(context=64, characters=1_000_000):
    tokens = read_sources(characters)
    return Text(tokens[len(tokens) * 19 // 20 :], context)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def metrics(output, target):
    return {"next_character": (output.argmax(dim=-1) == target).float().mean(dim=1)}


def optimizer(model, kind="adamw", lr=3e-3, weight_decay=0.1, momentum=0.9):
    if kind == "muon":  # for the matrices of the blocks; `schedule` is called for each of the two
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        rest = [p for name, p in model.named_parameters() if p.dim() < 2 or not name.startswith("blocks.")]
        return {
            "matrices": torch.optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"),
            "rest": torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0),
        }
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    if kind == "sgd":  # wants another rate: about 0.1
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def schedule(optimizer, total_steps, floor=0.0):
    """Up over the first steps, then down to `floor` of the rate."""
    warm_up = max(1, min(50, total_steps // 10))
    least = floor * optimizer.defaults["lr"]
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, total_steps - warm_up), least),
        ],
        [warm_up],
    )


def read_sources(characters):
    """The standard library's own modules, one after the other, as character numbers."""
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    text = ""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    return torch.tensor([numbers.get(c, VOCABULARY - 1) for c in text[:characters]], dtype=torch.uint8)
