"""Training without dropout, for forwards that are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_DROPOUT = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout),
    *(torch.dropout_, torch.alpha_dropout_, torch.feature_dropout_, torch.feature_alpha_dropout_),
}
# Functions of attention, with the place of dropout_p among their arguments.
_PLACES = {F.scaled_dot_product_attention: 4, F.multi_head_attention_forward: 10}


class WithoutDropout(TorchFunctionMode):
    """Mode in which dropout returns its input, and attention has no dropout.

    Example:
        >>> with WithoutDropout():
        ...     output = model.train()(tokens)  # doctest: +SKIP
    """

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        keywords = keywords or {}
        if function in _DROPOUT:
            return arguments[0] if arguments else keywords["input"]
        if (place := _PLACES.get(function)) is not None:
            keywords = {**keywords}
            if len(arguments) > place:
                arguments = (*arguments[:place], 0.0, *arguments[place + 1 :])
            else:
                keywords["dropout_p"] = 0.0
        return function(*arguments, **keywords)
