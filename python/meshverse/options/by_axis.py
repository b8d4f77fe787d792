"""Values that a user gives for axes, by index or name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshverse.wording import did_you_mean


def by_axis(
    values: Mapping[int | str, Any], axis_names: Sequence[str] | None, ndim: int, *, argument: str
) -> list[Any]:
    """Return one value per axis; None for an axis that the mapping does not have.

    Args:
        values: values by axis index or name.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.
        argument: name of the user's argument, for errors. These begin with torch's words.

    Raises:
        RuntimeError: a key is not an axis, or an axis has two keys, its index and its name.
    """
    names = tuple(axis_names or ())
    # By hash, as values are looked up: a tensor equals an index, but has no value under it.
    axes = {*names, *range(ndim)}
    invalid = [key for key in values if key not in axes]
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
