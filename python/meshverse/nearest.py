"""What to say of a name that is not known: the nearest of those that are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of a message about an unknown name, with a space before; "" if none is near.

    >>> did_you_mean("dp_shrad", ["dp_replicate", "dp_shard"])
    " Did you mean 'dp_shard'?"
    """
    near = get_close_matches(str(name), [str(one) for one in known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
