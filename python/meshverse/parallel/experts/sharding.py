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
from meshverse.parallel.meshes.create import asked_ep_size, create_moe_mesh
from meshverse.parallel.meshes.degrees import degree

__all__ = ["check_moe_mesh", "choose_moe_mesh", "shard_experts"]

EP_SHARD, EP = "ep_shard", "ep"
_DP_REPLICATE, _PP = "dp_replicate", "pp"


def choose_moe_mesh(
    device_mesh: DeviceMesh, moe_mesh: DeviceMesh | None, ep_size: int | None
) -> DeviceMesh | None:
    """The mesh of the experts that goes with a mesh, for the expert parallelism asked for.

    All ranks call this: a mesh that is not there yet is made.

    Args:
        device_mesh: of the rest of the model.
        moe_mesh: as given; None for the one that belongs to `device_mesh`.
        ep_size: expert parallelism as given; None for that of `moe_mesh`, else for what the
            meshes were created for.

    Returns:
        The mesh (ep_shard, ep), or None without expert parallelism.

    Raises:
        ValueError: ep_size is no degree, does not divide the ranks, or is not that of `moe_mesh`;
            or as `check_moe_mesh`.
    """
    size = None if ep_size is None else degree(ep_size, "ep_size")
    if moe_mesh is not None:
        check_moe_mesh(moe_mesh, device_mesh)
        if size not in (None, moe_mesh[EP].size()):
            raise ValueError(
                f"ep_size={size}, but the experts' mesh has ep={moe_mesh[EP].size()}: {moe_mesh}. "
                "Give one of the two."
            )
        return moe_mesh
    size = asked_ep_size(device_mesh) if size is None else size
    if size == 1:
        return None
    moe_mesh = create_moe_mesh(device_mesh._root(), ep_size=size)
    check_moe_mesh(moe_mesh, device_mesh)
    return moe_mesh


def check_moe_mesh(moe_mesh: DeviceMesh, device_mesh: DeviceMesh) -> None:
    """Check that a mesh of the experts goes with the mesh of the rest.

    Raises:
        ValueError: it has not the axes (ep_shard, ep), is not over the ranks of one pipeline stage,
            or is in another universe.
    """
    axes, stage = moe_mesh.mesh_dim_names, _of_one_stage(device_mesh)
    if axes != (EP_SHARD, EP) or moe_mesh.size() != stage.size():
        raise ValueError(
            f"The experts' mesh has the axes {axes} over {moe_mesh.size()} ranks: expected "
            f"{(EP_SHARD, EP)} over the {stage.size()} ranks of {stage}. Make both with "
            "create_device_meshes, or this one with create_moe_mesh."
        )
    if moe_mesh.universe is not device_mesh.universe:
        raise ValueError(
            f"{moe_mesh} is not in the universe of {device_mesh}: FSDP2 combines meshes of one "
            "root only. Make both with create_device_meshes, or the second with `universe=`."
        )
    ranks = [mesh.layout.collapse().sorted() for mesh in (moe_mesh, stage)]
    if ranks[0] != ranks[1]:
        raise ValueError(
            f"The experts' mesh {moe_mesh} is over other ranks than one pipeline stage of "
            f"{device_mesh}: their layouts are {ranks[0]} and {ranks[1]}. Make both with "
            "create_device_meshes, or this one with create_moe_mesh."
        )


def _of_one_stage(mesh: DeviceMesh) -> DeviceMesh:
    """The part of a mesh that one pipeline stage has."""
    names = mesh.mesh_dim_names or ()
    others = tuple(name for name in names if name != _PP)
    return mesh[others] if others and len(others) < len(names) else mesh


def shard_experts(
    model: nn.Module,
    names: Sequence[str],
    moe_mesh: DeviceMesh,
    *,
    replicas: int = 1,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard the experts of a model over `ep_shard`, before FSDP2 shards what is around them.

    With replicas, the experts are sharded within each and kept equal between them, like the rest,
    unless a replica has too few ranks for all experts: then they are sharded over all of ep_shard.

    Args:
        model: whose experts are handed out over `ep`.
        names: of the modules with experts.
        moe_mesh: with the axes (ep_shard, ep).
        replicas: number of replicas that the rest of the model has.
        precision: of parameters and gradients. Inputs keep theirs: routers' weights are more
            precise than what they weigh.
        offload: where sharded parameters live; None for the mesh's device.
        reshard_after_forward: whether experts are gathered again in backward.
    """
    settings: dict[str, Any] = {"offload_policy": offload}
    mesh = _data_mesh(moe_mesh, replicas)
    own = replace(precision, cast_forward_inputs=False, output_dtype=None)
    for name in names:
        fully_shard(
            model.get_submodule(name),
            mesh=mesh,
            mp_policy=own,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=_placement(mesh.size(-1), moe_mesh[EP].size()),
            **settings,
        )


def _data_mesh(moe_mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    """The ranks that have the same experts: 1-D to shard over, or 2-D (replicas, shards)."""
    mesh = moe_mesh[EP_SHARD]
    shards, remainder = divmod(mesh.size(), replicas)
    if replicas == 1 or remainder:
        return mesh
    return mesh.unflatten(EP_SHARD, (replicas, shards), (_DP_REPLICATE, EP_SHARD))


def _placement(shards: int, parts: int) -> Callable[[nn.Parameter], Shard | None]:
    """By experts, where each rank has enough of them; else by the next dim that divides."""

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter.size(0) % (shards * parts) == 0:
            return None
        dims = (dim for dim in range(1, parameter.ndim) if parameter.size(dim) % shards == 0)
        dim = next(dims, None)
        return None if dim is None else Shard(dim)

    return place
