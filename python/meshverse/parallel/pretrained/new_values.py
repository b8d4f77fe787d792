"""Values of a new model, as transformers initializes it, computed one tensor at a time."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from meshverse._torch_compat.dispatch import version_of

from .deferred import Box, Deferred, Source
from .places import Place, places_of

# transformers' mark of tensors and modules that have their values already.
_HAS_VALUES = "_is_hf_initialized"


def new_values(skeleton: Any, seed: int) -> dict[str, Source]:
    """Return what transformers gives to the parameters and buffers on the meta device, by name.

    A tensor is computed when it is read. What transformers gives no value after a model was on the
    meta device is left out.

    Args:
        skeleton: model of transformers; it is changed, and needed until all is read.
        seed: of random values, for each tensor together with its name.
    """
    lost: dict[int, list[Place]] = defaultdict(list)  # those that are tied together
    for place in places_of(skeleton, skeleton):
        if place.tensor.is_meta and not isinstance(place.tensor, Deferred):
            lost[id(place.tensor)].append(place)
        else:
            setattr(place.tensor, _HAS_VALUES, True)
    # A run without memory shows what gets a value.
    before = {key: (each[0].tensor, version_of(each[0].tensor)) for key, each in lost.items()}
    for module in skeleton.modules():
        vars(module).pop(_HAS_VALUES, None)
    with torch.random.fork_rng(devices=[]):
        skeleton.initialize_weights()
    found: dict[str, Source] = {}
    copies = {*skeleton.get_expanded_tied_weights_keys(all_submodels=True)}
    for key, places in lost.items():
        # A new model's tensors are initialized before they are tied: one of them counts.
        places.sort(key=lambda place: place.name in copies)
        tensor, version = before[key]
        if any(place.tensor is not tensor for place in places) or version_of(tensor) > version:
            source = _NewValue(skeleton, places[0], tensor, seed)
            found |= {place.name: source for place in places}
        for place in places:
            setattr(place.tensor, _HAS_VALUES, True)
    return found


class _NewValue(Source):
    """A parameter or buffer of a new model.

    Args:
        skeleton: model in which all modules and tensors are marked as initialized.
        place: of the tensor.
        like: tensor on the meta device.
        seed: of random values.
    """

    computes = True

    def __init__(self, skeleton: Any, place: Place, like: Tensor, seed: int) -> None:
        self._skeleton, self._place, self._like = skeleton, place, like
        self.shape, self.dtype = like.shape, like.dtype
        digest = hashlib.sha256(f"{seed} {place.name}".encode()).digest()
        self._seed = int.from_bytes(digest[:7], "little")

    def read_into(self, box: Box, out: Tensor) -> None:
        """Compute the whole tensor, and copy the elements of a box."""
        out.copy_(self._compute()[tuple(slice(*each) for each in box)])

    def _compute(self) -> Tensor:
        """Initialize the modules around the tensor, which alone has no mark."""
        place = self._place
        there = place.tensor
        tensor = torch.empty_like(self._like, device="cpu")
        if isinstance(self._like, nn.Parameter):
            tensor = nn.Parameter(tensor, self._like.requires_grad)
        setattr(place.module, place.own_name, tensor)
        module: Any = self._skeleton
        vars(module).pop(_HAS_VALUES, None)
        for own in place.name.split(".")[:-1]:
            module = getattr(module, own)
            vars(module).pop(_HAS_VALUES, None)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._seed)  # and not those of GPUs
            self._skeleton.initialize_weights()
        value = place.tensor.detach()  # transformers may have put another one there
        setattr(place.module, place.own_name, there)
        return value
