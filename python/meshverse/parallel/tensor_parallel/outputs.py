"""Outputs of a module, and other tensors that it leaves, which the model may compute with.

Between split layers, a rank has its own features or heads only. If a forward returns such tensors
besides its output, as attentions return their weights, or leaves them in attributes, a rank may
have others than the whole module. That is no matter as long as nothing computes with them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshverse.parallel.models.modules import child_name
from meshverse.parallel.models.trials import kept_by, leaves_in, values_in

# The name of the attribute that a value is in, how many are in it, and which of them it is: of its
# own heads, a rank may keep fewer. The name of what is returned is "", and the first is the output.
Key = tuple[str, int, int]
Outputs = dict[Key, Tensor]
OUTPUT: Key = ("", 0, 0)

TO_NUMBERS = {
    *(Tensor.item, Tensor.tolist, Tensor.numpy),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__array__),
}
# Uses that return no tensor.
_USES = {
    *TO_NUMBERS,
    Tensor.__setitem__,
    torch.equal,
    torch.allclose,
    Tensor.equal,
    Tensor.allclose,
}
_COPIES = {
    *(Tensor.detach, Tensor.clone, Tensor.contiguous, Tensor.requires_grad_),
    *(Tensor.to, Tensor.type, Tensor.cpu, Tensor.float, Tensor.double, Tensor.bfloat16),
}


def outputs_of(module: nn.Module, returned: Any) -> Outputs:
    """Return the tensors and numbers that a forward returned, or has left in attributes."""
    in_order = sorted(leaves_in(returned), key=lambda each: not isinstance(each, Tensor))
    outputs: Outputs = {("", 0, n): each for n, each in enumerate(values_in(in_order))}
    for name, kept in kept_by(module).items():
        outputs |= {(name, len(kept), n): each for n, each in enumerate(kept)}
    return outputs


class UsesOfOtherOutputs(TorchFunctionMode):
    """Mode that notes which tensors, left by modules, functions of torch get elsewhere.

    What the forward of a module around them does is no matter: it is tried as a whole.

    Attributes:
        used: keys of the tensors, by the names of the modules that left them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used: defaultdict[str, set[Key]] = defaultdict(set)
        self._running: list[str] = []
        self._left: dict[int, tuple[Tensor, str, Key]] = {}  # by id

    def begin(self, name: str) -> None:
        """Note that a module's forward begins."""
        self._running.append(name)

    def end(self, name: str, left: Outputs) -> None:
        """Note that a module's forward has ended, and what it leaves."""
        self._running.remove(name)
        for key, tensor in left.items():
            if key != OUTPUT:
                self._left[id(tensor)] = tensor, name, key

    def forget(self) -> None:
        """Forget a run that is over."""
        self.used.clear()
        self._running.clear()
        self._left.clear()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        if self._left:
            self._note(function, (arguments, keywords), result)
        return result

    def _note(self, function: Any, given: Any, result: Any) -> None:
        for each in leaves_in(given):
            _, name, key = self._left.get(id(each), (None, "", OUTPUT))
            if key == OUTPUT or any(_is_around(other, name) for other in self._running):
                continue
            if function in _COPIES and isinstance(result, Tensor):
                self._left[id(result)] = result, name, key
            elif function in _USES or any(isinstance(own, Tensor) for own in leaves_in(result)):
                self.used[name].add(key)


def _is_around(name: str, other: str) -> bool:
    """Return whether a module is another one, or has it inside, by their names."""
    return name in ("", other) or other.startswith(child_name(name, ""))
