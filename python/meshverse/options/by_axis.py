"""Values of single axes, given by axis index or name, as one value per axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshverse.wording import did_you_mean


def by_axis(
    values: Mapping[int | str, Any], axis_names: Sequence[str] | None, ndim: int, *, argument: str
) -> list[Any]:
    """Return one value per axis; None if the mapping has none for it.

    Args:
        values: by axis index or name.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.
        argument: that the user gave them as, for errors, which have stock's words.

    Raises:
        RuntimeError: a key is no axis, or an axis is named twice, by index and by name.
    """
    names = tuple(axis_names or ())
    invalid = [key for key in values if key not in names and key not in range(ndim)]
    if invalid:
        raise RuntimeError(
            f"Found invalid keys in {argument}: got {invalid}, expected integers in range "
            f"[0, {ndim}) or one of {names}.{did_you_mean(invalid[0], names)}"
        )
    for index, name in enumerate(names):
        if index in values and name in values:
            raise RuntimeError(
                f"Found redundant dim index {index} and name {name} in {argument}: "
                "give the axis once, by its index or by its name."
            )
    found = [values.get(index) for index in range(ndim)]
    for index, name in enumerate(names):
        found[index] = values.get(name, found[index])
    return found
