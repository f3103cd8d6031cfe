"""BabyCNN as a pipeline over RPC: rank 0 calls four stages, which call each other, with distributed autograd.

On four processes of one machine:

    ./run_rpc.sh --epochs 12
"""

import argparse
import logging
import os
from threading import Condition
from typing import Any

import torch
from babycnn import CLIP, BabyCNN, batches, digits, evaluate_and_save, flags, make_optimizer, pick_device
from torch import Tensor, nn
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

MICRO_BATCH = 16


class Stage:
    """A part of the model in one process. The others hold a remote reference to it and call its methods."""

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        whole = BabyCNN()
        parts = [("stem", whole.stem), ("middle", whole.middle), ("top", whole.top), ("head", whole.head)]
        self.name, module = parts[number]
        self.device = pick_device()
        self.module = module.to(self.device, dtype)
        self.turn, self.done = Condition(), 0

    def forward(self, number: int, given: Any) -> Tensor:
        """Micro-batch `number` of the run, fetched from the stage before: results go from stage to stage directly."""
        x = given.to_here().to(self.device)
        if self.name == "top":
            x = F.max_pool2d(x, 2)
        if self.name == "head":
            x = x.mean(dim=(2, 3))
        with self.turn:  # calls are answered by many threads, and batch norm's running means depend on the order
            self.turn.wait_for(lambda: self.done == number)
            x = self.module(x)
            self.done += 1
            self.turn.notify_all()
        return x.cpu()  # RPC sends host memory, unless it is given a map of devices

    def parameters(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]

    def square_of_norm(self, context: int) -> float:
        return sum(float(gradient.square().sum()) for gradient in autograd.get_gradients(context).values())

    def scale_gradients(self, context: int, factor: float) -> None:
        for gradient in autograd.get_gradients(context).values():
            gradient.mul_(factor)

    def state(self) -> dict[str, Tensor]:
        return {f"{self.name}.{key}": tensor.cpu() for key, tensor in self.module.state_dict().items()}


def scheduled_adamw(parameters: list[nn.Parameter], steps: int) -> torch.optim.Optimizer:
    """What DistributedOptimizer makes in each process. It knows no schedules, so the optimizer brings its own."""
    optimizer, schedule = make_optimizer(parameters, steps)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def drive(options: argparse.Namespace, world: int) -> None:
    """Rank 0: the only one with a loop. The other processes answer calls."""
    stages = [rpc.remote(f"stage{number}", Stage, args=(number, options.dtype)) for number in range(world)]
    images, labels = digits(train=True, device=torch.device("cpu"), dtype=options.dtype)
    steps = options.epochs * len(batches(len(images)))
    references = [reference for stage in stages for reference in stage.rpc_sync().parameters()]
    logging.getLogger("torch.distributed.optim").setLevel(logging.ERROR)  # it would rather have one in TorchScript
    optimizer = DistributedOptimizer(scheduled_adamw, references, steps)
    started = 0  # micro-batches
    for epoch in range(options.epochs):
        total = 0.0
        for batch in batches(len(images), epoch, options.shuffle):
            with autograd.context() as context:
                outputs = []
                for micro in batch.split(MICRO_BATCH):  # all are started at once, so that the stages overlap
                    given = rpc.RRef(images[micro])
                    for stage in stages[:-1]:
                        given = stage.remote().forward(started, given)
                    outputs.append(stages[-1].rpc_async().forward(started, given))
                    started += 1
                output = torch.cat([future.wait() for future in outputs])
                loss = F.cross_entropy(output, labels[batch])
                # Gradients are put into the context, not into p.grad: an optimizer that looks there changes nothing.
                autograd.backward(context, [loss])
                norm = sum(stage.rpc_sync().square_of_norm(context) for stage in stages) ** 0.5
                for stage in stages:
                    stage.rpc_sync().scale_gradients(context, min(1.0, CLIP / (norm + 1e-6)))
                optimizer.step(context)
            total += loss.item() * len(batch) / len(images)
        print(f"epoch {epoch + 1}: loss {total:.4f}", flush=True)

    whole = BabyCNN().to(options.dtype)
    whole.load_state_dict({name: tensor for stage in stages for name, tensor in stage.rpc_sync().state().items()})
    evaluate_and_save(whole, options)


def main() -> None:
    options, rank, world = flags(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != 4:
        raise SystemExit(f"The model is cut into 4 stages: start as many processes, not {world}.")
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # calls are pickled code: listen on this machine only
    rpc.init_rpc(f"stage{rank}", rank=rank, world_size=world)
    if rank == 0:
        drive(options, world)
    rpc.shutdown()  # waits until all are done, and answers calls meanwhile


if __name__ == "__main__":
    main()
