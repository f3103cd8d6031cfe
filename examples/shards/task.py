"""Train on tar files, of which each rank reads only its own: images and labels of 32 shards in a folder.

    python examples/shards/task.py shards        # writes the folder
    rung train examples/shards/task.py --strategy ddp --nproc 2
    rung train examples/shards/task.py --set train_data.folder=/data/shards

A shard has pairs of files, NAME.pt and NAME.txt, one after the other, as WebDataset's have.
"""

import io
import sys
import tarfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

defaults = {"batch_size": 32, "epochs": 2, "eval_every": "never"}


class Tars(IterableDataset):
    """Rung asks for `num_shards` and `shard`. `__iter__` gives all samples of its own files, in their order."""

    def __init__(self, files):
        self.files = files
        self.num_shards = len(files)

    def shard(self, num_shards, index):
        return Tars(self.files[index::num_shards])

    def __iter__(self):
        for file in self.files:
            with tarfile.open(file, "r|") as tar:  # a stream: nothing is read twice
                for member in tar:
                    content = tar.extractfile(member).read()
                    if member.name.endswith(".pt"):
                        image = torch.load(io.BytesIO(content), weights_only=True)
                    else:
                        yield image, int(content)


def model(width=64):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4))


def train_data(folder="shards"):
    files = sorted(Path(folder).glob("*.tar"))
    if not files:
        raise FileNotFoundError(f"{folder} has no tar files; python examples/shards/task.py {folder} writes some")
    return Tars(files)


def loss(output, target):
    return F.cross_entropy(output, target)


def optimizer(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def write_shards(folder, count=32, seed=0):
    """Made-up images with a bright quarter, whose number is the label; the shards differ in length."""
    random = torch.Generator().manual_seed(seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for shard in range(count):
        with tarfile.open(Path(folder) / f"{shard:05d}.tar", "w") as tar:
            for number in range(40 + int(torch.randint(20, (), generator=random))):
                label = int(torch.randint(4, (), generator=random))
                image = torch.randn(8, 8, generator=random)
                image[4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 1
                buffer = io.BytesIO()
                torch.save(image, buffer)
                for suffix, content in (("pt", buffer.getvalue()), ("txt", str(label).encode())):
                    entry = tarfile.TarInfo(f"{number:06d}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    write_shards(*sys.argv[1:2])
