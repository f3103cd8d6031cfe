"""Documents of any length, packed into rows of one length: no padding, and no document sees another.

    rung train examples/packed/task.py
    rung train examples/packed/task.py --strategy zero3 --nproc 2

`Packed` is a plain map-style data set, so its rows are shuffled, shared out among ranks and resumed as any other's.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

VOCABULARY = 32

defaults = {"batch_size": 16, "steps": 100, "clip": 1.0, "eval_every": "never"}


class Packed(Dataset):
    """All documents one after the other, in rows of `context` tokens. A row is cut out of them, so a long document
    goes on in the next row, and only the last row is filled up."""

    def __init__(self, documents, context):
        self.documents, self.context = documents, context
        self.ends = torch.tensor([len(document) for document in documents]).cumsum(0)

    def __len__(self):
        return -(-int(self.ends[-1]) // self.context)

    def __getitem__(self, row):
        start, stop = row * self.context, min((row + 1) * self.context, int(self.ends[-1]))
        tokens = torch.zeros(self.context, dtype=torch.long)
        target = torch.full_like(tokens, -100)  # no loss there
        position, number = torch.zeros_like(tokens), torch.full_like(tokens, -1)
        place = start
        while place < stop:
            index = int(torch.searchsorted(self.ends, place, right=True))
            document, end = self.documents[index], int(self.ends[index])
            first = place - (end - len(document))  # within the document
            piece = document[first : first + min(end, stop) - place]
            here = slice(place - start, place - start + len(piece))
            tokens[here], number[here] = piece, index
            position[here] = torch.arange(first, first + len(piece))
            following = document[first + 1 : first + 1 + len(piece)]  # none after a document's last token
            target[place - start : place - start + len(following)] = following
            place += len(piece)
        return {"tokens": tokens, "position": position, "document": number, "target": target}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        y = self.attention_norm(x)
        query, key, value = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self, layers, width, heads, longest):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens, position, document):
        x = self.token(tokens) + self.place(position)
        mask = (document[:, :, None] == document[:, None, :]).tril()[:, None]  # causal, and within a document
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def model(layers=2, width=32, heads=2, longest=256):
    return Decoder(layers, width, heads, longest)


def train_data(count=2000, context=128, longest=200):
    """Made-up documents: each counts upwards by a step of its own."""
    random = torch.Generator().manual_seed(1)
    documents = []
    for _ in range(count):
        length, first, step = (int(torch.randint(1, n, (), generator=random)) for n in (longest, VOCABULARY, 6))
        documents.append((first + step * torch.arange(length)) % VOCABULARY)
    return Packed(documents, context)


def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)


def loss_weight(target):
    return (target != -100).sum()


def optimizer(model, lr=2e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)
