"""Private names of torch that Rung uses, each with the reason why no public name does the job.

All of them are here, except in modules that build on a private interface of torch as a whole: the fake world
(`fake_world`, `cuda_emulation`, `known_indices`), the pickler of RPC (`rpc`), the elastic rendezvous
(`launch.rendezvous.state`), the stages of a pipeline (`parallel.pipeline.schedule`), styles of tensor parallelism
(`parallel.tensor.apply`) and the scaler of fp16 (`runtime.optimizer`). `tests/distributed/test_torch_private.py` lists
them all. torch 2.11 to 2.13 have every name here.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

# Intercepts every operation below autograd. torch documents it under this name.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

# The pytrees that torch itself flattens, with user classes that were registered there. torch up to 2.13 has no public
# module for them.
from torch.utils._pytree import TreeSpec, tree_any, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "BatchNorm",
    "Dropout",
    "TorchDispatchMode",
    "TreeSpec",
    "assert_async",
    "current_dispatch_mode",
    "foreach_add_",
    "foreach_copy_",
    "foreach_div_",
    "foreach_mul_",
    "foreach_norm",
    "functional_collectives",
    "tree_any",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# The base classes of all batch norms and dropouts, including those that users derive themselves.
BatchNorm = nn.modules.batchnorm._BatchNorm
Dropout = nn.modules.dropout._DropoutNd

# One kernel launch for a list of tensors, where public operations need one for each.
foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_
foreach_div_, foreach_mul_, foreach_norm = torch._foreach_div_, torch._foreach_mul_, torch._foreach_norm

# Checks a condition on the device. `assert` and `torch.Tensor.item` would synchronize with it.
assert_async = torch._assert_async
# The public `F.scaled_mm` has no formula for the counter of floating-point operations.
scaled_mm = torch._scaled_mm


# -- tensors -----------------------------------------------------------------------------------------------------------


def version(tensor: Tensor) -> int:
    """How often a tensor was changed in place. In public, only a comparison of values shows it."""
    return tensor._version


def storage_id(storage: torch.UntypedStorage) -> int:
    """The identity of a storage. `data_ptr` is 0 for all storages without data."""
    return int(storage._cdata)


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values as they are. The public `indices` and `values` require a coalesced tensor."""
    return [tensor._indices(), tensor._values()]


def num_gradient_hooks(parameter: Tensor) -> int:
    """torch has public methods to add hooks to a tensor, and none to list them."""
    kinds: Any = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return sum(len(hooks or ()) for hooks in kinds)


# -- modules and optimizers --------------------------------------------------------------------------------------------


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers, to read and replace. `named_buffers` omits those that are None until a forward pass
    creates them, and `setattr` with an nn.Parameter turns a buffer into a parameter."""
    return module._buffers


def plain_attributes(module: nn.Module) -> list[Any]:
    """The values of a module's attributes, except torch's own dicts of parameters, buffers and submodules."""
    return [value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")]


def forward_hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """A module's hooks before and after forward, by the number that a hook keeps for life. torch has public methods to
    add hooks, and none to list them."""
    return module._forward_pre_hooks, module._forward_hooks


def run_hooks_last(module: nn.Module, numbers: Iterable[int]) -> None:
    """Let these of the hooks after forward run after all others; in public, hooks run in the order of registration."""
    hooks = module._forward_hooks
    for number in numbers:
        if number in hooks:
            hooks[number] = hooks.pop(number)


@contextlib.contextmanager
def without_hooks(modules: Mapping[nn.Module, Collection[int]]) -> Iterator[None]:
    """Within the context, calls of these modules run no hooks but those before and after forward that are listed by
    number. Hooks have no public off switch, and FSDP, whose hooks gather parameters, does not expose their handles."""
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    put_away: list[tuple[nn.Module, str, Any]] = []
    for module, kept in modules.items():
        if not kept:
            module._compiled_call_impl = module.forward
            continue
        for kind in kinds:
            hooks = getattr(module, kind)
            put_away.append((module, kind, hooks))
            stays = kept if "forward" in kind else ()
            setattr(module, kind, OrderedDict((number, hook) for number, hook in hooks.items() if number in stays))
    try:
        yield
    finally:
        for module in modules:
            module._compiled_call_impl = None
        for module, kind, hooks in put_away:
            setattr(module, kind, hooks)


def has_step_hooks(optimizer: Optimizer) -> bool:
    """torch has public methods to add hooks to an optimizer, and none to list them."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# -- autograd ----------------------------------------------------------------------------------------------------------


