"""Parameters of split layers, hidden from code outside the layers.

A rank has a part of such a parameter, in a DTensor. Torch's styles pass a layer plain tensors and
take plain tensors from it; code outside the layer that computes with the parameter itself gets
another number on a rank, or an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["ReadWeightError", "hide_parameters", "hide_parameters_outside"]


class ReadWeightError(Exception):
    """A split layer's parameter is read outside the layer, or in it as a number.

    A rank has a part of it, and would get the number of that part.

    Attributes:
        layer: the name of the layer.
    """

    def __init__(self, text: str = "", layer: str = "") -> None:
        super().__init__(text)
        self.layer = layer


class _HiddenParameter(Tensor):
    """A split layer's parameter, as code outside the layer sees it: it tells its dtype and shape.

    Attributes:
        layer: name of the layer.
        name: to name it by.
    """

    layer: str
    name: str

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function in _ABOUT_WEIGHTS:
            plain: Any = super().__torch_function__
            return plain(function, kinds, arguments, keywords)
        if function in (Tensor.to, Tensor.type_as) and not isinstance(arguments[0], cls):
            positional, named = tree_map(_alike, (arguments, keywords or {}))
            return function(*positional, **named)
        given = tree_leaves((arguments, keywords))
        read = next(vars(each) for each in given if isinstance(each, cls))
        raise ReadWeightError(
            f"{read['name']!r} is read outside its layer, which the plan splits.", read["layer"]
        )


def _alike(value: Any) -> Any:
    """Return an empty tensor of a hidden parameter's dtype and device, and other values as is."""
    if not isinstance(value, _HiddenParameter):
        return value
    return torch.empty(0, dtype=value.dtype, device=value.device)


_ABOUT_WEIGHTS = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size),
    *(Tensor.is_complex, Tensor.stride, Tensor.is_contiguous, Tensor.get_device, Tensor.__len__),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.result_type),
    *(
        getattr(Tensor, name).__get__
        for name in (
            *("dtype", "device", "layout", "shape", "ndim"),
            *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_leaf", "requires_grad", "itemsize"),
        )
    ),
}


def hide_parameters(layer: nn.Module, name: str) -> Callable[[], None]:
    """Let nobody see values of a layer's parameters.

    Args:
        layer: whose parameters are replaced.
        name: of the layer.

    Returns:
        A function that puts the parameters back.
    """
    seen: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for prefix, inside in layer.named_modules(prefix=name):
        table: dict[str, Any] = inside._parameters
        seen.append((table, {**table}))
        for own, parameter in table.items():
            if parameter is not None:
                hidden = parameter.detach().as_subclass(_HiddenParameter)
                vars(hidden).update(layer=name, name=f"{prefix}.{own}")
                table[own] = hidden

    def put_back() -> None:
        for table, parameters in seen:
            table.update(parameters)

    return put_back


def hide_parameters_outside(layer: nn.Module, name: str) -> Callable[[], None]:
    """Let nobody see values of a layer's parameters but its own forward.

    Args:
        layer: whose parameters and forward are replaced.
        name: of the layer.

    Returns:
        A function that puts them back.
    """
    forward, has_own = layer.forward, "forward" in vars(layer)
    put_back = hide_parameters(layer, name)

    def with_parameters(*arguments: Any, **keywords: Any) -> Any:
        put_back()
        try:
            return forward(*arguments, **keywords)
        finally:
            hide_parameters(layer, name)

    def undo() -> None:
        put_back()
        if has_own:
            layer.forward = forward
        else:
            del layer.forward

    layer.forward = with_parameters
    return undo
