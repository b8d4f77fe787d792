"""Process groups of one's own: a tag that keeps groups from being shared.

Two users of one communicator queue behind each other. `with isolate(tag):` around any mesh
operation gives what is made inside groups that are shared only under the same tag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

from .by_axis import by_axis

# Each thread and asynchronous task has its own value. A new thread starts without a tag. (From
# Python 3.14 on, a program can ask for threads that start with their maker's context.)
_tag: ContextVar[str] = ContextVar("meshverse_isolation_tag", default="")

# The tag of the `isolate` blocks around this code, outermost first; "" outside of any. It is the C
# method itself, and not a Python function that calls it, because every slice of a mesh calls it.
current_tag = _tag.get


@contextlib.contextmanager
def isolate(tag: str) -> Iterator[None]:
    """Create separate process groups for the mesh operations inside the block.

    Meshes made inside (created, sliced, flattened, unflattened or concatenated) are on groups that
    are shared under the same tag only; `explain()` shows the tag. The tag is part of what a mesh
    is: it equals no mesh under another tag or none, so that DTensor, torch.compile and whatever
    else keeps meshes by value never take one for the other. What derives from such a mesh stays
    under its tag, also outside of the block.

    In force for this thread or asynchronous task. Nested blocks add up: `isolate("a")` around
    `isolate("b")` is `isolate("a/b")`. All ranks of the groups must use the same tags. Code that
    torch.compile traces is not isolated: make the meshes before. A block around the `yield` of a
    generator is in force for the generator's caller too, until the generator goes on.

    Args:
        tag: any text of printable characters without "; ".

    Raises:
        TypeError: the tag is no string.
        ValueError: it is empty or has characters it may not have.

    Example:
        >>> with isolate("reduce_scatter"):  # doctest: +SKIP
        ...     own = mesh["dp"]
        >>> own.get_group() is mesh.get_group("dp"), own == mesh["dp"]  # doctest: +SKIP
        (False, False)
    """
    token = _tag.set(join_tags(current_tag(), check_tag(tag)))
    try:
        yield
    finally:
        _tag.reset(token)


def check_tag(tag: str) -> str:
    """Return the tag, if it is one.

    Raises:
        TypeError: it is no string.
        ValueError: it is empty or has characters it may not have.
    """
    if not isinstance(tag, str):
        raise TypeError(
            f"Isolation tag {tag!r} of type {type(tag).__name__}: a tag is a string, such as "
            "'reduce_scatter'."
        )
    if not tag or not tag.isprintable() or "; " in tag:
        raise ValueError(
            f"Isolation tag {tag!r}: a tag has at least one character, printable ones only, and no "
            "'; '. Leave `isolate` out to share groups."
        )
    return tag


def normalize_tags(
    isolate: str | Mapping[int | str, str] | None,
    axis_names: Sequence[str] | None,
    ndim: int,
    inside: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the isolation tag of every axis, in axis order; empty if no axis has one.

    A tag is made of up to three parts: that of the axis it is derived from, that of the `isolate`
    blocks around the call, and what the call gives as `isolate=`.

    Args:
        isolate: one tag for all axes, or tags by axis index or name, or None.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.
        inside: the tags of the axes they are derived from, one per new axis; empty for none.

    Raises:
        RuntimeError: a key is no axis, or an axis is named twice, by index and by name.
        TypeError, ValueError: a value is no tag.
    """
    block = current_tag()
    if isolate is None and not block:
        return tuple(inside) if any(inside) else ()
    before = inside or ("",) * ndim
    if isolate is None:
        return tuple([tag_inside(block, tag) for tag in before])
    if isinstance(isolate, str):
        return tuple(own_tag(tag, block, check_tag(isolate)) for tag in before)
    if not isinstance(isolate, Mapping):
        raise TypeError(
            f"isolate={isolate!r} of type {type(isolate).__name__}: give one tag for all axes, or "
            "a mapping from axis name or index to a tag."
        )
    tags = by_axis(isolate, axis_names, ndim, argument="isolate")
    return tuple(
        tag_inside(block, tag) if own is None else own_tag(tag, block, check_tag(own))
        for tag, own in zip(before, tags, strict=True)
    )


def tag_inside(block: str, tag: str) -> str:
    """Return the tag that an axis gets inside an `isolate` block.

    The block's tag goes in front of the axis's tag, unless it is there already.

    Args:
        block: the block's tag; "" outside of any.
        tag: the axis's tag before; "" for none.

    >>> tag_inside("a", "a/b"), tag_inside("a", "b"), tag_inside("a", ""), tag_inside("", "b")
    ('a/b', 'a/b', 'a', 'b')
    """
    if not block:
        return tag
    parts = tag_parts(tag)
    return merge_tags(
        part if f"{part}/".startswith(f"{block}/") else join_tags(block, part) for part in parts
    )


def own_tag(tag: str, block: str, own: str) -> str:
    """Return the tag of an axis that is derived with `isolate=own`, maybe in an `isolate` block.

    The new tag is added to the axis's tag inside the block, unless the axis has it already.

    Args:
        tag: of the axis it is derived from; "" for none.
        block: the block's tag; "" outside of any.
        own: what the call gives as `isolate=`.

    >>> own_tag("a", "", "b"), own_tag("", "a", "b"), own_tag("a/b", "", "b")
    ('a/b', 'a/b', 'a/b')
    >>> own_tag("b", "a", "b"), own_tag("c", "a", "b")
    ('a/b', 'a/c/b')
    """
    return merge_tags(
        tag_inside(block, part)
        if f"/{own}/" in f"/{part}/"
        else join_tags(tag_inside(block, part), own)
        for part in tag_parts(tag)
    )


def join_tags(outer: str, inner: str) -> str:
    """Return the tag of a block inside a block; "" stands for no tag."""
    return f"{outer}/{inner}" if outer and inner else outer or inner


# Between the tags that a flattened axis has from several axes. No tag of a user has a "; ".
_AND = "; and "


def merge_tags(tags: Iterable[str]) -> str:
    """Return the tag of an axis that is made of axes with these tags: each tag once, sorted.

    >>> merge_tags(["b", "", "a", "b"]), merge_tags(["", ""])
    ('a; and b', '')
    """
    return _AND.join(sorted({part for tag in tags for part in tag_parts(tag)} - {""}))


def tag_parts(tag: str) -> list[str]:
    """Return the tags that were merged into one.

    >>> tag_parts("a; and b"), tag_parts("")
    (['a', 'b'], [''])
    """
    return tag.split(_AND)
