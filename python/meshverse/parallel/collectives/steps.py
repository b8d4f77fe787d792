"""Steps that all ranks take together: what fails on one raises on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_Result = TypeVar("_Result")
_ALIKE: tuple[type[Exception], ...] = (
    *(FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError, OSError),
    *(ImportError, NotImplementedError, TypeError, ValueError, RuntimeError),
)


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return every rank's value, by rank in the group; without a process group, this one's.

    Raises:
        ValueError: this process is not in the group.
    """
    if not dist.is_initialized():
        return [value]
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"Rank {dist.get_rank()} is not in the process group that was given as group=. Make "
            "the call on its ranks alone, or give a group of all ranks that have a part of the "
            "model."
        )
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sent_from(first: int, value: _Result, group: dist.ProcessGroup | None) -> _Result:
    """Return the value of one rank of a group, on all its ranks."""
    values = [value if rank_in(group) == first else None]
    dist.broadcast_object_list(values, group=group, group_src=first)
    return values[0]  # type: ignore[return-value]


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this rank's number in a group; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def together(step: Callable[[], _Result], group: dist.ProcessGroup | None) -> _Result:
    """Take a step on all ranks of a group, and return its result.

    Raises:
        Exception: the step raised on some rank. All ranks get the first rank's error, of the same
            class and with the same text.
    """
    result: Any = None
    failure: tuple[type[Exception], str] | None = None
    try:
        result = step()
    except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
        own: Exception | None = error
        kind = next((each for each in _ALIKE if isinstance(error, each)), RuntimeError)
        known = kind is type(error)
        failure = kind, str(error) if known else f"{type(error).__name__}: {error}"
    else:
        own = None
    failures = gathered(failure, group)
    failed = [rank for rank, each in enumerate(failures) if each is not None]
    if not failed:
        return result  # type: ignore[no-any-return]
    kind, text = failures[failed[0]]
    if len(failures) > 1:
        ranks = "all ranks" if len(failed) == len(failures) else f"ranks {failed[:8]}"
        text = f"{text} (on {ranks})"
    raise kind(text) from own


def on_first_rank(step: Callable[[], object], group: dist.ProcessGroup | None) -> None:
    """Take a step on the first rank of a group; if it raises, all ranks raise."""
    together(lambda: step() if rank_in(group) == 0 else None, group)


def check_is_same(what: str, value: str, group: dist.ProcessGroup | None, cure: str) -> None:
    """Check that all ranks of a group have the same value.

    Raises:
        ValueError: they do not; on all ranks.
    """
    values = gathered(value, group)
    others = [rank for rank, each in enumerate(values) if each != values[0]]
    if others:
        raise ValueError(
            f"{what} differs between ranks: ranks {others[:8]} have {values[others[0]]!r}, rank 0 "
            f"has {values[0]!r}. {cure}"
        )
