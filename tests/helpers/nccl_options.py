"""Options of NCCL that differ from the defaults, one field at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from meshverse._core import OptionsKey

__all__ = ["C10D_FIELDS", "changed_nccl_options", "needs_nccl", "shown_fields"]

# Fields that c10d fills in for each group, or takes beside the options.
C10D_FIELDS = ("backend", "_timeout", "group_name", "global_ranks_in_group", "split_from")

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")


def changed_nccl_options() -> Iterator[tuple[str, Any]]:
    """Yield each field that can be set, by its dotted name, with options where only it differs."""
    new = dist.ProcessGroupNCCL.Options
    for name in _settable_fields(new):
        if name != "config":
            options = new()
            setattr(options, name, _other_value(getattr(options, name)))
            yield name, options
    for name in _settable_fields(type(new().config)):
        options = new()
        setattr(options.config, name, _other_value(getattr(options.config, name)))
        yield f"config.{name}", options


def shown_fields(key: OptionsKey) -> list[str]:
    """Return the dotted names of the options in the text of a key.

    Holds for a key whose values are shown without ", " and "=".
    """
    _, *fields = repr(key)[:-1].split(", ")
    return [field.partition("=")[0] for field in fields]


def _other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return {int: 3, type(None): "text", str: "text"}[type(value)]


def _settable_fields(kind: type) -> list[str]:
    return sorted(
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, property) and member.fset and name not in C10D_FIELDS
    )
