"""The views of a world: what they are called, how they are split, and whether they fit.

A view is written as its axes in order: "pp=8,dp=160,cp=1,tp=8". An axis that is flattened of others
names them: "loss=dp*cp".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshverse._core import AxisLayout, Layout
from meshverse.layouts.user_input import check_axis_names
from meshverse.parallel.meshes.create import fsdp2_specs
from meshverse.parallel.meshes.degrees import ParallelismSizes

__all__ = ["View", "check_fits", "read_view", "trainer_views"]

_N_NEAREST = 3


@dataclass(frozen=True)
class View:
    """One way to split the world.

    Attributes:
        sizes: of the axes, by name, the rightmost varying fastest.
        flattened: by name, the axes that a flattened axis combines.
    """

    sizes: Mapping[str, int]
    flattened: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

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
        return ",".join([*axes, *(f"{name}={'*'.join(of)}" for name, of in self.flattened.items())])


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
            sizes[name] = _positive(name, int(value), text)
        elif re.fullmatch(r"[+-]?[0-9.]+", value):
            raise ValueError(
                f"{name}={value} in the view {text!r} is no size: give an int above 0."
            )
        else:
            flattened[name] = tuple(piece.strip() for piece in value.split("*"))
    view = View(sizes, flattened)
    _check(view, text)
    return view


def _positive(name: str, size: int, text: str) -> int:
    if size < 1:
        raise ValueError(f"{name}={size} in the view {text!r} is no size: give an int above 0.")
    return size


def _check(view: View, text: str) -> None:
    if not view.sizes:
        raise ValueError(f"The view {text!r} has no axis with a size, such as dp=8.")
    check_axis_names(tuple(view.sizes), len(view.sizes))
    names = list(view.sizes)
    for name, parts in view.flattened.items():
        unknown = [part for part in parts if part not in names]
        if unknown or len(set(parts)) < len(parts):
            what = f"no axis {unknown[0]!r}" if unknown else "it names one of them twice"
            raise ValueError(
                f"The flattened axis {name}={'*'.join(parts)} of the view {text!r}: {what}. The "
                f"axes are {', '.join(names)}."
            )
        if sorted(parts, key=names.index) != list(parts):
            ordered = "*".join(sorted(parts, key=names.index))
            raise ValueError(
                f"The flattened axis {name}={'*'.join(parts)} of the view {text!r} has its axes in "
                f"another order than the view, which no mesh can have: write {name}={ordered}."
            )


def check_fits(view: View, world_size: int) -> None:
    """Check that a view covers a world.

    Raises:
        ValueError: it has more or fewer ranks. The error names the nearest views that fit.
    """
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
