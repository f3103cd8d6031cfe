"""What the scripts of this folder share: BabyCNN, its data, its optimizer and the flags. None of it is distributed."""

import argparse
import os
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

BATCH_SIZE = 64  # of all processes together
CLIP = 1.0  # the largest norm that the gradient of the whole model may have


class BabyCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(1, 24)
        self.middle = convolution(24, 48)
        self.top = convolution(48, 48)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.middle(self.stem(images)), 2)
        output: Tensor = self.head(self.top(x).mean(dim=(2, 3)))
        return output


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def digits(train: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The 8x8 digits that come with scikit-learn, all at once: they are small. Every fifth is held out."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(found.target)
    chosen = (torch.arange(len(labels)) % 5 != 0) == train
    return images[chosen].to(device, dtype), labels[chosen].to(device)


def batches(count: int, epoch: int = 0, shuffle: bool = False) -> tuple[Tensor, ...]:
    """The samples of each step of an epoch, by number. Every process draws the same order; the last batch is short."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch)) if shuffle else torch.arange(count)
    return order.split(BATCH_SIZE)


def piece(batch: Tensor, rank: int, world: int) -> Tensor:
    """One process's part of a batch: each sample goes to one of them, and parts differ by one sample at most."""
    return batch[len(batch) * rank // world : len(batch) * (rank + 1) // world]


def make_optimizer(parameters: Iterable[nn.Parameter], steps: int) -> tuple[AdamW, CosineAnnealingLR]:
    optimizer = AdamW(parameters, lr=2e-3, weight_decay=0.01)
    return optimizer, CosineAnnealingLR(optimizer, steps)


def evaluate_and_save(model: BabyCNN, options: argparse.Namespace) -> None:
    """For a process that has the whole model."""
    images, labels = digits(train=False, device=model.head.weight.device, dtype=options.dtype)
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(dim=1) == labels).sum().item()
    print(f"accuracy {correct / len(images):.3f} on {len(images)} held-out digits")
    if options.out:
        torch.save(model.state_dict(), options.out)


def pick_device() -> torch.device:
    """A GPU for each process of this machine, or the CPU for all of them."""
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def leave_group() -> None:
    # Gloo's threads let go of a collective's tensors a moment after the call has returned. One that still holds some
    # when Python ends aborts the process.
    time.sleep(0.1)
    dist.destroy_process_group()


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--no-shuffle", dest="shuffle", action="store_false", help="the data set's own order")
    parser.add_argument("--float64", dest="dtype", action="store_const", const=torch.float64, default=torch.float32)
    parser.add_argument("--out", help="where to save the weights")
    return parser.parse_args()
