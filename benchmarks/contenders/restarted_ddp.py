"""A DDP loop by hand for torchrun that survives the loss of ranks: what a competent user would write.

Checkpoints are written beside the old one and put in its place in one go. A restart resumes in the middle of the epoch:
the order of an epoch follows from its number, and the step says how much of it was seen.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from benchmarks.tasks.faults import BATCH_SIZE, make_data, make_model


class Rest:
    """The samples of this rank from a step on, over as many epochs as there are; a batch sampler."""

    def __init__(self, count: int, step: int, total: int) -> None:
        self._count, self._step, self._total = count, step, total
        self._rank, self._size = dist.get_rank(), dist.get_world_size()

    def __iter__(self):  # type: ignore[no-untyped-def]
        per_epoch = self._count // BATCH_SIZE
        epoch, order = -1, []
        for step in range(self._step, self._total):
            if step // per_epoch != epoch:
                epoch = step // per_epoch
                order = torch.randperm(self._count, generator=torch.Generator().manual_seed(epoch)).tolist()
            first = step % per_epoch * BATCH_SIZE
            yield order[first : first + BATCH_SIZE][self._rank :: self._size]


def save(path: Path, state: dict[str, object]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def main(folder: Path, total: int, every: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, path = 0, folder / "checkpoint.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    data: Dataset[tuple[torch.Tensor, torch.Tensor]] = make_data()
    loader = DataLoader(data, batch_sampler=Rest(len(data), step, total))  # type: ignore[arg-type]
    with (folder / "steps").open("ab", buffering=0) as done:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if rank == 0:
                done.write(b"%d\n" % step)
                if step % every == 0 or step == total:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    save(path, state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
