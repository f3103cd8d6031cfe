"""BabyCNN with nn.DataParallel: one process, in which each GPU has a replica of the model for one step.

On one machine:

    python train_dp.py --epochs 12
"""

import torch
from babycnn import CLIP, BabyCNN, batches, digits, evaluate_and_save, flags, make_optimizer, pick_device
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_


def main() -> None:
    options, device = flags(), pick_device()
    torch.manual_seed(0)
    # On all GPUs, of which cuda:0 has to hold the model. In every forward, it sends the parameters to the others and a
    # part of the batch to each, and gathers their outputs; backward goes the same way back.
    whole = BabyCNN().to(device, options.dtype)
    model = nn.DataParallel(whole)
    if len(model.device_ids) < 2:
        print(f"nn.DataParallel found {torch.cuda.device_count()} GPUs and just calls the model: nothing is parallel.")
    images, labels = digits(train=True, device=device, dtype=options.dtype)
    optimizer, schedule = make_optimizer(model.parameters(), steps=options.epochs * len(batches(len(images))))
    for epoch in range(options.epochs):
        total = torch.zeros((), device=device, dtype=options.dtype)
        for batch in batches(len(images), epoch, options.shuffle):
            # The outputs come back whole, so the loss is that of the batch, whatever part each GPU had. Batch norm is
            # not: each replica normalises by its own part, and only the running means of the first one are kept.
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            total += loss.detach() * len(batch) / len(images)
        print(f"epoch {epoch + 1}: loss {total.item():.4f}", flush=True)

    evaluate_and_save(whole, options)


if __name__ == "__main__":
    main()
