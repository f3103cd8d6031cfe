"""BabyCNN as a pipeline: each process has one of four stages, and micro-batches pass through them.

PiPPy is torch.distributed.pipelining today; this is its front end that cuts a model by itself.

    ./run_pippy.sh --epochs 12
"""

import torch
import torch.distributed as dist
from babycnn import (
    BATCH_SIZE,
    CLIP,
    BabyCNN,
    batches,
    digits,
    evaluate_and_save,
    flags,
    leave_group,
    make_optimizer,
    pick_device,
)
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_

MICRO_BATCHES = 4
CUTS = dict.fromkeys(("middle", "top", "head"), SplitPoint.BEGINNING)  # three cuts make four stages


def main() -> None:
    options, device = flags(), pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != len(CUTS) + 1:
        raise SystemExit(f"The model is cut into {len(CUTS) + 1} stages: start as many processes, not {world}.")

    torch.manual_seed(0)  # every process traces the whole model, and keeps the weights of its own stage
    whole = BabyCNN().to(options.dtype)
    images, labels = digits(train=True, device=device, dtype=options.dtype)
    example = images[: BATCH_SIZE // MICRO_BATCHES].cpu()
    stage = pipeline(whole, mb_args=(example,), split_spec=CUTS).build_stage(rank, device)
    # The mean over micro-batches of equal size is that over the batch; the schedule scales gradients accordingly.
    # Batch norm sees a micro-batch at a time: this is another computation than one process with the whole batch.
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.cross_entropy)
    parameters = list(stage.submod.parameters())
    # Shapes are fixed by the trace, so the short batch at the end of an epoch (29 of 1437 samples) is left out.
    steps = len(images) // BATCH_SIZE
    optimizer, rates = make_optimizer(parameters, steps=options.epochs * steps)
    for epoch in range(options.epochs):
        losses: list[torch.Tensor] = []  # of the micro-batches of a step, on the last stage
        total = torch.zeros((), device=device, dtype=options.dtype)
        for batch in batches(len(images), epoch, options.shuffle)[:steps]:
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(images[batch])  # only the first stage reads images
            elif rank == world - 1:
                schedule.step(target=labels[batch], losses=losses)  # only the last one reads labels
                total += torch.stack(losses).mean().detach() / steps
            else:
                schedule.step()
            clip(parameters)
            optimizer.step()
            rates.step()
        if rank == world - 1:
            print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(world)]
    dist.gather_object({name: t.cpu() for name, t in stage.submod.state_dict().items()}, parts if rank == 0 else None)
    if rank == 0:
        # The stages kept the names of the model. A traced stage stays in training mode, so the model itself evaluates.
        whole.load_state_dict({name: tensor for part in parts for name, tensor in part.items()})
        evaluate_and_save(whole, options)
    leave_group()


def clip(parameters: list[torch.nn.Parameter]) -> None:
    """Clips by the norm of the whole model. clip_grad_norm_ would take that of the stage, a different one on each."""
    squares = torch.stack([p.grad.square().sum() for p in parameters if p.grad is not None]).sum()
    dist.all_reduce(squares)
    clip_grads_with_norm_(parameters, CLIP, squares.sqrt())


if __name__ == "__main__":
    main()
