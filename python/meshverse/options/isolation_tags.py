"""Isolation tags, which keep process groups from being shared.

Collectives on one communicator run one after the other. Meshes that are created inside
`with isolate(tag):` share process groups only with meshes under the same tag, so that their
collectives can overlap with those of meshes under other tags.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar

# Each thread and asynchronous task has its own value. A new thread starts without a tag. (From
# Python 3.14 on, a program can choose that threads inherit the context of the thread that starts
# them.)
_tag: ContextVar[str] = ContextVar("meshverse_isolation_tag", default="")

# In options keys, after the tag, of a group whose ranks are in the order of the mesh.
IN_MESH_ORDER = "in the order of the mesh"

# Returns the tags of the `isolate` blocks around this code, joined, outermost first; "" outside of
# any block. Not wrapped in a Python function, which would slow down every slice of a mesh.
current_tag = _tag.get


@contextlib.contextmanager
def isolate(tag: str) -> Iterator[None]:
    """Give the meshes of this block process groups that are shared only under the same tag.

    This holds for each mesh that is created, sliced, flattened, unflattened or concatenated in the
    block; `explain()` shows the tag. A mesh never equals a mesh under another tag or none, so
    DTensor, torch.compile and other code that compares meshes by value keep them separate. Meshes
    derived from a tagged mesh keep its tag, also outside of the block.

    The block applies to its own thread or asynchronous task. The tags of nested blocks are joined:
    `isolate("a")` around `isolate("b")` is `isolate("a/b")`. All ranks of the groups must use the
    same tags. Code that torch.compile traces is not isolated: create the meshes before. If a
    generator yields inside the block, the block also applies to the generator's caller until the
    generator resumes.

    Args:
        tag: nonempty string of printable characters without "; ".

    Raises:
        TypeError: the tag is not a string.
        ValueError: the tag is empty, or has other characters.

    Example:
        >>> with isolate("overlap"):  # doctest: +SKIP
        ...     own = mesh["dp"]
        >>> own.get_group() is mesh.get_group("dp"), own == mesh["dp"]  # doctest: +SKIP
        (False, False)
    """
    before, token = current_tag(), None
    try:
        token = _tag.set(join_tags(before, check_tag(tag)))
        yield
    finally:
        if token is None:  # a signal handler has raised, perhaps after the tag was set
            _tag.set(before)
        else:
            _tag.reset(token)


def check_tag(tag: str) -> str:
    """Return a tag as a plain string, after checking it.

    Raises:
        TypeError: the tag is not a string.
        ValueError: the tag is empty, has characters that are not printable, contains "; ", or is
            `IN_MESH_ORDER`.
    """
    if not isinstance(tag, str):
        raise TypeError(
            f"Isolation tag {tag!r} of type {type(tag).__name__}: a tag is a string, such as "
            "'overlap'."
        )
    if not tag or not tag.isprintable() or "; " in tag or tag == IN_MESH_ORDER:
        raise ValueError(
            f"Isolation tag {tag!r}: a tag has at least one character, printable ones only, no "
            f"'; ', and is not {IN_MESH_ORDER!r}. Leave `isolate` out to share groups."
        )
    return str.__str__(tag)  # a member of `class Tag(str, Enum)` would be joined as "Tag.A"


def normalize_tags(
    isolate: str | Mapping[int | str, str] | None,
    axis_names: Sequence[str] | None,
    ndim: int,
    inside: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the isolation tag of every axis, in axis order; empty if no axis has one.

    A tag can consist of three parts: the tag of the axis that this one is derived from, that of the
    `isolate` blocks around the call, and that of the call's `isolate=`.

    Args:
        isolate: `isolate=` of the call: one tag for all axes, tags by axis index or name, or None.
        axis_names: names of the axes, if they have any.
        ndim: number of axes.
        inside: tags of the axes that the new ones are derived from, one per new axis; empty if they
            have none.

    Raises:
        RuntimeError: a key is not an axis, or an axis has two keys, its index and its name.
        TypeError, ValueError: a value is not a tag.
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
    from .by_axis import by_axis  # not loaded by `import meshverse`

    tags = by_axis(isolate, axis_names, ndim, argument="isolate")
    return tuple(
        tag_inside(block, tag) if own is None else own_tag(tag, block, check_tag(own))
        for tag, own in zip(before, tags, strict=True)
    )


def tag_inside(block: str, tag: str) -> str:
    """Return the tag that a mesh's axis gets in an `isolate` block.

    The block's tag is put before the axis's tag, unless that begins with it already.

    Args:
        block: tag of the block; "" outside of any.
        tag: tag that the axis has without the block; "" for none.

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
    """Return the tag of an axis that is derived with `isolate=own`, possibly in an `isolate` block.

    `own` is put after the tag that the axis gets in the block, unless the axis has it already.

    Args:
        tag: tag of the axis that it is derived from; "" for none.
        block: tag of the block; "" outside of any.
        own: `isolate=` of the call.

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
    """Return the joined tag of two nested blocks; "" stands for no tag."""
    return f"{outer}/{inner}" if outer and inner else outer or inner


# Separates the tags that a flattened axis has from several axes. A user's tag never contains "; ".
_AND = "; and "


def merge_tags(tags: Iterable[str]) -> str:
    """Return the tag of an axis that combines axes with these tags: each tag once, sorted.

    >>> merge_tags(["b", "", "a", "b"]), merge_tags(["", ""])
    ('a; and b', '')
    """
    return _AND.join(sorted({part for tag in tags for part in tag_parts(tag)} - {""}))


def tag_parts(tag: str) -> list[str]:
    """Return the tags that `merge_tags` merged into one.

    >>> tag_parts("a; and b"), tag_parts("")
    (['a', 'b'], [''])
    """
    return tag.split(_AND)