def call_after_backward(function: Any) -> None:
    """Call a function at the end of the backward that is running. DDP finishes its backward in this way; all tensor
    hooks run before that."""
    Variable._execution_engine.queue_callback(function)


def is_in_backward() -> bool:
    """Whether this thread runs a backward, which computes again what `torch.utils.checkpoint` has not kept."""
    return torch._C._current_graph_task_id() != -1


def saved_tensor_hooks() -> Any:
    """The innermost hooks for tensors that autograd saves, of `torch.utils.checkpoint` among others; None outside."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# -- operations and groups ---------------------------------------------------------------------------------------------


def schema(operation: Any) -> Any:
    """The name of an operation and which arguments it writes to. `torch.library` declares schemas but reads none."""
    return operation._schema


def make_wrapper(cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of a subclass without storage. The documentation of subclasses uses this; there is no public name."""
    return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)


def shard_of(parameter: DTensor) -> Tensor:
    """The tensor object in which a rank has its shard, on which FSDP looks for functions. Of a parameter, `to_local`
    gives another object."""
    return parameter._local_tensor


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which `__torch_function__` of subclasses is not asked. The default implementation, which is public,
    also turns every result into the subclass."""
    return torch._C.DisableTorchFunctionSubclass()


def process_group(name: str) -> dist.ProcessGroup:
    """The group of a name, as in the arguments of functional collectives. Public functions only give a group's name."""
    resolve: Any = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    group: dist.ProcessGroup = resolve(name)
    return group


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one. Public methods slice meshes, but do not join axes."""
    return mesh._flatten(name)


# -- the history of a GPU's memory -------------------------------------------------------------------------------------
# From torch's guide to memory snapshots; `torch.cuda.memory_snapshot` has no history.


def start_memory_history(max_entries: int) -> None:
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")


def write_memory_history(path: str) -> None:
    """Write the history into a file, and stop recording."""
    dump: Any = torch.cuda.memory._dump_snapshot
    dump(path)
    torch.cuda.memory._record_memory_history(enabled=None)


# -- the compiler ------------------------------------------------------------------------------------------------------


def fuse_messages_with_products(group: dist.ProcessGroup) -> None:
    """Let the compiler join messages of the group with matrix products, as torchtitan's async tensor parallelism does.

    torch 2.13 calls `enable_symm_mem_for_group` deprecated, but the compiler passes over groups without it.
    """
    from torch._inductor import config  # takes a second to import, which only compiled code needs
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def compile_seconds() -> float:
    """What torch.compile has taken in this process so far. Its public reports are texts."""
    from torch._dynamo.utils import calculate_time_spent  # takes a second to import, which compiled code has done

    return calculate_time_spent()["total_wall_time"]


def graph_breaks() -> dict[str, int]:
    """Why torch.compile has left code of this process uncompiled so far, and how often. In public it is a log, and an
    error where none is allowed."""
    from torch._dynamo.utils import counters  # as above

    meant = ("torch.compiler.disable", "qualname: disable", "torch.nn.parallel.distributed")  # by whom wrote that code
    # What was compiled too often is left out as a whole, and counted among attempts that need not have left out code.
    given_up = [(reason, count) for reason, count in counters["unimplemented"].items() if "recompile limit" in reason]
    reasons = [*counters["graph_break"].items(), *given_up]
    found = {reason: count for reason, count in reasons if not any(m in reason for m in meant)}
    return {reason.partition("\n")[0].strip(): count for reason, count in found.items()}
