"""zero1: the optimizer state cut among the ranks, parameters and gradients whole.

Each rank updates its own slice of every parameter, in place, and then gives it to the others. To the optimizer the
slices are DTensors cut along dimension 0, just as FSDP2 cuts them: it sees the global shapes (a norm over a parameter
is the true norm), and its state has the same form as under zero2 and zero3, so it can be resharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rung.world import gather_flat

_BUCKET_BYTES = 32 * 2**20  # of one rank's slices: what is sent at a time


class ShardedUpdate:
    """The slices of a model's trainable parameters that belong to this rank."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._slices: dict[int, nn.Parameter] = {}
        self._whole: list[nn.Parameter] = []
        rank = mesh.get_local_rank()
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad:
                    continue
                self._owners.append((module, key, parameter))
                if id(parameter) not in self._slices:
                    self._whole.append(parameter)
                    self._slices[id(parameter)] = nn.Parameter(_slice_of(parameter.detach(), rank, mesh))
        self._rank, self._mesh = rank, mesh
        self._buckets = self._make_buckets()

    @contextlib.contextmanager
    def as_parameters(self) -> Iterator[None]:
        """While the task builds its optimizer: the model's parameters are the slices."""
        for module, key, parameter in self._owners:
            module._parameters[key] = self._slices[id(parameter)]
        try:
            yield
        finally:
            for module, key, parameter in self._owners:
                module._parameters[key] = parameter

    def slices(self) -> list[nn.Parameter]:
        return list(self._slices.values())

    def by_parameter(self) -> dict[int, nn.Parameter]:
        """The slices by the identity of the parameters that they are part of."""
        return self._slices

    def take_gradients(self) -> None:
        for parameter in self._whole:
            own = self._slices[id(parameter)]
            own.grad = None if parameter.grad is None else _slice_of(parameter.grad, self._rank, self._mesh)

    def drop_gradients(self) -> None:
        for own in self._slices.values():
            own.grad = None

    def share_parameters(self) -> None:
        """After the update: every rank's slices to all ranks."""
        for bucket in self._buckets:
            rows = [-(-parameter.shape[0] // self._size) for parameter in bucket]
            pieces = []
            for parameter, count in zip(bucket, rows, strict=True):
                own = parameter.detach().narrow(0, *_range(parameter.shape[0], count, self._rank)).flatten()
                wanted = count * (parameter.numel() // parameter.shape[0])
                pieces.append(nn.functional.pad(own, (0, wanted - own.numel())) if own.numel() < wanted else own)
            flat = torch.cat(pieces)
            everyone = gather_flat(flat, self._group)
            offset = 0
            for parameter, piece in zip(bucket, pieces, strict=True):
                columns = everyone[:, offset : offset + piece.numel()].reshape(-1)
                parameter.detach().copy_(columns[: parameter.numel()].view(parameter.shape))
                offset += piece.numel()

    def _make_buckets(self) -> list[list[nn.Parameter]]:
        """Parameters that are sent together: one type, up to a size."""
        buckets: list[list[nn.Parameter]] = []
        filled: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
        for parameter in self._whole:
            if parameter.dim() == 0 or parameter.numel() == 0:
                continue  # every rank updates it alike
            num_bytes = parameter.numel() * parameter.element_size() // self._size
            bucket, used = filled.get(parameter.dtype, ([], _BUCKET_BYTES))
            if used + num_bytes > _BUCKET_BYTES:
                bucket, used = [], 0
                buckets.append(bucket)
            bucket.append(parameter)
            filled[parameter.dtype] = (bucket, used + num_bytes)
        return buckets


def _range(length: int, count: int, rank: int) -> tuple[int, int]:
    start = min(rank * count, length)
    return start, min(count, length - start)


def _slice_of(tensor: Tensor, rank: int, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor, as a view of it that knows the whole shape."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    rows = tensor.narrow(0, *_range(tensor.shape[0], -(-tensor.shape[0] // mesh.size()), rank))
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
