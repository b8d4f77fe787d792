"""Views of a world: their syntax, their axes, and the check that they cover the world.

A view is written as its axes in order: "pp=8,dp=160,cp=1,tp=8". A flattened axis names the axes
that it combines: "loss=dp*cp".
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshverse._core import AxisLayout, Layout
from meshverse.parallel.meshes.degrees import ParallelismSizes, fsdp2_specs
from meshverse.wording import counted, did_you_mean

MOST_RANKS = 2**24
"""Largest world that can be planned. Planning takes memory per rank: some GiB for this world."""

_N_NEAREST = 3


@dataclass(frozen=True)
class View:
    """One way to split the world.

    Attributes:
        sizes: sizes of the axes by name; the last axis varies fastest.
        flattened: by name of a flattened axis, the axes that it combines.

    Raises:
        TypeError: `sizes` or `flattened` is not a mapping.
        ValueError: no mesh can have this view: it has no axis; a name is repeated, or the syntax of
            views cannot express it; a size is not an int above 0; or a flattened axis combines no
            axes, unknown axes, or axes in another order than the view's.
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
        # Copies: later changes by the caller do not change the view.
        sizes = {name: self._size(name, size) for name, size in self.sizes.items()}
        flattened = {name: self._parts(name, parts) for name, parts in self.flattened.items()}
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "flattened", flattened)

    def _size(self, name: str, size: Any) -> int:
        number = whole_number(size)
        if number == -1:
            raise ValueError(
                f"{name}=-1 in the view {str(self)!r} needs the number of ranks: give world_size= "
                "(--world-size). At most one axis can have size -1: it gets the ranks that the "
                "other axes leave."
            )
        if number is None or number < 1:
            raise ValueError(
                f"{name}={size} in the view {str(self)!r} is not a size: give an int above 0."
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
            what = f"there is no axis {unknown[0]!r}" if unknown else "it has one axis twice"
            raise ValueError(
                f"The flattened axis {name}={'*'.join(map(str, parts))} of the view {str(self)!r}: "
                f"{what if parts else 'it combines no axes'}. The axes are {', '.join(names)}."
                f"{did_you_mean(unknown[0], names) if unknown else ''}"
            )
        ordered = sorted(parts, key=names.index)
        if ordered != list(parts):
            raise ValueError(
                f"The flattened axis {name}={'*'.join(parts)} has its axes in another order than "
                f"the view {str(self)!r}, which no mesh can have: write {name}={'*'.join(ordered)}."
            )
        return parts

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    def axis_layouts(self) -> dict[str, AxisLayout]:
        """Return the layout of every axis over the ranks 0, 1, 2, ..., flattened ones last."""
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
    """Return an integer of any type as an int; None for a bool, a float or another object."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _check_name(name: Any) -> None:
    is_text = isinstance(name, str) and name.isprintable() and name == name.strip()
    if not (is_text and name) or any(mark in name for mark in ",=*"):
        raise ValueError(
            f"{name!r} cannot name an axis of a view: give printable text without any of ',=*' "
            "and without spaces around it."
        )


def as_view(given: View | Mapping[str, int] | str, world_size: int | None) -> View:
    """Return a view from a string or from sizes by name; an axis of size -1 gets the other ranks.

    Args:
        given: a view, a mapping, or a string such as "pp=8,dp=160,tp=8,loss=pp*dp".
        world_size: number of ranks, if it is known.

    Raises:
        ValueError: an axis has no size, a size is not an int above 0, a name is repeated, or a
            flattened axis combines unknown axes or has them in another order than the view.
        TypeError: `given` is something else.
    """
    if isinstance(given, View):
        return given
    if isinstance(given, str):
        sizes, flattened = _read(given)
    elif isinstance(given, Mapping):
        sizes, flattened = dict(given), {}
    else:
        raise TypeError(
            f"{given!r} is not a view: give a string such as 'dp=4,tp=8', sizes by name, or a View."
        )
    numbers = {name: whole_number(size) for name, size in sizes.items()}
    if world_size is not None and list(numbers.values()).count(-1) == 1:
        name = next(name for name, size in numbers.items() if size == -1)
        others = -math.prod(size or 1 for size in numbers.values())
        sizes[name] = max(world_size // others, 1) if others > 0 else 1
    return View(sizes, flattened)


def _read(text: str) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    sizes: dict[str, int] = {}
    flattened: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not (name and equals and value):
            raise ValueError(
                f"{part!r} in the view {text!r} is not an axis: write each as name=size, such as "
                '"pp=2,dp=4,tp=8", or name=axis*axis for a flattened axis.'
            )
        if "=" in value:
            raise ValueError(
                f"{part!r} in the view {text!r} has several axes: write commas between them, such "
                f'as "{",".join(part.split())}".'
            )
        if name in sizes or name in flattened:
            raise ValueError(
                f"The view {text!r} has the axis {name!r} twice: give it another name."
            )
        if re.fullmatch(r"[0-9]+|-1", value):
            sizes[name] = int(value)
        elif re.fullmatch(r"[+-]?[0-9.]+", value):
            raise ValueError(
                f"{name}={value} in the view {text!r} is not a size: give an int above 0."
            )
        else:
            flattened[name] = tuple(piece.strip() for piece in value.split("*"))
    return sizes, flattened


def check_fits(view: View, world_size: int) -> None:
    """Check that a view covers a world.

    Raises:
        ValueError: the view has more or fewer ranks than the world (the error names the nearest
            views that fit), the world has no rank, or one of them has more than `MOST_RANKS`.
    """
    if world_size < 1:
        raise ValueError(f"A world of {world_size} ranks: give an int above 0.")
    for what, size in ((f"The view {view}", view.size), ("The world", world_size)):
        if size > MOST_RANKS:
            raise ValueError(
                f"{what} has {size:,} ranks: a plan can have at most {MOST_RANKS:,}, because it "
                "takes memory for every rank."
            )
    if view.size == world_size:
        return
    near = nearest(view.sizes, world_size)
    hint = "; ".join(",".join(f"{name}={size}" for name, size in sizes.items()) for sizes in near)
    raise ValueError(
        f"The view {view} has {counted(view.size, 'rank')}, but the world has {world_size:,}: the "
        f"product of the sizes must be equal to it. The nearest sizes that fit: {hint}."
    )


def nearest(sizes: Mapping[str, int], world_size: int) -> list[dict[str, int]]:
    """Return at most three views with these axes that cover the world, the nearest first.

    One size is changed if that is enough, else two, else all.
    """

    def left_for(*changed: str) -> int:
        """Return the ranks that the other axes leave; 0 if they do not divide the world."""
        others = math.prod(size for name, size in sizes.items() if name not in changed)
        return 0 if world_size % others else world_size // others

    found = [{**sizes, name: left} for name in sizes if (left := left_for(name))]
    if not found:
        for first, second in itertools.combinations(sizes, 2):
            if left := left_for(first, second):
                small = [n for n in range(1, math.isqrt(left) + 1) if left % n == 0]
                divisors = (*small, *(left // n for n in small))
                found += [{**sizes, first: n, second: left // n} for n in divisors]
    if not found:  # no size can be kept
        found = [{**dict.fromkeys(sizes, 1), name: world_size} for name in sizes]
    unique = {tuple(view.items()): view for view in found}.values()

    def distance(view: Mapping[str, int]) -> float:
        return sum(abs(math.log(view[name] / sizes[name])) for name in sizes)

    return sorted(unique, key=distance)[:_N_NEAREST]


def trainer_views(parallelism: ParallelismSizes, world_size: int) -> list[View]:
    """Return the views of the meshes that `create_fsdp2_device_mesh` creates for these degrees.

    Args:
        parallelism: parallelism degrees.
        world_size: number of ranks.

    Raises:
        ValueError: the degrees do not fit the number of ranks or each other.
    """
    return [
        View(dict(zip(spec.axes, spec.shape, strict=True)), dict(spec.flattened_axes))
        for spec in fsdp2_specs(parallelism, world_size)
    ]
