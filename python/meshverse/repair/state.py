"""The state of a training job on one rank: undoing half a step, and copies for new ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from meshverse._torch_compat.fsdp2 import undo_step

_PLAIN = ""  # key of the part without parameters: see `State._plain`
_ALL = "all"  # in place of the keys of all parts


class _Buffer(NamedTuple):
    """A copy of a buffer, and how often the buffer itself had been written to."""

    module: nn.Module
    name: str
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor

    def has_changed(self) -> bool:
        """Return whether the buffer was written to, or another tensor took its place."""
        now = self.module._buffers[self.name]
        return now is not self.buffer or now._version != self.version


class State:
    """The objects that hold the state of a job on this rank.

    Args:
        objects: modules, optimizers, and objects with `state_dict` and `load_state_dict`.
        copies: global ranks that have the same plain tensors and values as this one; by default
            those that hold the same shards of every DTensor.
    """

    def __init__(self, objects: Sequence[Any], copies: Collection[int] | None) -> None:
        self.objects = tuple(objects)
        self._copies = copies
        self._modules = [one for one in self.objects if isinstance(one, nn.Module)]
        self._optimizers = [one for one in self.objects if isinstance(one, Optimizer)]
        self._others = [one for one in self.objects if not isinstance(one, (nn.Module, Optimizer))]
        for one in self._others:
            if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise TypeError(
                    f"build() returned an object of {type(one).__qualname__}: it must return "
                    "modules, optimizers, and objects with state_dict() and load_state_dict()."
                )
        for key, parameter in self._parameters():
            if parameter.is_meta:
                name = key.rpartition(" ")[2]
                raise ValueError(
                    f"build() returned parameter {name!r} on the meta device, where it cannot get "
                    "values. Call model.to_empty(device=...) in build()."
                )
        # While FSDP2 is in a step, it has other parameters in place of these.
        sharded = [one for _, one in self._parameters() if isinstance(one, DTensor)]
        # All ranks of each mesh: a mesh cannot tell any more when its world has ended.
        self.ranks = {id(one.device_mesh): one.device_mesh.mesh for one in sharded}
        self.places = {(id(one.device_mesh), one.placements) for one in sharded}
        self._buffers: list[_Buffer] = []
        self._random: list[torch.Tensor] = []

    # --- the beginning of a step -----------------------------------------------------------------

    def note(self) -> None:
        """Note what a step changes before it is whole: buffers and random number generators."""
        self._random = [torch.get_rng_state()]
        accelerator = _accelerator()
        if accelerator is not None:
            self._random.append(accelerator.get_rng_state())
        if not self._buffers:
            owners = {each for module in self._modules for each in module.modules()}
            self._buffers = [
                _noted(owner, name)
                for owner in owners
                for name, buffer in owner._buffers.items()
                if buffer is not None
            ]
        for index, noted in enumerate(self._buffers):
            if noted.has_changed():
                self._buffers[index] = _noted(noted.module, noted.name)

    def undo_step(self) -> None:
        """Go back to the beginning of a step whose forward or backward pass was interrupted."""
        for module in self._modules:
            undo_step(module)
        for _, parameter in self._parameters():
            parameter.grad = None
        if not self._random:
            return  # nothing was noted yet
        for index, noted in enumerate(self._buffers):
            if noted.has_changed():
                noted.module._buffers[noted.name] = noted.buffer
                with torch.no_grad():
                    noted.buffer.copy_(noted.copy)
                self._buffers[index] = _noted(noted.module, noted.name)
        _set_random(self._random)

    # --- who has copies --------------------------------------------------------------------------

    def wanted(self, having: Collection[int]) -> dict[int, list[str]] | None:
        """Return which parts of this rank's state to fetch from which ranks.

        Args:
            having: global ranks that have their state.

        Returns:
            Keys of the parts, by rank; None if nobody has one of them.
        """
        holders: dict[Any, frozenset[int]] = {}
        of_part: dict[str, frozenset[int]] = {}
        everywhere: frozenset[int] | None = None
        for key, parameter in self._parameters():
            if isinstance(parameter, DTensor):
                place = parameter.device_mesh, parameter.placements
                if place not in holders:
                    holders[place] = _holders(*place) & frozenset(having)
                of_part[key] = holders[place]
                everywhere = holders[place] & (holders[place] if everywhere is None else everywhere)
        if self._copies is not None:
            everywhere = frozenset(self._copies) & frozenset(having)
        elif everywhere is None:
            raise ValueError(
                "repair() cannot tell which ranks have the same state: it has no DTensor. Pass "
                "join() copies=, a function that returns the ranks that hold the same tensors as "
                "this one, such as those of mesh['dp']."
            )
        wanted: dict[int, list[str]] = {}
        own = dist.get_rank()
        for key in [*(key for key, _ in self._parameters()), _PLAIN]:
            holding = of_part.get(key, everywhere)
            ranks = sorted(everywhere & holding or (holding if key != _PLAIN else ()))
            if not ranks:
                return None
            wanted.setdefault(ranks[own % len(ranks)], []).append(key)
        if len(wanted) == 1:  # all ranks get this message, so it should be short
            return {source: [_ALL] for source in wanted}
        return wanted

    def _expanded(self, keys: Sequence[str]) -> Sequence[str]:
        return [*(key for key, _ in self._parameters()), _PLAIN] if keys == [_ALL] else keys

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                yield f"module {index} {name}", parameter
        for index, optimizer in enumerate(self._optimizers):
            listed = (one for group in optimizer.param_groups for one in group["params"])
            for number, parameter in enumerate(listed):
                yield f"optimizer {index} {number}", parameter

    # --- transfer --------------------------------------------------------------------------------

    def send(self, keys: Sequence[str], rank: int) -> None:
        """Send parts of the state to another rank, which calls `receive`."""
        keys = self._expanded(keys)
        tensors: list[torch.Tensor] = []
        dist.send_object_list([_split(self._parts(keys), tensors)], rank)
        for tensor in tensors:
            dist.send(tensor, rank)

    def receive(self, keys: Sequence[str], rank: int) -> None:
        """Receive parts of the state from another rank, which calls `send`."""
        keys = self._expanded(keys)
        found: list[Any] = [None]
        dist.recv_object_list(found, rank)
        parts = _joined(found[0], rank)
        known = dict(self._parameters())
        with torch.no_grad():
            for key in keys:
                if key.startswith("module"):
                    part = parts[key]
                    _local(known[key]).copy_(part.local if isinstance(part, _Received) else part)
                elif key != _PLAIN:
                    _, index, _ = key.split(" ")
                    parameter = known[key]
                    self._optimizers[int(index)].state[parameter] = {
                        name: _wrapped(value, parameter) for name, value in parts[key].items()
                    }
                else:
                    self._take_plain(parts[key])

    # --- other meshes ----------------------------------------------------------------------------

    def tensors(self) -> dict[str, DTensor]:
        """Return the DTensors of the state by name: parameters, and what optimizers keep."""
        found = {
            key: parameter
            for key, parameter in self._parameters()
            if key.startswith("module") and isinstance(parameter, DTensor)
        }
        for key, values in self._of_optimizers():
            for name, value in values.items():
                if isinstance(value, DTensor):
                    found[f"{key} {name}"] = value
        return found

    def plain_parts(self) -> dict[str, Any]:
        """Return the state without its DTensors, of which it contains the names."""
        plain = {
            key: parameter.detach()
            for key, parameter in self._parameters()
            if key.startswith("module") and not isinstance(parameter, DTensor)
        }
        kept = {
            key: {name: None if isinstance(one, DTensor) else one for name, one in values.items()}
            for key, values in self._of_optimizers()
        }
        return {"parameters": plain, "optimizers": kept, "plain": self._plain()}

    def take_plain_parts(self, parts: dict[str, Any]) -> dict[str, DTensor]:
        """Take what `plain_parts` returned elsewhere; return the DTensors that are to be filled."""
        known = dict(self._parameters())
        for key, value in parts["parameters"].items():
            known[key].copy_(value)
        for key, values in parts["optimizers"].items():
            parameter, (_, index, _) = known[key], key.split(" ")
            self._optimizers[int(index)].state[parameter] = {
                name: torch.zeros_like(parameter) if value is None else value
                for name, value in values.items()
            }
        self._take_plain(parts["plain"])
        return self.tensors()

    def _of_optimizers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, parameter in self._parameters():
            if key.startswith("optimizer"):
                _, index, _ = key.split(" ")
                yield key, dict(self._optimizers[int(index)].state.get(parameter, {}))

    # --- parts -----------------------------------------------------------------------------------

    def _parts(self, keys: Sequence[str]) -> dict[str, Any]:
        known = dict(self._parameters())
        parts: dict[str, Any] = {}
        for key in keys:
            if key.startswith("module"):
                parts[key] = known[key].detach()
            elif key != _PLAIN:
                _, index, _ = key.split(" ")
                parts[key] = dict(self._optimizers[int(index)].state.get(known[key], {}))
            else:
                parts[key] = self._plain()
        return parts

    def _plain(self) -> dict[str, Any]:
        return {
            "buffers": [dict(module.named_buffers()) for module in self._modules],
            "groups": [
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ]
                for optimizer in self._optimizers
            ],
            "others": [one.state_dict() for one in self._others],
            "random": self._random,
        }

    def _take_plain(self, plain: dict[str, Any]) -> None:
        for module, buffers in zip(self._modules, plain["buffers"], strict=True):
            for name, buffer in module.named_buffers():
                value = buffers[name]
                _local(buffer).copy_(value.local if isinstance(value, _Received) else value)
        for optimizer, groups in zip(self._optimizers, plain["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        for one, state in zip(self._others, plain["others"], strict=True):
            one.load_state_dict(state)
        _set_random(plain["random"])


class _Tensor(NamedTuple):
    """A tensor in a message: its local part follows the message."""

    shape: torch.Size
    dtype: torch.dtype
    device: str
    placements: Any  # of a DTensor; else None
    size: tuple[int, ...]  # of the whole DTensor
    stride: tuple[int, ...]


class _Received(NamedTuple):
    """The local part of a DTensor that was received, with its description."""

    local: torch.Tensor
    about: _Tensor


def _split(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value with descriptions in place of tensors, the local parts of which are listed."""
    if isinstance(value, torch.Tensor):
        local = _local(value.detach()).contiguous()
        tensors.append(local)
        placements = value.placements if isinstance(value, DTensor) else None
        whole = tuple(value.shape), tuple(value.stride())
        return _Tensor(local.shape, local.dtype, local.device.type, placements, *whole)
    if isinstance(value, dict):
        return {name: _split(one, tensors) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_split(one, tensors) for one in value)
    return value


