"""BabyCNN with DistributedDataParallel: each process has the whole model and takes its part of every batch.

On four processes of one machine:

    ./run_ddp.sh --epochs 12
"""

import torch
import torch.distributed as dist
from babycnn import CLIP, BabyCNN, batches, digits, flags, leave_group, make_optimizer, pick_device, piece
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    options, device = flags(), pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # so that runs repeat; the processes agree in any case, because DDP sends rank 0's weights
    # Batch norm is left as DDP leaves it: each process normalises by its own samples. On GPUs
    # nn.SyncBatchNorm.convert_sync_batchnorm(model), before this line, makes it one over all processes.
    model = DistributedDataParallel(BabyCNN().to(device, options.dtype))
    images, labels = digits(train=True, device=device, dtype=options.dtype)
    optimizer, schedule = make_optimizer(model.parameters(), steps=options.epochs * len(batches(len(images))))
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device, dtype=options.dtype)
        for batch in batches(len(images), epoch, options.shuffle):
            mine = piece(batch, rank, world)
            # DDP averages gradients over processes, and these may have unequal numbers of samples. A mean over the
            # batch is the sum of all losses over its size; "* world" undoes the average.
            loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum") * world / len(batch)
            optimizer.zero_grad()
            loss.backward()  # the gradients are all-reduced while it runs
            clip_grad_norm_(model.parameters(), CLIP)  # they are whole and equal now, and so is their norm
            optimizer.step()
            schedule.step()
            total += loss.detach() / world * len(batch) / len(images)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    model.eval()
    images, labels = digits(train=False, device=device, dtype=options.dtype)
    mine = piece(torch.arange(len(images)), rank, world)
    with torch.no_grad():
        # All processes call the model: DDP first gives rank 0's running means to all, and would wait for the others.
        correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"accuracy {correct.item() / len(images):.3f} on {len(images)} held-out digits")
        if options.out:
            torch.save(model.module.state_dict(), options.out)  # without ".module", every name would begin with it
    leave_group()


if __name__ == "__main__":
    main()
