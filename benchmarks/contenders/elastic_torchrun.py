"""A loop by hand for torchrun that saves and resumes, as its documentation tells: what recovery is measured against."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path, every: int, pause: float) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, snapshot = 0, folder / "snapshot.pt"
    if snapshot.exists():
        state = torch.load(snapshot)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    while step < 100_000:
        time.sleep(pause)
        x = torch.randn(8, 64)
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{step}\n")
            if step % every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, folder / "partial.pt")
                (folder / "partial.pt").rename(snapshot)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
