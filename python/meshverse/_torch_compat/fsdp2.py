"""FSDP2's state of a training step that was interrupted."""

from __future__ import annotations

import contextlib
from typing import Any

import torch._dynamo  # noqa: F401  # FSDP2 needs it at its first step, a spare before that
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState


def undo_step(model: nn.Module) -> None:
    """Have FSDP2 forget a forward or backward pass that raised an error halfway. 2.13.

    Parameters are sharded again, and gradients, prefetched parameters and pending reductions are
    dropped. The sharded parameters themselves do not change during a step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            _undo_state(module._get_fsdp_state())


def _undo_state(state: Any) -> None:
    state._training_state = TrainingState.IDLE
    getattr(state, "_modules_to_run_forward", set()).clear()
    context = state._state_ctx
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    context.is_last_backward = True
    context.post_optim_event = None
    _undo_communication(state._comm_ctx)
    groups = getattr(state, "_fsdp_param_groups", None)  # older: at most one
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    for group in groups:
        _undo_group(group)


def _undo_communication(context: Any) -> None:
    _reset(context, all_gather_state=None, reduce_scatter_state=None)
    for name in ("reduce_scatter_states", "post_forward_order", "_last_post_reduce_events"):
        if hasattr(context, name):
            getattr(context, name).clear()


def _undo_group(group: Any) -> None:
    group._training_state = TrainingState.IDLE
    result = group._all_gather_result
    work = None if result is None else result.all_gather_work
    if work is not None:
        with contextlib.suppress(RuntimeError):  # its group was aborted
            work.wait()
    _reset(
        group,
        _all_gather_result=None,
        _post_reduce_event=None,
        _reshard_after_forward_event=None,
        _partial_reduce_output=None,
        _all_reduce_state=None,
    )
    group._post_forward_indices.clear()
    for parameter in group.fsdp_params:
        _reset(parameter, unsharded_accumulated_grad=None, grad_offload_event=None)
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None
        if parameter.sharded_state is not ShardedState.SHARDED:
            parameter.to_sharded()
    group._sharded_state = ShardedState.SHARDED


def _reset(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        if hasattr(owner, name):
            setattr(owner, name, value)
