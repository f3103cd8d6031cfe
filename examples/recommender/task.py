"""A recommender: will a person who took these items take that one, too?

Items are embedded twice: in the bag of what a person took before, and as the one in question. The two tables are nearly
all of the model, which is what `ddp+ps` is for: they live on the servers, and only the rows that a batch needs travel.

    rung train examples/recommender/task.py --strategy ddp+ps --nproc 3
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

defaults = {"batch_size": 256, "epochs": 4}
remote = ["history", "items"]


class Recommender(nn.Module):
    def __init__(self, num_items, width, hidden):
        super().__init__()
        self.history = nn.EmbeddingBag(num_items, width, mode="mean")
        self.items = nn.Embedding(num_items, width)
        for table in (self.history, self.items):
            nn.init.normal_(table.weight, std=0.1)
        self.judge = nn.Sequential(nn.Linear(3 * width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, history, item):
        taste, thing = self.history(history), self.items(item)
        return self.judge(torch.cat([taste, thing, taste * thing], dim=1)).squeeze(1)


def model(num_items=1000, width=16, hidden=64):
    return Recommender(num_items, width, hidden)


def train_data(num_items=1000, people=24000):
    return choices(num_items, people, seed=1)


def eval_data(num_items=1000, people=4000):
    return choices(num_items, people, seed=2)


def collate(samples):
    history, item, took = (torch.stack(column) for column in zip(*samples))
    return {"history": history, "item": item, "target": took}


def loss(output, target):
    return F.binary_cross_entropy_with_logits(output, target)


def metrics(output, target):
    return {"accuracy": ((output > 0).to(target.dtype) == target).double()}


def optimizer(model, lr=1e-2):
    return torch.optim.Adam(model.parameters(), lr=lr)


def choices(num_items, people, seed, length=12, genres=10):
    """Made-up people. Each likes two of the genres; half of the items in question are of these, half of the others.

    Which genre an item has is nowhere in the data: it must be learned from what is taken together.
    """
    of_genre = torch.randperm(num_items, generator=torch.Generator().manual_seed(0))[: num_items // genres * genres]
    of_genre = of_genre.view(genres, -1)
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    def item_of(genre):
        return of_genre[genre, draw(of_genre.shape[1], len(genre))]

    first = draw(genres, people)
    likes = torch.stack([first, (first + 1 + draw(genres - 1, people)) % genres], dim=1)
    history = torch.stack([item_of(likes[torch.arange(people), draw(2, people)]) for _ in range(length)], dim=1)
    took = draw(2, people)
    liked = likes[torch.arange(people), draw(2, people)]
    other = draw(genres, people)
    for _ in range(2):  # past the two that are liked
        other = torch.where((other == likes[:, 0]) | (other == likes[:, 1]), (other + 1) % genres, other)
    item = item_of(torch.where(took > 0, liked, other))
    return TensorDataset(history, item, took.to(torch.get_default_dtype()))
