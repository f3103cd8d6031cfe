"""Which names of torch that begin with an underscore the package uses, and where: this list, and no more.

A use is an import of such a name, an attribute of something that torch made, or a private method of a torch class that
a subclass overrides or calls. Operators (`torch.ops.aten._scaled_dot_product_flash_attention`) are left out: these are
names of kernels, which appear in every trace.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rung

ROOT = Path(rung.__file__).parent
# A new name here needs a comment at its use that says why there is no public way.
ALLOWED = {
    "distributed/cuda_emulation.py": (
        "_C _ExcludeDispatchKeyGuard _destroy _dispatch_keyset_full_after _foreach_supported_types "
        "_get_foreach_kernels_supported_devices _subclasses"
    ),
    "distributed/fake_world.py": (
        "_C _DEFAULT_FIRST_BUCKET_BYTES _TorchDispatchModeKey _build_debug_param_to_name_mapping "
        "_build_params_for_reducer _cdata _chunk_with_empty _clear_DTensor_sharding_propagator_cache "
        "_compute_bucket_assignment_by_size _current_autograd_node _ddp_init_helper _fsdp_common "
        "_fsdp_param_group _fsdp_param_groups _fully_shard _get_dispatch_mode _get_fsdp_state _internal _mode_utils "
        "_op_dispatcher _propagate_tensor_meta_non_cached _remove_autograd_hooks _storage_Use_Count "
        "_subclasses _training_state _use_count"
    ),
    "distributed/known_indices.py": "_mode_utils",
    "distributed/offload_emulation.py": (
        "_fsdp_param _fully_shard _get_foreach_kernels_supported_devices _init_sharded_param"
    ),
    "distributed/rpc.py": (
        "_InternalRPCPickler _channels _default_pickler _internal_rpc_pickler _set_sequence_nr _transports"
    ),
    "distributed/torch_private.py": (
        "_BatchNorm _C _DropoutNd _assert_async _autograd _backward_hooks _buffers _cdata _compiled_call_impl "
        "_current_graph_task_id "
        "_dump_snapshot _dynamo _execution_engine _flatten _foreach_add_ _foreach_copy_ "
        "_foreach_div_ _foreach_mul_ _foreach_norm _forward_hooks _forward_pre_hooks _functional_collectives "
        "_get_current_dispatch_mode _indices _inductor _local_tensor _make_wrapper_subclass _micro_pipeline_tp "
        "_optimizer_step_post_hooks "
        "_optimizer_step_pre_hooks _post_accumulate_grad_hooks _python_dispatch _pytree _record_memory_history "
        "_resolve_process_group _scaled_mm _schema _symmetric_memory _top_saved_tensors_default_hooks _values _version"
    ),
    "launch/rendezvous/state.py": (
        "_NodeDesc _RendezvousExitOp _RendezvousJoinOp _RendezvousState _get_deadline _get_world _op_executor "
        "_start_heartbeats _state_holder _stop_heartbeats _this_node"
    ),
    "parallel/pipeline/schedule.py": (
        "_PipelineStageBase _backward _create_grad_recv_info _prepare_backward_infra _prepare_forward_infra "
        "_step_microbatches"
    ),
    "parallel/tensor/apply.py": "_apply",
    "runtime/optimizer.py": "_found_inf_per_device _unscale_grads_",
}
# What looks like torch's and is of another library's: multiprocessing, argparse, transformers, datasets, torchmetrics.
_OTHERS = (
    "_forkserver", "_config", "_action", "_tp_plan", "_distributed", "_update_count", "_defaults", "_reductions",
)  # fmt: skip
# Objects whose private names the package also uses for its own.
_TORCH_OBJECTS = (nn.Module(), torch.optim.SGD([torch.zeros(1)]), torch.Tensor, torch.UntypedStorage)


def find_uses() -> dict[str, set[str]]:
    return {path: found for path, tree in trees().items() if (found := {*_uses(tree), *_inherited(path, tree)})}


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


@cache
def _own_names() -> set[str]:
    """Private names that the package gives to things of its own."""
    found = set()
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found - {name for kind in _TORCH_OBJECTS for name in dir(kind)}


def _uses(tree: ast.Module) -> set[str]:
    imported, found, foreign = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}.{alias.name}".lstrip(".")
                if name.split(".")[0] == "torch":
                    imported |= {part for part in name.split(".") if _is_private(part)}
                else:
                    foreign.add(alias.asname or alias.name.split(".")[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            receiver, name = node.value, node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            receiver, name = node.args[0], str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.keyword):  # of fake_world.patched, which replaces attributes
            receiver, name = ast.Constant(None), node.arg or ""
        else:
            continue
        of_operator = ast.unparse(receiver).startswith("torch.ops.")
        if _is_private(name) and not _is_self(receiver) and not of_operator and _root(receiver) not in foreign:
            found.add(name)
    return imported | {name for name in found - _own_names() if not name.startswith(_OTHERS)}


def _inherited(path: str, tree: ast.Module) -> set[str]:
    """Private names of torch classes in the classes of a module that inherit from them."""
    found = set()
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases):
        kind = getattr(importlib.import_module("rung." + path.removesuffix(".py").replace("/", ".")), node.name)
        theirs = {name for base in kind.__mro__ if base.__module__.startswith("torch") for name in _names_of(base)}
        for part in ast.walk(node):
            if isinstance(part, ast.FunctionDef):
                found |= {part.name} & theirs
            elif isinstance(part, ast.Attribute) and _is_self(part.value):
                found |= {part.attr} & theirs
    return {name for name in found if _is_private(name)}


@cache
def _names_of(kind: type) -> set[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # written in C++
        source = ""
    return {*vars(kind), *re.findall(r"\bself\.(_\w+)", source)}


def _is_private(name: str) -> bool:
    return re.match(r"_[^_]", name) is not None


def _is_self(receiver: ast.expr) -> bool:
    return ast.unparse(receiver) in ("self", "cls", "super()")


def _root(receiver: ast.expr) -> str:
    return re.split(r"\W", ast.unparse(receiver))[0]


def test_private_names_of_torch_are_used_where_they_are_listed_alone() -> None:
    allowed: dict[str, Any] = {path: set(names.split()) for path, names in ALLOWED.items()}
    assert find_uses() == allowed
