"""Eight ciphers and a mixture of eight small experts: the router learns to give each cipher an expert of its own.

    rung train examples/moe/task.py
    rung train examples/moe/task.py --strategy ep2 --nproc 2

A cipher replaces each letter by another one. A message has one cipher, and all its letters go to the experts that the
router chooses for the message; a single expert is too small to keep all the tables. `ep` shares out the experts among
ranks, and sends each row to the rank of its expert.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

CIPHERS, LETTERS = 8, 32

# The balance is a product of means over a whole micro-batch, so the loss is no mean over samples.
loss_scope = "batch"
defaults = {"batch_size": 64, "steps": 200}


class Experts(nn.Module):
    """One tensor for each weight of all experts, with a row for each expert: that is what `ep` shares out."""

    def __init__(self, num_experts, width, hidden):
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, width, hidden) / hidden**0.5)

    def forward(self, rows, chosen, weights):
        result = torch.zeros_like(rows)
        for number in range(self.num_experts):
            row, place = torch.where(chosen == number)
            found = F.linear(F.gelu(F.linear(rows[row], self.up[number])), self.down[number])
            result = result.index_add(0, row, found * weights[row, place, None])
        return result


class Mixture(nn.Module):
    def __init__(self, width, hidden, num_experts, num_chosen):
        super().__init__()
        self.num_chosen = num_chosen
        self.letter, self.cipher = nn.Embedding(LETTERS, width), nn.Embedding(CIPHERS, width)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = Experts(num_experts, width, hidden)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, pairs):
        x = self.letter(pairs[..., 0]) + self.cipher(pairs[..., 1])
        probabilities = self.router(x.mean(1)).softmax(-1)
        weights, chosen = probabilities.topk(self.num_chosen, dim=-1)
        each = (one.unsqueeze(1).expand(-1, x.shape[1], -1).flatten(0, 1) for one in (chosen, weights))
        mixed = self.experts(x.flatten(0, 1), *each).view_as(x)
        return self.head(mixed), probabilities


def ciphers():
    random = torch.Generator().manual_seed(1)
    return torch.stack([torch.randperm(LETTERS, generator=random) for _ in range(CIPHERS)])


def messages(count, length, seed):
    random = torch.Generator().manual_seed(seed)
    letters = torch.randint(LETTERS, (count, length), generator=random)
    numbers = torch.randint(CIPHERS, (count, 1), generator=random).expand(-1, length)
    return TensorDataset(torch.stack([letters, numbers], -1), ciphers()[numbers, letters])


def model(width=32, hidden=16, experts=8, chosen=1):
    return Mixture(width, hidden, experts, chosen)


def train_data(count=4096, length=16):
    return messages(count, length, seed=2)


def eval_data(count=256, length=16):
    return messages(count, length, seed=3)


def loss(output, target, balance=0.1):
    logits, probabilities = output
    num_experts = probabilities.shape[-1]
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.argmax(-1, keepdim=True), 1.0)
    even = num_experts * (chosen.mean(0) * probabilities.mean(0)).sum()  # 1 where all experts get as much
    return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + balance * even


def metrics(output, target):
    return {"right": (output[0].argmax(-1) == target).double().mean(1)}


def optimizer(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr)
