"""BabyCNN with FSDP2: each process keeps a part of every parameter, gradient and optimizer state.

On four processes of one machine:

    ./run_fsdp.sh --epochs 12
"""

import torch
import torch.distributed as dist
from babycnn import CLIP, BabyCNN, batches, digits, flags, leave_group, make_optimizer, pick_device, piece
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    options, device = flags(), pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # not only for repeating: each process keeps a part of its own weights, and nobody compares
    model = BabyCNN().to(device, options.dtype)
    mesh = init_device_mesh(device.type, (world,))
    for unit in (model.stem, model.middle, model.top, model):  # what is gathered at a time; the last takes the rest
        fully_shard(unit, mesh=mesh)
    images, labels = digits(train=True, device=device, dtype=options.dtype)
    # After fully_shard: it puts new parameters, the shards, in the place of the old ones.
    optimizer, schedule = make_optimizer(model.parameters(), steps=options.epochs * len(batches(len(images))))
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device, dtype=options.dtype)
        for batch in batches(len(images), epoch, options.shuffle):
            mine = piece(batch, rank, world)
            # As under DDP: gradients are averaged over processes, which may have unequal numbers of samples.
            loss = F.cross_entropy(model(images[mine]), labels[mine], reduction="sum") * world / len(batch)
            optimizer.zero_grad()
            loss.backward()  # each unit is gathered again, and its gradients are reduce-scattered
            clip_grad_norm_(model.parameters(), CLIP)  # knows shards, and takes the norm over all processes
            optimizer.step()  # on shards alone: nothing is sent
            schedule.step()
            total += loss.detach() / world * len(batch) / len(images)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    # Buffers are not sharded, and FSDP leaves them alone: each process has the running means of its own samples.
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    images, labels = digits(train=False, device=device, dtype=options.dtype)
    mine = piece(torch.arange(len(images)), rank, world)
    with torch.no_grad():
        correct = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()  # by all: forward gathers parameters
    dist.all_reduce(correct)
    # By all, too. Rank 0 gets the whole tensors under the names of the bare model, the others nothing.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"accuracy {correct.item() / len(images):.3f} on {len(images)} held-out digits")
        if options.out:
            torch.save(state, options.out)
    leave_group()


if __name__ == "__main__":
    main()
