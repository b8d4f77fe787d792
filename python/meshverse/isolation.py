"""Process groups of one's own: a tag that keeps groups from being shared.

Two users of one communicator queue behind each other. `with isolate(tag):` around any mesh
operation gives what is made inside groups that are shared only under the same tag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["check_tag", "current_tag", "isolate", "join_tags", "tag_inside"]

# Of each thread and asynchronous task its own: contexts are not handed to new threads (before
# Python 3.14, and there only where asked for).
_tag: ContextVar[str] = ContextVar("meshverse_isolation_tag", default="")

# The tag of the `isolate` blocks around this code, outermost first; "" outside of any. Not a
# function in Python: slicing a mesh asks each time.
current_tag = _tag.get


@contextlib.contextmanager
def isolate(tag: str) -> Iterator[None]:
    """Process groups of their own for the mesh operations inside the block.

    Meshes made inside (created, sliced, flattened, unflattened or concatenated) are on groups that
    are shared under the same tag only; `explain()` shows the tag. Meshes equal by value stay equal,
    whatever groups they are on. In force for this thread or asynchronous task. Nested blocks add
    up: `isolate("a")` around `isolate("b")` is `isolate("a/b")`. All ranks of the groups must use
    the same tags. Code that torch.compile traces is not isolated: make the meshes before.

    Args:
        tag: any text of printable characters without "; ".

    Raises:
        TypeError: the tag is no string.
        ValueError: it is empty or has characters it may not have.

    Example:
        >>> with isolate("reduce_scatter"):  # doctest: +SKIP
        ...     own = mesh["dp"]
        >>> own.get_group() is mesh.get_group("dp")  # doctest: +SKIP
        False
    """
    token = _tag.set(join_tags(current_tag(), check_tag(tag)))
    try:
        yield
    finally:
        _tag.reset(token)


def check_tag(tag: str) -> str:
    """The tag, if it is one.

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


def tag_inside(block: str, tag: str) -> str:
    """The tag of a group that has this one, for use inside a block: its own if it is of the block.

    >>> tag_inside("a", "a/b"), tag_inside("a", "b"), tag_inside("a", "")
    ('a/b', 'a/b', 'a')
    """
    return tag if f"{tag}/".startswith(f"{block}/") else join_tags(block, tag)


def join_tags(outer: str, inner: str) -> str:
    """The tag of a block inside a block; "" stands for no tag."""
    return f"{outer}/{inner}" if outer and inner else outer or inner
