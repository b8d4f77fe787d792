"""Words of messages: the nearest of the names that are known, and counts with their nouns."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The end of a message about an unknown name, with a space before; "" if none is near.

    >>> did_you_mean("dp_shrad", ["dp_replicate", "dp_shard"])
    " Did you mean 'dp_shard'?"
    """
    near = get_close_matches(str(name), [str(one) for one in known], n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def several(noun: str) -> str:
    """Return the plural of a noun: "nodes", "switches"."""
    return f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 rank", "10,240 ranks"."""
    return f"{count:,} {noun if count == 1 else several(noun)}"
