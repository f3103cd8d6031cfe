"""Files of tensors in the safetensors format, written as a stream and read one tensor at a time.

The safetensors library takes all tensors of a file at once and gives no digest; here one tensor is in memory at a time,
and bytes are hashed as they are written. Any safetensors reader opens the files.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rung.checkpoint.manifest import are_sizes
from rung.errors import CheckpointError
from rung.system.untrusted import open_regular, parse_json

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
# Types that the format lacks are written as bytes; the manifest has their type.
_OWN_NAMES = {torch.complex128: "C128"}
DTYPES = {name: dtype for dtype, name in {**_NAMES, **_OWN_NAMES}.items()}
_MAX_HEADER = 100 * 2**20  # bytes
_SYNC_BYTES = 2**30  # written between two syncs


def dtype_name(dtype: torch.dtype) -> str:
    name = _NAMES.get(dtype) or _OWN_NAMES.get(dtype)
    if name is None:
        raise CheckpointError(f"tensors of type {dtype} cannot be saved.")
    return name


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its key in the file, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def header(self, start: int) -> dict[str, Any]:
        raw = self.dtype not in _NAMES
        return {
            "dtype": "U8" if raw else _NAMES[self.dtype],
            "shape": [*self.shape, self.dtype.itemsize] if raw else list(self.shape),
            "data_offsets": [start, start + self.num_bytes],
        }


def write_tensors(
    path: Path,
    entries: Sequence[Entry],
    values: Iterable[Tensor],
    metadata: dict[str, str] | None = None,
    touch: Callable[[], None] = lambda: None,
) -> tuple[int, str]:
    """Write host tensors in the order of `entries`; `values` is consumed one at a time. Returns size and digest.

    `touch` is called after each block that was written.
    """
    text, num_bytes = header_of(entries, metadata)
    digest = hashlib.sha256()
    unsynced = 0  # bytes in the page cache, perhaps not on disk
    with path.open("wb", buffering=0) as file:

        def put(content: memoryview | bytes) -> None:
            nonlocal unsynced
            view = memoryview(content)
            while len(view):
                written = file.write(view[: 2**26]) or 0  # 64 MiB between two calls of `touch`
                digest.update(view[:written])
                view = view[written:]
                unsynced += written
                if unsynced >= _SYNC_BYTES:
                    # The page cache would take the whole file at once and leave all disk writes to the last sync, in
                    # which a slow disk looks like a hang.
                    os.fsync(file.fileno())
                    unsynced = 0
                touch()

        put(text)
        for entry, value in zip(entries, values, strict=True):
            assert value.numel() * value.element_size() == entry.num_bytes, entry.key
            if value.numel() > 0:
                put(bytes_of(value).numpy().data)
        os.fsync(file.fileno())
        return len(text) + num_bytes, digest.hexdigest()


def header_of(entries: Sequence[Entry], metadata: dict[str, str] | None = None) -> tuple[bytes, int]:
    """The header of a file, and the number of bytes of data after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for entry in entries:
        header[entry.key] = entry.header(start)
        start += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text, start


def wide_first(entries: Sequence[Entry]) -> list[Entry]:
    """Sort by item size, so that every tensor starts at a multiple of its own. Stable otherwise."""
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


@contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """A temporary name to write to. It is renamed to `path` at the end, or removed after an error."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)  # a leftover may be a link, which must not be followed
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a host tensor, flat."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class TensorFile:
    """A file of tensors, for reading. The header is untrusted: it is checked against the size of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_MAX_HEADER, size - 8):
                    raise CheckpointError(f"{path} is damaged: it has no header of a safetensors file.")
                header = parse_json(file.read(length))
            self.metadata: dict[str, str] = _metadata(header.pop("__metadata__", {}))
            self._places = _checked(header, size - 8 - length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path} is damaged: its header cannot be read.") from None
        self._data = 8 + length

    def keys(self) -> list[str]:
        return list(self._places)

    def dtype_and_shape(self, key: str) -> tuple[torch.dtype, tuple[int, ...]]:
        dtype, shape, _ = self._place(key)
        return dtype, shape

    @contextmanager
    def open(self, key: str, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Map a tensor into memory, so that only the pages that are read are loaded.

        `dtype` is the type of a tensor stored as raw bytes because the format lacks it.
        """
        stored, shape, start = self._place(key)
        num_bytes = math.prod(shape) * stored.itemsize
        wanted = dtype or stored
        if stored != wanted and not (stored == torch.uint8 and shape and shape[-1] == wanted.itemsize):
            raise CheckpointError(f"{self.path} is damaged: {key} is not of type {wanted}.")
        if stored != wanted:
            shape = shape[:-1]
        if num_bytes == 0:
            yield torch.empty(shape, dtype=wanted)
            return
        begin = self._data + start
        page = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            with open_regular(self.path) as file:
                # Copy-on-write, because torch needs a writable buffer; nothing is written.
                memory = mmap.mmap(file.fileno(), begin - page + num_bytes, access=mmap.ACCESS_COPY, offset=page)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from None
        except ValueError:  # it is shorter than when its header was read
            raise CheckpointError(f"{self.path} is damaged: it was cut short.") from None
        # The mapping lives as long as a tensor uses it.
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=begin - page)
        if flat.data_ptr() % wanted.itemsize:
            flat = flat.clone()  # other writers need not align tensors
        yield flat.view(wanted).view(shape)

    def _place(self, key: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        try:
            return self._places[key]
        except KeyError:
            raise CheckpointError(f"{self.path} is damaged: it has no tensor {key!r}.") from None


def _metadata(found: Any) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError
    return found


def _checked(header: dict[str, Any], num_bytes: int) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
    """The dtype, shape and start of each tensor. They must fill the data exactly, without gaps or overlaps."""
    places: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}
    reached = 0
    for key, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not are_sizes(shape) or not are_sizes([start, stop]) or start != reached:
            raise ValueError
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError
        places[key] = dtype, tuple(shape), start
        reached = stop
    if reached != num_bytes:
        raise ValueError
    return places
