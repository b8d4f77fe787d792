"""FSDP2 for experts that are handed out: over the ranks that have the same ones.

Example:
    >>> shard_experts(model, names, moe_mesh, precision=policy)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from meshverse import DeviceMesh

__all__ = ["check_moe_mesh", "shard_experts"]

EP_SHARD, EP = "ep_shard", "ep"


def check_moe_mesh(moe_mesh: DeviceMesh, device_mesh: DeviceMesh) -> None:
    """Check that a mesh of the experts goes with the mesh of the rest.

    Raises:
        ValueError: it has not the axes (ep_shard, ep), is not over the ranks of one pipeline stage,
            or is in another universe.
    """
    axes = moe_mesh.mesh_dim_names
    stage = device_mesh.size()
    if axes != (EP_SHARD, EP) or moe_mesh.size() != stage:
        raise ValueError(
            f"The experts' mesh has the axes {axes} over {moe_mesh.size()} ranks: expected "
            f"{(EP_SHARD, EP)} over the {stage} ranks of {device_mesh}. Make both with "
            "create_device_meshes, or this one with create_moe_mesh."
        )
    if moe_mesh.universe is not device_mesh.universe:
        raise ValueError(
            f"{moe_mesh} is not in the universe of {device_mesh}: FSDP2 combines meshes of one "
            "root only. Make both with create_device_meshes, or the second with `universe=`."
        )


def shard_experts(
    model: nn.Module,
    names: Sequence[str],
    moe_mesh: DeviceMesh,
    *,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard the experts of a model over `ep_shard`, before FSDP2 shards what is around them.

    Args:
        model: whose experts are handed out over `ep`.
        names: of the modules with experts.
        moe_mesh: with the axes (ep_shard, ep).
        precision: of parameters and gradients. Inputs keep theirs: routers' weights are more
            precise than what they weigh.
        offload: where sharded parameters live; None for the mesh's device.
        reshard_after_forward: whether experts are gathered again in backward.
    """
    settings: dict[str, Any] = {} if offload is None else {"offload_policy": offload}
    mesh = moe_mesh[EP_SHARD]
    own = replace(precision, cast_forward_inputs=False, output_dtype=None)
    for name in names:
        fully_shard(
            model.get_submodule(name),
            mesh=mesh,
            mp_policy=own,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=_placement(mesh.size(), moe_mesh[EP].size()),
            **settings,
        )


def _placement(shards: int, parts: int) -> Callable[[nn.Parameter], Shard | None]:
    """By experts, where each rank has enough of them; else by the next dim that divides."""

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.size(0) % (shards * parts) == 0:
            return None
        dims = (dim for dim in range(1, parameter.ndim) if parameter.size(dim) % shards == 0)
        dim = next(dims, None)
        return None if dim is None else Shard(dim)

    return place
