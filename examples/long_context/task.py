"""Find a needle in a long sequence: one token of thousands names the answer, and a question stands at the end.

    rung train examples/long_context/task.py --set train_data.length=512 --set eval_data.length=512
    rung train examples/long_context/task.py --strategy cp2 --nproc 2

Nothing but attention over the whole sequence can answer, so a sequence that is cut into windows learns nothing. Long
sequences need memory for activations; `cp` shares the positions of each sequence among ranks.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

NOISE, ANSWERS = 32, 8
QUESTION = NOISE + ANSWERS

defaults = {"batch_size": 8, "steps": 150, "clip": 1.0}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Reader(nn.Module):
    def __init__(self, layers, width, heads):
        super().__init__()
        self.token = nn.Embedding(QUESTION + 1, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, ANSWERS)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Haystacks(Dataset):
    """Noise with one needle in it, and questions behind the needle, one of them at the end. Every index is another one.

    Distances are even on a logarithmic scale: questions near their needle teach what to look for. With the one at the
    end alone, the loss stays at that of guessing for hundreds of steps, the longer the sequence the longer.
    """

    def __init__(self, length, count, seed, questions):
        self.length, self.count, self.seed, self.questions = length, count, seed, questions

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(self.seed * self.count + index)
        tokens = torch.randint(NOISE, (self.length,), generator=random)
        answer = int(torch.randint(ANSWERS, (), generator=random))
        place = int(distances(self.length - 1, 1, random)) - 1
        behind = distances(self.length - 1 - place, self.questions - 1, random)
        tokens[place] = NOISE + answer
        tokens[place + behind] = QUESTION
        tokens[-1] = QUESTION
        return tokens, torch.where(tokens == QUESTION, answer, -100)  # which cross entropy ignores


def distances(most, count, random):
    return (most ** torch.rand(count, generator=random, dtype=torch.float64)).long()


def model(layers=2, width=64, heads=4):
    return Reader(layers, width, heads)


def train_data(length=4096, count=100_000):
    return Haystacks(length, count, seed=1, questions=16)


def eval_data(length=4096, count=32):
    return Haystacks(length, count, seed=2, questions=1)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def loss_weight(target):
    return (target >= 0).sum()


def metrics(output, target):
    return {"found": (output[:, -1].argmax(-1) == target[:, -1]).double()}


def optimizer(model, lr=2e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
