"""Every so many steps: whether the ranks that hold the same parameters still hold the same bits."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from rung.checkpoint import Position
from rung.errors import ReplicaError
from rung.parallel.checksums import Named, bit_sums, own_part, shared_parameters
from rung.parallel.materialize import is_absent
from rung.runtime import Runtime
from rung.spec.abilities import can
from rung.spec.config import RunConfig
from rung.train.checkpointing import Checkpointing


class ReplicaCheck:
    """Compares checksums along each axis of the mesh, and of what pipeline stages share. All ranks call it after the
    same steps."""

    def __init__(self, runtime: Runtime, config: RunConfig, checkpointing: Checkpointing | None) -> None:
        self._world, self._checkpointing, self._every = runtime.world, checkpointing, config.check_every
        layout = self._world.layout
        named = [(name, p) for name, p in runtime.model.named_parameters() if not is_absent(p)]
        # Local steps let weights differ between two averagings. Of servers' parameters trainers have copies.
        is_off = not self._every or not self._world.has_peers or not can(layout, "check") or config.local_steps > 1
        self._shared: dict[dist.ProcessGroup, Named] = {}
        if not is_off:
            replicas = shared_parameters(named, layout) if self._world.mesh is not None else {}  # not over RPC
            for axis, parameters in replicas.items():
                self._shared[self._world.axis(axis).get_group()] = parameters
            for name, parameter, group in runtime.copies_of_stages:
                self._shared.setdefault(group, []).append((name, own_part(parameter)))
        # Stages between those that share a parameter have nothing to compare, but hear of what the others found.
        told = [dist.get_world_size(group) == self._world.size for group in self._shared]
        everyone = self._world.gather_objects([bool(self._shared), all(told)]) if not is_off else []
        self._is_on = any(compares for compares, _ in everyone)
        self._is_told = all(told for _, told in everyone)  # each rank finds out by itself what all find

    def after_step(self, position: Position, *, is_saved: bool) -> None:
        """Compare every so many steps, and before a save: a checkpoint holds weights on which the ranks agreed."""
        if not self._is_on or not (is_saved or position.step % self._every == 0):
            return
        found = [text for group, named in self._shared.items() if (text := self._compare(group, named)) is not None]
        if not self._is_told:
            found = [text for rank in self._world.gather_objects(found) for text in rank]
        if found:
            self._refuse(found[0], position)

    def _compare(self, group: dist.ProcessGroup, named: Named) -> str | None:
        """What differs among the ranks of a group."""
        sums = bit_sums(named)
        total = sums.sum()
        extremes = torch.stack([total, -total])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        if int(extremes[0]) == -int(extremes[1]):
            return None
        rows = [torch.empty_like(sums) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, sums, group=group)
        ranks, found = dist.get_process_group_ranks(group), [tuple(row.tolist()) for row in rows]
        usual, count = Counter(found).most_common(1)[0]
        odd = ", ".join(str(rank) for rank, row in zip(ranks, found, strict=True) if row != usual)
        if 2 * count > len(ranks):
            who = f"rank {odd} no longer has the weights of the ranks that should have the same"
        else:
            who = f"ranks {', '.join(map(str, ranks))} should have the same weights, and no longer do"
        differ = [name for place, (name, _) in enumerate(named) if len({row[place] for row in found}) > 1]
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        return f"{who}: {', '.join(differ[:3])}{more}"

    def _refuse(self, found: str, position: Position) -> None:
        lines = [f"after step {position.step} {found}."]
        if self._checkpointing is not None:
            good = self._checkpointing.last_good()
            self._checkpointing.close()
            if good is not None:
                lines.append(f"the last good checkpoint is {good}: --resume {good.parent.parent} goes on from it.")
        lines.append(
            f"They were the same at most {self._every} steps ago. Faulty memory or a faulty device does that, and code "
            "that changes parameters on some ranks only. --set check_every=0 trains without this comparison."
        )
        raise ReplicaError("\n".join(lines))
