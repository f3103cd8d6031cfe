"""ZeRO-1: sharded optimizer state, whole parameters and gradients.

Each rank updates its own slice of every parameter in place and all-gathers the slices. The optimizer gets the slices as
DTensors sharded along dimension 0, as FSDP2 shards them: it sees global shapes (a norm over a parameter is the true
norm), and its state can be resharded to and from zero2 and zero3.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from rung.distributed.collectives import gather_flat

_BUCKET_BYTES = 32 * 2**20  # of one rank's slices in one all-gather


class ShardedUpdate:
    """This rank's slices of a model's trainable parameters."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._group = mesh.get_group()
        self._size = mesh.size()
        self._owners: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._slices: dict[int, nn.Parameter] = {}
        self._whole: list[nn.Parameter] = []
        rank = mesh.get_local_rank()
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if not parameter.requires_grad:
                    continue
                self._owners.append((module, key, parameter))
                if id(parameter) not in self._slices:
                    self._whole.append(parameter)
                    self._slices[id(parameter)] = nn.Parameter(_slice_of(parameter.detach(), rank, mesh))
        self._rank, self._mesh = rank, mesh
        self._buckets = self._make_buckets()

    @contextlib.contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Put the slices in the place of the model's parameters, while the task builds its optimizer."""
        for module, key, parameter in self._owners:
            setattr(module, key, self._slices[id(parameter)])
        try:
            yield
        finally:
            for module, key, parameter in self._owners:
                setattr(module, key, parameter)

    def slices(self) -> list[nn.Parameter]:
        return list(self._slices.values())

    def by_parameter(self) -> dict[int, nn.Parameter]:
        """The slices, by the id of their parameter."""
        return self._slices

    def take_gradients(self) -> None:
        for parameter in self._whole:
            own = self._slices[id(parameter)]
            own.grad = None if parameter.grad is None else _slice_of(parameter.grad, self._rank, self._mesh)

    def drop_gradients(self) -> None:
        for own in self._slices.values():
            own.grad = None

    def share_parameters(self) -> None:
        """All-gather the updated slices into the whole parameters."""
        for bucket in self._buckets:
            rows = [-(-parameter.shape[0] // self._size) for parameter in bucket]
            pieces = []
            for parameter, count in zip(bucket, rows, strict=True):
                own = parameter.detach().narrow(0, *_range(parameter.shape[0], count, self._rank)).flatten()
                # The last ranks may have fewer rows or none; an all-gather needs equal sizes.
                wanted = count * (parameter.numel() // parameter.shape[0])
                pieces.append(nn.functional.pad(own, (0, wanted - own.numel())) if own.numel() < wanted else own)
            flat = torch.cat(pieces)
            gathered = gather_flat(flat, self._group)
            offset = 0
            for parameter, piece in zip(bucket, pieces, strict=True):
                columns = gathered[:, offset : offset + piece.numel()].reshape(-1)
                parameter.detach().copy_(columns[: parameter.numel()].view(parameter.shape))
                offset += piece.numel()

    def _make_buckets(self) -> list[list[nn.Parameter]]:
        """Group parameters of one dtype into buckets of at most `_BUCKET_BYTES`, each sent at once."""
        buckets: list[list[nn.Parameter]] = []
        filled: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
        for parameter in self._whole:
            if parameter.dim() == 0 or parameter.numel() == 0:
                continue  # replicated: every rank makes the same update
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
    """This rank's rows of a tensor as a DTensor of the whole, which shares its storage."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    rows = tensor.narrow(0, *_range(tensor.shape[0], -(-tensor.shape[0] // mesh.size()), rank))
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride())
