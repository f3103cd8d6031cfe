"""The ways to write the same job, and how each of them is found.

Other libraries come twice: as their documentation shows a loop, and tuned (the loss inside the wrapped module, nothing
read on the host in every step, what is not needed turned off), which is as fast as they go.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from benchmarks.cases import Case
from benchmarks.contenders.common import Contender
from benchmarks.contenders.torchvision_operators import declare_torchvision_operators
from rung.distributed.world import World

# The order of the report. Where a package has two names, either will do.
_PACKAGES: dict[str, tuple[str, ...]] = {
    "hand": ("torch",),
    "accelerate": ("accelerate",),
    "accelerate-tuned": ("accelerate",),
    "fabric": ("lightning", "lightning_fabric"),
    "fabric-tuned": ("lightning", "lightning_fabric"),
    "trainer": ("transformers",),
    "trainer-tuned": ("transformers",),
    "lightning": ("lightning",),
    "lightning-tuned": ("lightning",),
    "deepspeed": ("deepspeed",),
    "deepspeed-tuned": ("deepspeed",),
    "ray": ("ray",),
    "torchtitan": ("torchtitan",),
    "rung": ("rung",),
}
CONTENDERS = tuple(_PACKAGES)


def missing_package(name: str) -> str | None:
    """What would have to be installed for a contender to take part."""
    packages = _PACKAGES[name]
    return None if any(find_spec(package) is not None for package in packages) else " or ".join(packages)


def can_take(name: str, case: Case) -> bool:
    """torchtitan trains models of tokens on GPUs; here on one, since no data parallelism is registered with it."""
    return name != "torchtitan" or (case.device == "cuda" and case.task == "gpt" and case.num_ranks == 1)


def build_contender(name: str, case: Case, world: World) -> Contender:
    if name not in ("hand", "rung"):
        declare_torchvision_operators()
    # Imported here, so that a contender that was left out is not imported, either: some of them patch torch.
    library, _, tuned = name.partition("-")
    module = importlib.import_module(f"benchmarks.contenders.with_{library}")
    contender: Contender = module.build(case, world, tuned=bool(tuned))
    return contender
