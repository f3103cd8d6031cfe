"""A GAN in the plane: real points lie on eight spots of a circle, and a generator learns to make such points of noise.

    rung train examples/gan/task.py
    rung train examples/gan/task.py --strategy zero3 --nproc 2

Two losses take turns in each step, each with the optimizer of its name. While the critic has its turn the generator is
frozen, and the other way round, so that one forward serves both.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

SPOTS = 8
SPREAD = 0.05

defaults = {"batch_size": 256, "steps": 1000, "eval_every": 200, "log_every": 50, "ema": 0.99}


def spots(count, noise, seed):
    """Points of the spots, each with the noise for one generated point.

    The noise belongs to the sample: drawn in the model, it would depend on which rank computes the sample."""
    generator = torch.Generator().manual_seed(seed)
    angles = 2 * math.pi * (torch.arange(count) % SPOTS) / SPOTS
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    points = points + SPREAD * torch.randn(count, 2, generator=generator)
    return TensorDataset(points, torch.randn(count, noise, generator=generator))


class GAN(nn.Module):
    def __init__(self, noise, width):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(noise, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )

    def forward(self, real, noise, judges_real=True):
        made = self.generator(noise)
        return made, self.critic(made), self.critic(real) if judges_real else None


def model(noise=8, width=128):
    return GAN(noise, width)


def train_data(count=16_384, noise=8):
    return spots(count, noise, seed=1)


def eval_data(count=2_000, noise=8):
    return spots(count, noise, seed=2)


def forward(model, batch, turn):
    return model(*batch, judges_real=turn == "critic")


def critic_loss(output, batch):
    _, of_made, of_real = output
    return F.softplus(-of_real).mean() + F.softplus(of_made).mean()


def generator_loss(output, batch):
    return F.softplus(-output[1]).mean()


loss = {"critic": critic_loss, "generator": generator_loss}


def metrics(output, batch):
    made = output[0]
    angles = 2 * math.pi * torch.arange(SPOTS, device=made.device, dtype=made.dtype) / SPOTS
    spots = torch.stack([angles.cos(), angles.sin()], dim=1)
    distance = (made[:, None] - spots).square().sum(dim=2).sqrt().min(dim=1).values
    return {"on a spot": (distance < 4 * SPREAD).float()}


def optimizer(model, lr=2e-3):
    return {
        "critic": torch.optim.Adam(model.critic.parameters(), lr, betas=(0.5, 0.99)),
        "generator": torch.optim.Adam(model.generator.parameters(), lr, betas=(0.5, 0.99)),
    }
