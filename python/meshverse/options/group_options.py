"""What one process group shall be: every default filled in, and the key it is shared by."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

from meshverse import _torch_compat as compat
from meshverse._core import OptionsKey

from .copies import copy_of
from .overrides import NO_OVERRIDE, Override

__all__ = ["Defaults", "GroupOptions"]


@dataclass(frozen=True)
class Defaults:
    """What a universe's groups inherit where an axis says nothing else.

    Attributes:
        timeout: of the groups' operations; None for that of the default group.
        options: options object for the groups of its backend; None for the backend's defaults.
    """

    timeout: timedelta | None = None
    options: compat.BackendOptions | None = None

    @classmethod
    def of(cls, timeout: timedelta | None, options: compat.BackendOptions | None) -> Defaults:
        """A snapshot of what a user gives: later changes of the options do not reach it.

        `NO_DEFAULTS` if that is nothing: groups are as the default group.

        Raises:
            TypeError: the timeout is no timedelta, or the options are no options object.
            ValueError: the timeout is not positive.
        """
        if timeout is None and options is None:
            return NO_DEFAULTS
        if timeout is not None:
            check_timeout(timeout)
        if options is not None and not compat.is_backend_options(options):
            raise TypeError(
                f"options={options!r} of type {type(options).__name__}: give an options object of "
                "the default group's backend, such as ProcessGroupNCCL.Options()."
            )
        return cls(timeout, copy_of(options))

    def or_else(self, others: Defaults) -> Defaults:
        """These, and where they say nothing, others."""
        if self is NO_DEFAULTS:
            return others
        timeout = others.timeout if self.timeout is None else self.timeout
        return Defaults(timeout, others.options if self.options is None else self.options)


NO_DEFAULTS = Defaults()


def check_timeout(timeout: timedelta) -> None:
    """Raise TypeError for what is no timedelta, ValueError for one that is not positive."""
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"timeout={timeout!r} of type {type(timeout).__name__}: give a datetime.timedelta, "
            "such as timedelta(minutes=5)."
        )
    if timeout <= timedelta(0):
        raise ValueError(f"timeout={timeout}: a timeout is longer than zero.")


@dataclass(frozen=True)
class GroupOptions:
    """What one process group shall be: an override with every default filled in.

    Attributes:
        backend: backend string of the group.
        backend_options: a snapshot of the options object, or None for the backend's defaults.
        timeout: of the group's operations; None where unknown.
        key: equal for equal backend, options, timeout and tag.
        name_key: the key less the timeout, which c10d lets every rank choose by itself; so it may
            not be in the name that all members have to agree on.
        override: what was asked for, as the user wrote it.
        says_timeout: whether the timeout was asked for here, and not taken from the default group.
        tag: the isolation tag it is shared under; "" for none.
        keeps_order: whether the ranks follow the order of the mesh, not ascending.
    """

    backend: str
    backend_options: compat.BackendOptions | None
    timeout: timedelta | None
    key: OptionsKey
    name_key: OptionsKey
    override: Override
    says_timeout: bool = False
    tag: str = ""
    keeps_order: bool = False

    @cached_property
    def digest(self) -> str:
        """Of the key."""
        return self.key.digest

    @cached_property
    def name_digest(self) -> str:
        """Of the key of the group's name."""
        return self.name_key.digest

    @classmethod
    def resolve(
        cls,
        override: Override,
        default_group: compat.ProcessGroup,
        defaults: Defaults = NO_DEFAULTS,
    ) -> GroupOptions:
        """Fill in what is not overridden: backend, options and timeout.

        The backend is the default group's. The universe's options are for groups of that backend.
        The timeout is that of the axis's own options, if they say one; else the universe's; else
        that of its options; else the default group's.
        """
        wanted, own = override
        usual = compat.canonical_backend(compat.default_backend(default_group))
        backend = compat.canonical_backend(wanted or usual)
        options = own if own is not None or backend != usual else defaults.options
        said_timeout = compat.said_timeout(own) or defaults.timeout or compat.said_timeout(options)
        timeout = said_timeout or compat.default_timeout(backend, default_group)
        # A split of the default group inherits its options where none are given.
        said = options
        if options is None and compat.can_split(default_group, backend):
            said = compat.split_options(default_group)
        ignored = compat.IGNORED_OPTION_FIELDS
        key = OptionsKey.of(backend, said, timeout=timeout, ignored=ignored)
        name_key = OptionsKey.of(backend, said, ignored=ignored)
        mine, says_timeout = copy_of(options), said_timeout is not None
        return cls(backend, mine, timeout, key, name_key, override, says_timeout)

    @classmethod
    def given(cls, group: compat.ProcessGroup) -> GroupOptions:
        """What is known of a group that the user made: its backend."""
        backend = compat.default_backend(group)
        key = OptionsKey.of(backend)
        return cls(backend, None, None, key, key, NO_OVERRIDE)

    def in_words(self) -> str:
        """All of it, for messages: "'gloo', timeout=1800s"."""
        return str(self.key).removeprefix("OptionsKey(").removesuffix(")")

    def with_tag(self, tag: str) -> GroupOptions:
        """The same options for a group of its own, shared only under the same tag; "" for none."""
        return self if tag == self.tag else self._apart(tag, self.keeps_order)

    def in_mesh_order(self) -> GroupOptions:
        """The same options for a group whose ranks follow the order of the mesh, not ascending."""
        return self._apart(self.tag, keeps_order=True)

    def _apart(self, tag: str, keeps_order: bool) -> GroupOptions:
        # What keeps groups apart beside their options is one text in the key.
        text = "; ".join(filter(None, (tag, "in the order of the mesh" if keeps_order else "")))
        key, name_key = self.key.with_tag(text), self.name_key.with_tag(text)
        return replace(self, key=key, name_key=name_key, tag=tag, keeps_order=keeps_order)

    def options_for_split(self, default_group: compat.ProcessGroup) -> compat.BackendOptions | None:
        """The options to give c10d for a split of the default group.

        Without options, c10d takes the default group's own object and writes to it. So a split gets
        a copy of that object then.
        """
        mine = self.backend_options_for_c10d()
        return copy_of(compat.split_options(default_group)) if mine is None else mine

    def backend_options_for_c10d(self) -> compat.BackendOptions | None:
        """A copy of the options to give c10d, which keeps the object and writes to it.

        c10d takes the timeout as an argument too, and warns if the object has another one. So the
        copy gets this timeout.
        """
        if self.backend_options is None:
            return None
        mine: Any = copy_of(self.backend_options)
        is_mine = mine is not self.backend_options  # not everything can be copied
        if is_mine and self.timeout is not None and compat.is_backend_options(mine):
            mine._timeout = self.timeout
        return mine
