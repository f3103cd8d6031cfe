"""Python's, numpy's and torch's global random generators: seed, save, restore, and detect draws."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def save_generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore_generators(state: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


@contextlib.contextmanager
def keeping_generators() -> Iterator[None]:
    """Restore the generators afterwards."""
    saved = save_generators()
    try:
        yield
    finally:
        restore_generators(saved)


class DeviceGenerators:
    """The saved states of all generators, including that of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, save_generators()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        restore_generators(self._host)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


class GeneratorMarks:
    """Saved states of the generators, faster than `save_generators`: a few microseconds, paid for each batch read."""

    _NUMPY_BYTES = 624 * 4 + 4  # the Mersenne twister's words and its position

    def __init__(self) -> None:
        self._python = _python_mark()
        self._torch = torch.get_rng_state().numpy().tobytes()
        self._address: int = np.random.mtrand._rand._bit_generator.ctypes.state_address
        self._numpy = ctypes.string_at(self._address, self._NUMPY_BYTES)

    def hold(self) -> bool:
        """Whether no random number was drawn since."""
        return (
            ctypes.string_at(self._address, self._NUMPY_BYTES) == self._numpy
            and torch.get_rng_state().numpy().tobytes() == self._torch
            and _python_mark() == self._python
        )

    def restore(self) -> None:
        if isinstance(self._python, bytes):
            index, *words = struct.unpack("<i624I", self._python)
            random.setstate((3, (*words, index), None))
        else:
            random.setstate(self._python)
        torch.set_rng_state(torch.frombuffer(bytearray(self._torch), dtype=torch.uint8))
        ctypes.memmove(self._address, self._numpy, self._NUMPY_BYTES)


def _python_mark() -> Any:
    """The state of Python's generator: its raw bytes on CPython, else the tuple of `getstate`."""
    return ctypes.string_at(_PYTHON_STATE, 4 + 624 * 4) if _PYTHON_STATE else random.getstate()


def _find_python_state() -> int | None:
    # `getstate` builds a tuple of 625 integers (15 us). CPython stores them right behind the object's header, which is
    # checked here rather than assumed.
    if platform.python_implementation() != "CPython" or sys.byteorder != "little":
        return None
    shared = random.random.__self__  # type: ignore[attr-defined]
    address = id(shared) + object.__basicsize__
    _, (*words, index), _ = random.getstate()
    matches = ctypes.string_at(address, 4 + 624 * 4) == struct.pack("<i624I", index, *words)
    return address if matches else None


_PYTHON_STATE = _find_python_state()
