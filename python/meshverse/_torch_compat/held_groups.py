"""Process groups that modules, FSDP2, and pipeline stages and schedules hold. 2.11-2.15.

All other parts of torch that Meshverse supports keep a group's name, or a mesh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .private_names import ProcessGroup, c10d


class HeldGroup(NamedTuple):
    """An attribute whose value is a process group.

    Attributes:
        owner: object that has the attribute.
        name: name of the attribute.
        group: the group.
        why_fixed: why the owner cannot be given another group, in words; "" if it can.
    """

    owner: Any
    name: str
    group: ProcessGroup
    why_fixed: str = ""

    def replace(self, group: ProcessGroup) -> None:
        """Give the owner another group."""
        setattr(self.owner, self.name, group)

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}{self.why_fixed and f', {self.why_fixed}'}"


def is_live(group: ProcessGroup) -> bool:
    """Return whether c10d still has a group."""
    return group in c10d._world.pg_names


def groups_held_by(one: object) -> list[HeldGroup] | None:
    """Return the groups that an object of torch holds; None if it is of no known kind."""
    if isinstance(one, nn.Module):
        return [held for module in one.modules() for held in _of_module(module)]
    if isinstance(one, Optimizer | LRScheduler):
        return list(group_attributes([one]))
    if isinstance(one, Tensor):
        return []
    return _of_pipeline(one)


def _of_module(module: nn.Module) -> Iterator[HeldGroup]:
    # Whoever has such a module has imported FSDP, which takes 0.6 s.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    is_wrapper = isinstance(module, DistributedDataParallel) or (
        fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
    )
    why_fixed = "which its other parts use too: wrap the model again, after revive()"
    yield from group_attributes([module], why_fixed if is_wrapper else "")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        yield from group_attributes(_parts_of_fsdp(module))


def _parts_of_fsdp(module: Any) -> Iterator[object]:
    for group in _param_groups(module):
        yield from (group._all_gather_comm, group._reduce_scatter_comm)
        for owner in (group, *group.fsdp_params):
            yield from (owner.mesh_info, owner.post_forward_mesh_info)


def _param_groups(module: Any) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # before 2.13: at most one
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def awaits_all_gather(module: Any) -> bool:
    """Whether FSDP2 has begun to gather a module's parameters, and nothing uses them yet."""
    return any(group._all_gather_result is not None for group in _param_groups(module))


def _of_pipeline(one: object) -> list[HeldGroup] | None:
    # Whoever has such an object has imported its module, which takes a second.
    pipelining: Any = sys.modules.get("torch.distributed.pipelining.schedules")
    if pipelining is None:
        return None
    if isinstance(one, pipelining.PipelineScheduleSingle):
        stages = [one._stage]
    elif isinstance(one, pipelining.PipelineScheduleMulti):
        stages = one._stages
    elif isinstance(one, pipelining._PipelineStageBase):
        stages = [one]
    else:
        return None
    modules = [held for stage in stages for held in groups_held_by(stage.submod) or ()]
    return [*group_attributes(stages), *modules]


def group_attributes(owners: Iterable[object], why_fixed: str = "") -> Iterator[HeldGroup]:
    """Yield the attributes of objects whose values are process groups."""
    for owner in owners:
        for name, value in vars(owner).items() if hasattr(owner, "__dict__") else ():
            if isinstance(value, dist.ProcessGroup):
                yield HeldGroup(owner, name, value, why_fixed)
