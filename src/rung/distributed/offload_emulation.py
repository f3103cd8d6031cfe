"""Let FSDP offload fake tensors as it offloads tensors of a GPU: in a dry run host and device are both the CPU."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState

from rung.distributed.fake_world import patched


@contextlib.contextmanager
def offloading(copy: Callable[[Tensor, str], Tensor], move_to_host: Callable[[Tensor], None]) -> Iterator[None]:
    """While inside, FSDP's copies between host and device call `copy`, where torch would return the same tensor.

    The second argument of `copy` is "host" or "device". `move_to_host` is called with the shards when they are made.
    """
    kind: Any = FSDPParam
    initialize, inputs, as_dtensor = kind._init_sharded_param, kind.all_gather_inputs.fget, kind.to_sharded_dtensor
    is_initializing = False

    @torch.no_grad()
    def initialized(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal is_initializing
        is_initializing = True
        try:
            initialize(self, *args, **kwargs)
        finally:
            is_initializing = False
        move_to_host(self._sharded_param_data)

    def gathered(self: Any) -> list[Tensor]:
        if self.sharded_state != ShardedState.SHARDED:
            return inputs(self)  # type: ignore[no-any-return]
        kept = self._sharded_param_data
        self._sharded_param_data = copy(kept, "device")
        try:
            return inputs(self)  # type: ignore[no-any-return]
        finally:
            self._sharded_param_data = kept

    def gradient(self: Any, tensor: Tensor) -> Any:
        return as_dtensor(self, tensor if is_initializing else copy(tensor, "host"))

    with (
        patched(
            kind, _init_sharded_param=initialized, all_gather_inputs=property(gathered), to_sharded_dtensor=gradient
        ),
        _one_tensor_at_a_time(),
    ):
        yield


@contextlib.contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Optimizers take many tensors at once on a GPU, and do not for tensors on the host."""
    with contextlib.ExitStack() as changes:
        for name in ("utils._foreach_utils", "optim.optimizer"):
            module = importlib.import_module(f"torch.{name}")
            changes.enter_context(patched(module, _get_foreach_kernels_supported_devices=lambda: ["cuda"]))
        yield