def _joined(value: Any, rank: int) -> Any:
    """Return a value with received tensors in place of their descriptions."""
    if isinstance(value, _Tensor):
        local = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        dist.recv(local, rank)
        return local if value.placements is None else _Received(local, value)
    if isinstance(value, dict):
        return {name: _joined(one, rank) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_joined(one, rank) for one in value)
    return value


def _wrapped(value: Any, parameter: torch.Tensor) -> Any:
    """Return an optimizer's value; DTensors are on the mesh of their parameter."""
    if isinstance(value, dict):
        return {name: _wrapped(one, parameter) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_wrapped(one, parameter) for one in value)
    if not isinstance(value, _Received):
        return value
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value.local,
        parameter.device_mesh,
        value.about.placements,
        run_check=False,
        shape=torch.Size(value.about.size),
        stride=value.about.stride,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _noted(module: nn.Module, name: str) -> _Buffer:
    buffer = module._buffers[name]
    assert buffer is not None
    return _Buffer(module, name, buffer, buffer._version, buffer.detach().clone())


def _holders(mesh: Any, placements: Sequence[Any]) -> frozenset[int]:
    """Return the global ranks that hold the same shard of a DTensor as this one."""
    coordinate = mesh.get_coordinate()
    if coordinate is None or any(placement.is_partial() for placement in placements):
        return frozenset()
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for placement, at in zip(placements, coordinate, strict=True)
    )
    return frozenset(mesh.mesh[index].flatten().tolist())


def _set_random(states: Sequence[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    accelerator = _accelerator()
    if accelerator is not None and len(states) > 1:
        accelerator.set_rng_state(states[1])


def _accelerator() -> Any | None:
    """Return the module of the accelerator that this process uses, such as `torch.cuda`."""
    found = torch.accelerator.current_accelerator()
    if found is None or not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(found)
    return module if not hasattr(module, "is_initialized") or module.is_initialized() else None
