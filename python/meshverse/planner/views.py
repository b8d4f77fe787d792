"""The views of a world: what they are called, how they are split, and whether they fit.

A view is written as its axes in order: "pp=8,dp=160,cp=1,tp=8". An axis that is flattened of others
names them: "loss=dp*cp".
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshverse._core import AxisLayout, Layout
from meshverse.nearest import did_you_mean
from meshverse.parallel.meshes.create import fsdp2_specs
from meshverse.parallel.meshes.degrees import ParallelismSizes

__all__ = ["MOST_RANKS", "View", "check_fits", "read_view", "trainer_views", "whole_number"]

MOST_RANKS = 2**24
"""The largest world that is planned. Planning takes memory for every rank: some GiB for this."""

_N_NEAREST = 3


@dataclass(frozen=True)
class View:
    """One way to split the world.

    Attributes:
        sizes: of the axes, by name, the rightmost varying fastest.
        flattened: by name, the axes that a flattened axis combines.

    Raises:
        TypeError: sizes or flattened axes that are no mapping.
        ValueError: a view that no mesh can have: no axis, a name that is there twice or that no
            text can hold, a size that is no int above 0, or a flattened axis of no axes, of axes
            that the view has not, or in another order.
    """

    sizes: Mapping[str, int]
    flattened: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, given in (("sizes", self.sizes), ("flattened", self.flattened)):
            if not isinstance(given, Mapping):
                raise TypeError(
                    f"{what}={given!r} of a view: give a mapping from the names of its axes, such "
                    'as View({"dp": 4, "tp": 8}, {"all": ("dp", "tp")}).'
                )
        if not self.sizes:
            raise ValueError(f"The view {str(self)!r} has no axis with a size, such as dp=8.")
        for name in (*self.sizes, *self.flattened):
            _check_name(name)
        # Copies: what the caller changes later does not change the view.
        sizes = {name: self._size(name, size) for name, size in self.sizes.items()}
        flattened = {name: self._parts(name, parts) for name, parts in self.flattened.items()}
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "flattened", flattened)

    def _size(self, name: str, size: Any) -> int:
        number = whole_number(size)
        if number is None or number < 1:
            raise ValueError(
                f"{name}={size} in the view {str(self)!r} is no size: give an int above 0."
            )
        return number

    def _parts(self, name: str, given: Any) -> tuple[str, ...]:
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"The flattened axis {name}={given!r}: give a tuple of names of axes.")
        parts, names = tuple(given), list(self.sizes)
        if name in names:
            raise ValueError(
                f"The view {str(self)!r} has the axis {name!r} twice: give it another name."
            )
        unknown = [part for part in parts if part not in names]
        if not parts or unknown or len(set(parts)) < len(parts):
            what = f"no axis {unknown[0]!r}" if unknown else "it names one of them twice"
            raise ValueError(
                f"The flattened axis {name}={'*'.join(map(str, parts))} of the view {str(self)!r}: "
                f"{what if parts else 'it is of no axis'}. The axes are {', '.join(names)}."
                f"{did_you_mean(unknown[0], names) if unknown else ''}"
            )
        ordered = sorted(parts, key=names.index)
        if ordered != list(parts):
            raise ValueError(
                f"The flattened axis {name}={'*'.join(parts)} of the view {str(self)!r} has its "
                "axes in another order than the view, which no mesh can have: write "
                f"{name}={'*'.join(ordered)}."
            )
        return parts

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def axis_layouts(self) -> dict[str, AxisLayout]:
        """The layout of every axis over the ranks 0, 1, 2, ..., flattened ones last."""
        names = list(self.sizes)
        layout = Layout.from_shape(tuple(self.sizes.values()))
        layouts = dict(zip(names, layout, strict=True))
        for name, parts in self.flattened.items():
            layouts[name] = layout.select([names.index(part) for part in parts]).collapse()
        return layouts

    def __str__(self) -> str:
        axes = [f"{name}={size}" for name, size in self.sizes.items()]
        axes += [f"{name}={'*'.join(map(str, of))}" for name, of in self.flattened.items()]
        return ",".join(axes)


def whole_number(value: Any) -> int | None:
    """A whole number as an int; None of a bool, a float, or what is no number."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _check_name(name: Any) -> None:
    is_text = isinstance(name, str) and name.isprintable() and name == name.strip()
    if not (is_text and name) or any(mark in name for mark in ",=*"):
        raise ValueError(
            f"{name!r} is no name of an axis of a view: give printable text without any of ',=*' "
            "and without spaces around it."
        )


