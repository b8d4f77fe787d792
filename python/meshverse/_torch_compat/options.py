"""Options objects of c10d's backends: their class, their timeouts, and new objects like them."""

from __future__ import annotations

from datetime import timedelta
from types import FunctionType
from typing import Any

from meshverse._core import fresh_like

from .private_names import BackendOptions, c10d_core

# Fields of options objects that c10d itself sets for each group (`split_*` on NCCL's options), or
# that an options key already contains separately (`_timeout`, `backend`). 2.11-2.15.
IGNORED_OPTION_FIELDS = frozenset(
    {
        "_timeout",
        "backend",
        "global_ranks_in_group",
        "group_name",
        "split_color",
        "split_from",
    }
)
_NOT_CPP = (FunctionType, type(None))  # types of an `__init__` in Python, and of a missing one


def is_backend_options(value: object) -> bool:
    """Whether the value is an options object of c10d, such as `ProcessGroupNCCL.Options`."""
    return isinstance(value, c10d_core.Backend.Options)


def options_timeout(options: BackendOptions | None) -> timedelta | None:
    """Return the timeout of an options object, or None if it has none."""
    return getattr(options, "_timeout", None)


def set_timeout(options: BackendOptions, timeout: timedelta) -> None:
    """Set the timeout of an options object of c10d; leave other objects as they are."""
    if is_backend_options(options):
        options._timeout = timeout


def options_of(backend: Any) -> BackendOptions | None:
    """Return the options that a backend was created with; None if it does not keep them.

    MPI, UCC and C++ backends without `getBackendOptions` keep none: the attribute is missing, or
    raises RuntimeError behind c10d's debug wrapper. 2.11-2.15.
    """
    try:
        return backend.options
    except (AttributeError, RuntimeError):
        return None


def said_timeout(options: BackendOptions | None) -> timedelta | None:
    """Return the timeout that the user set on an options object; None if it is the default."""
    timeout = options_timeout(options)
    if options is None or timeout == options_timeout(fresh_like(options)):
        return None
    return timeout


def new_like(value: Any) -> Any | None:
    """Return a new object of the same type, without running its Python constructor.

    So it has no Python attributes. None if its C++ base class cannot be constructed: this calls it
    without arguments and, for c10d's options, with a backend and a timeout. 2.11-2.15.
    """
    kind = type(value)
    base: Any = next(
        base for base in kind.__mro__ if not isinstance(vars(base).get("__init__"), _NOT_CPP)
    )
    arguments: list[tuple[Any, ...]] = [()]
    if is_backend_options(value):
        arguments.append((value.backend, value._timeout))
    for given in arguments:
        try:
            new = base.__new__(kind)
            base.__init__(new, *given)
        except TypeError:
            continue
        return new
    return None
