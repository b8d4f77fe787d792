"""FSDP2 for a trainer: what a config says, applied to a model on its meshes.

Example:
    >>> config = FSDP2Config(sequence_parallel=True)  # doctest: +SKIP
    >>> meshes = create_device_meshes(  # doctest: +SKIP
    ...     config, ParallelismSizes(tp_size=2), world_size=8
    ... )
    >>> manager = FSDP2Manager(config, *meshes)  # doctest: +SKIP
    >>> model = manager.maybe_compile(manager.parallelize(model))  # doctest: +SKIP
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from torch import nn

from meshverse import DeviceMesh
from meshverse.parallel.config import FSDP2Config
from meshverse.parallel.experts.sharding import choose_moe_mesh
from meshverse.parallel.meshes.degrees import degree
from meshverse.parallel.models.checkpointing import apply_activation_checkpointing
from meshverse.parallel.models.compiling import compile_layers, warn_of_async_tensor_parallel
from meshverse.parallel.models.packed_sequences import (
    patch_is_packed_sequence,
    restore_is_packed_sequence,
)

from .fsdp2 import fsdp2_strategy_parallelize

__all__ = ["FSDP2Manager"]

_logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)


class FSDP2Manager:
    """Applies an `FSDP2Config` to models: tensor parallelism, checkpointing, FSDP2, compile.

    The training loop keeps to `defer_fsdp_grad_sync` and `autocast_dtype` itself.

    Args:
        config: the settings.
        device_mesh: as `create_device_meshes` makes it; None for one process.
        moe_mesh: the experts' mesh, if `create_device_meshes` made one.
        ep_size: expert parallelism, where moe_mesh is not given: all ranks make the mesh here then.
            By default what `create_device_meshes` was asked for; 1 for a model without experts on
            meshes that were made for some.
        packed_sequences: whether sequences are packed in training, so that transformers' check for
            them must stay whatever the config says.

    Attributes:
        moe_mesh: the experts' mesh, given or made; None without expert parallelism.

    Raises:
        ValueError: ep_size is no degree or does not fit the ranks or moe_mesh; or the two meshes
            are not in one universe, where FSDP2 cannot combine them.
    """

    def __init__(
        self,
        config: FSDP2Config,
        device_mesh: DeviceMesh | None,
        moe_mesh: DeviceMesh | None = None,
        *,
        ep_size: int | None = None,
        packed_sequences: bool = False,
    ) -> None:
        self.config = config
        self.device_mesh = device_mesh
        self.moe_mesh = _moe_mesh(device_mesh, moe_mesh, ep_size)
        self.packed_sequences = packed_sequences

    def parallelize(
        self,
        model: _Model,
        reapply_trainability: Callable[[nn.Module], None] | None = None,
    ) -> _Model:
        """Split and shard a model in place.

        Where there is nothing to split, in a world of one, activation checkpointing is applied all
        the same, and the model keeps its precision.

        Args:
            model: whose parameters are whole.
            reapply_trainability: as for `fsdp2_strategy_parallelize`.

        Returns:
            The same model object.

        Raises:
            ValueError: the model cannot be split as the meshes say.
        """
        config = self.config
        self._patch_transformers()
        if self.device_mesh is None or self.device_mesh.size() == 1:
            _logger.info("One process: nothing to split or shard.")
            if config.activation_checkpointing:
                apply_activation_checkpointing(
                    model, config.activation_checkpointing, config.activation_checkpointing_scope
                )
            if reapply_trainability is not None:
                reapply_trainability(model)
            return model
        fsdp2_strategy_parallelize(
            model,
            self.device_mesh,
            moe_mesh=self.moe_mesh,
            ep_size=1 if self.moe_mesh is None else None,
            mp_policy=config.mp_policy,
            offload_policy=config.offload_policy,
            sequence_parallel=config.sequence_parallel,
            activation_checkpointing=config.activation_checkpointing,
            activation_checkpointing_scope=config.activation_checkpointing_scope,
            tp_shard_plan=config.tp_plan,
            reshard_after_forward=config.reshard_after_forward,
            enable_fsdp2_prefetch=config.enable_fsdp2_prefetch,
            fsdp2_backward_prefetch_depth=config.fsdp2_backward_prefetch_depth,
            fsdp2_forward_prefetch_depth=config.fsdp2_forward_prefetch_depth,
            reapply_trainability=reapply_trainability,
        )
        return model

    def maybe_compile(self, model: _Model) -> _Model:
        """Compile each decoder layer of a model in place, if the config says so.

        Layers are the items of the outermost ModuleLists and ModuleDicts.

        Returns:
            The same model object.
        """
        if self.config.enable_async_tensor_parallel:
            warn_of_async_tensor_parallel()
        if self.config.enable_compile:
            compile_layers(model)
        return model

    def _patch_transformers(self) -> None:
        if self.packed_sequences:
            restore_is_packed_sequence()
        elif self.config.patch_is_packed_sequence:
            patch_is_packed_sequence()


def _moe_mesh(
    device_mesh: DeviceMesh | None, moe_mesh: DeviceMesh | None, ep_size: int | None
) -> DeviceMesh | None:
    if device_mesh is not None:
        return choose_moe_mesh(device_mesh, moe_mesh, ep_size)
    if moe_mesh is not None or degree(ep_size, "ep_size") > 1:
        raise ValueError(
            f"ep_size={ep_size} and {moe_mesh=} for one process, with device_mesh=None: there are "
            "no ranks to hand out experts to. Give the mesh that create_device_meshes makes."
        )
    return None