def read_view(text: str) -> View:
    """A view as it is written, such as "pp=8,dp=160,tp=8,loss=pp*dp".

    Raises:
        ValueError: an axis without a size, a size that is no int above 0, a name that is there
            twice, or a flattened axis of axes that the view has not, or in another order.
    """
    sizes: dict[str, int] = {}
    flattened: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(
                f"{part!r} in the view {text!r} is no axis: write each as name=size, such as "
                '"pp=2,dp=4,tp=8", or name=axis*axis for one that is flattened of others.'
            )
        if name in sizes or name in flattened:
            raise ValueError(
                f"The view {text!r} has the axis {name!r} twice: give it another name."
            )
        if re.fullmatch(r"[0-9]+", value):
            sizes[name] = int(value)
        elif re.fullmatch(r"[+-]?[0-9.]+", value):
            raise ValueError(
                f"{name}={value} in the view {text!r} is no size: give an int above 0."
            )
        else:
            flattened[name] = tuple(piece.strip() for piece in value.split("*"))
    return View(sizes, flattened)


def check_fits(view: View, world_size: int) -> None:
    """Check that a view covers a world.

    Raises:
        ValueError: it has more or fewer ranks; the error names the nearest views that fit. Or the
            world has no rank, or one of the two has more than `MOST_RANKS`.
    """
    if world_size < 1:
        raise ValueError(f"A world of {world_size} ranks: give an int above 0.")
    for what, size in ((f"The view {view}", view.size), ("The world", world_size)):
        if size > MOST_RANKS:
            raise ValueError(
                f"{what} has {size:,} ranks: a plan is of at most {MOST_RANKS:,}, because it "
                "takes memory for every rank."
            )
    if view.size == world_size:
        return
    near = nearest(view.sizes, world_size)
    hint = "; ".join(",".join(f"{name}={size}" for name, size in sizes.items()) for sizes in near)
    raise ValueError(
        f"The view {view} has {view.size:,} ranks, but the world has {world_size:,}: the sizes "
        f"must multiply out to it. The nearest that do: {hint}."
    )


def nearest(sizes: Mapping[str, int], world_size: int) -> list[dict[str, int]]:
    """Views with these axes that cover a world, with as few and as small changes as there can be.

    One size is changed if that suffices, else two. At most three views, the nearest first.
    """
    found: list[tuple[float, dict[str, int]]] = []
    for name in sizes:
        others = math.prod(size for other, size in sizes.items() if other != name)
        if world_size % others == 0:
            found.append(_changed(sizes, {name: world_size // others}))
    if not found:
        for first in sizes:
            for second in sizes:
                if first != second:
                    found += _two_changed(sizes, first, second, world_size)
    if not found:  # what is kept of the others does not divide the world
        ones = dict.fromkeys(sizes, 1)
        found = [_changed(sizes, {**ones, name: world_size}) for name in sizes]
    unique = {tuple(view.items()): (distance, view) for distance, view in found}
    return [view for _, view in sorted(unique.values(), key=lambda pair: pair[0])[:_N_NEAREST]]


def _two_changed(
    sizes: Mapping[str, int], first: str, second: str, world_size: int
) -> list[tuple[float, dict[str, int]]]:
    others = math.prod(size for name, size in sizes.items() if name not in (first, second))
    left, remainder = divmod(world_size, others)
    if remainder:
        return []
    divisors = [n for n in range(1, math.isqrt(left) + 1) if left % n == 0]
    divisors += [left // n for n in divisors]
    return [_changed(sizes, {first: n, second: left // n}) for n in divisors]


def _changed(sizes: Mapping[str, int], changes: Mapping[str, int]) -> tuple[float, dict[str, int]]:
    view = {**sizes, **changes}
    return sum(abs(math.log(view[name] / sizes[name])) for name in sizes), view


def trainer_views(parallelism: ParallelismSizes, world_size: int) -> list[View]:
    """The views that `meshverse.parallel.create_fsdp2_device_mesh` makes of these degrees.

    Args:
        parallelism: the degrees.
        world_size: number of ranks.

    Raises:
        ValueError: the degrees do not fit the ranks or each other.
    """
    return [
        View(dict(zip(spec.axes, spec.shape, strict=True)), dict(spec.flattened_axes))
        for spec in fsdp2_specs(parallelism, world_size)
    ]
