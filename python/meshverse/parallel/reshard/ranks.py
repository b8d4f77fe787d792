"""The process group of a `Reshard`, over which its ranks exchange descriptions and start runs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import meshverse
from meshverse import DeviceMesh, init_device_mesh
from meshverse._core import RankMap
from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.locks import state_lock

_Answer = TypeVar("_Answer")


class ReshardGroup:
    """Process group of one `Reshard` or one call of `redistribute`.

    Each `Reshard` has a group of its own, so its operations do not wait for a model's collectives.
    The ranks create and close the group together. With a connection, the connection's group and
    ranks are used instead, and closing leaves that group open.

    Args:
        function: name of the function that the user called, for messages.
        name: the user's `name=`, the same on all ranks.
        ranks: global ranks of the group; by default all ranks of the default group.
        timeout: timeout for creating the group and for each collective; by default the default
            group's.
        connection: connection between the worlds, if tensors are in several worlds; else None.

    Attributes:
        label: the function and the user's name, for messages.
        ranks: global ranks of the group, ascending; with a connection, ranks in the connection.
        rank: rank of this process, in the same numbering as `ranks`.
        world_size: number of ranks in the world or connection.
        connection: the connection, or None.
    """

    def __init__(
        self,
        function: str,
        name: str,
        ranks: Sequence[int] | None,
        timeout: timedelta | None,
        connection: meshverse.Connection | None = None,
    ) -> None:
        self.label = f"{function}(name={name!r})" if name else function
        self.connection, self._wrong = connection, ""
        self._mesh: DeviceMesh | None = None
        self._key: tuple[int, tuple[int, ...], str, int] | None = None
        if connection is None:
            self._create(function, name, ranks, timeout)
            return
        if not isinstance(connection, meshverse.Connection):
            raise TypeError(
                f"{function}(group={connection!r:.80}) of type {type(connection).__name__}: give "
                "the result of meshverse.connect(). Leave out group= within one world."
            )
        if ranks is not None or timeout is not None:
            raise ValueError(
                f"{function}(group=...): ranks and timeout are those of the connection. Leave out "
                "ranks= and timeout=."
            )
        self.rank, self.world_size = connection.rank, connection.size
        self.ranks = tuple(range(connection.size))
        _ = connection.group  # raises if the connection is closed

    def _create(
        self, function: str, name: str, ranks: Sequence[int] | None, timeout: timedelta | None
    ) -> None:
        if dist.get_backend() == "fake":
            raise RuntimeError(
                f"{function}: the backend 'fake' exchanges nothing between ranks. Use a real one."
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.ranks = _read_ranks(function, ranks, self.rank)
        is_timeout = isinstance(timeout, timedelta) and timeout > timedelta(0)
        self._wrong = "" if is_timeout or timeout is None else f"timeout={timeout!r}"
        # The lowest number that no open group with these ranks and this name has. As part of the
        # isolation tag, it keeps the new group apart from those. All ranks compute the same number,
        # because they open and close the same groups. A count of attempts could disagree, because
        # an attempt may fail on some ranks only.
        number = 0
        while self._key is None:
            key = self.rank, self.ranks, name, number
            known = _open.get(key)
            if known is not None and known.is_open():
                number += 1
                continue
            with state_lock.held:
                if _open.get(key) is known:  # else another thread has just opened one
                    self._key, _open[key] = key, self
        # "cpu" if the default group has a backend for it, else its first device type.
        types = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
        try:
            with outside_torch_modes():
                self._mesh = init_device_mesh(
                    "cpu" if "cpu" in types else types[0],
                    (len(self.ranks),),
                    mesh_dim_names=("reshard",),
                    ranks=list(self.ranks),
                    isolate=f"reshard {number} {name}".rstrip(),
                    timeout=timeout if is_timeout else None,
                    # A mismatch would be final, but a failed call can be repeated.
                    check_consistency=False,
                )
        except BaseException as error:
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"{self.label}: {in_words(self.ranks)} could not create their process group. All "
                f"these ranks must make this call; if other ranks make it, list them in ranks=. "
                f"{error}"
            ) from error

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Do not keep it: a reference to it keeps the default store open."""
        if self.connection is not None:
            return self.connection.group
        if self._mesh is None:
            raise RuntimeError(f"{self.label}: the process group was closed.")
        return self._mesh.get_group()

    def is_open(self) -> bool:
        """Whether the group can be used, or is being created."""
        if self.connection is not None:
            return self.connection.is_open
        if self._mesh is None:
            return self._key is not None and _open.get(self._key) is self
        try:
            return self._mesh.get_group() is not None
        except RuntimeError:
            return False

    def gather(self, describe: Callable[[], _Answer]) -> list[_Answer]:
        """Call a function on all ranks, and return all results; if one rank's call raises, all do.

        Raises:
            RuntimeError: the function raised on another rank, or another rank ended.
            Exception: the function raised it on this rank.
        """
        answer: Any = None
        error: Exception | None = None
        try:
            if self._wrong:
                raise ValueError(f"{self._wrong} must be a timedelta above 0, or None.")
            answer = describe()
        except Exception as caught:  # noqa: BLE001  (the other ranks wait for this rank's result)
            error = caught
        text = f"{type(error).__name__}: {error}" if error else ""
        answers: list[Any] = [None] * len(self.ranks)
        self._collective(dist.all_gather_object, answers, (answer, text))
        if error is not None:
            raise error
        errors = {rank: said for rank, (_, said) in zip(self.ranks, answers, strict=True) if said}
        if errors:
            first = min(errors)
            raise RuntimeError(
                f"{self.label}: {in_words(errors)} cannot take part. Rank {first}: {errors[first]}"
            )
        return [answer for answer, _ in answers]

    def share(
        self, own: Mapping[str, _Answer], digests: Sequence[Iterable[str]]
    ) -> dict[str, _Answer]:
        """Return the contents of all ranks, by digest.

        A content that some ranks lack is broadcast by the lowest rank that has it.

        Args:
            own: this rank's contents, by digest.
            digests: for each rank, the digests of the contents that it has.
        """
        found, owners = dict(own), defaultdict[str, list[int]](list)
        for rank, theirs in zip(self.ranks, digests, strict=True):
            for digest in theirs:
                owners[digest].append(rank)
        for digest, ranks in sorted(owners.items()):
            if len(ranks) < len(self.ranks):
                contents: list[Any] = [own.get(digest)]
                self._collective(dist.broadcast_object_list, contents, src=ranks[0])
                found[digest] = contents[0]
        return found

    def _collective(self, collective: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            with outside_torch_modes():  # real tensors, even if FakeTensorMode is active
                collective(*arguments, group=self.group, **named)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.label}: a rank ended or failed while the ranks exchanged descriptions of "
                f"their tensors: {error}"
            ) from error

    def find_reason(self, reason: str, device: torch.device) -> tuple[int, str]:
        """Return the highest rank that passes a reason not to run, with it; else (-1, "").

        All ranks call this; a rank that can run passes "". It takes one all-reduce of an integer,
        and a broadcast if any rank passes a reason.
        """
        with outside_torch_modes():
            highest = torch.tensor(self.rank if reason else -1, device=device)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
            rank = int(highest)
            reasons: list[Any] = [reason]
            if rank >= 0:
                dist.broadcast_object_list(reasons, src=rank, group=self.group)
        return rank, reasons[0]

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with exclusive use of the group; entering raises if it is in use.

        Only a connection's group can be in use already, by another `Reshard` of this process.
        """
        return contextlib.nullcontext() if self.connection is None else self.connection.in_use()

    def close(self) -> None:
        """Free the group, unless it is a connection's. A second call does nothing."""
        with state_lock.held:
            if self._key is not None and _open.get(self._key) is self:
                del _open[self._key]
        mesh, is_open, self._mesh = self._mesh, self.is_open(), None
        if mesh is not None and is_open:
            mesh.universe.destroy()


# Open groups by (this rank, ranks, name, number).
_open: dict[tuple[int, tuple[int, ...], str, int], ReshardGroup] = {}


def _read_ranks(function: str, ranks: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    given = list(range(dist.get_world_size()) if ranks is None else ranks)
    if not all(hasattr(each, "__index__") for each in given):
        raise ValueError(f"{function}(ranks={given!r:.80}): ranks must be ints, the global ranks.")
    if rank not in given:
        raise ValueError(
            f"{function}(ranks={given!r:.80}) is called by rank {rank}, which is not among them. "
            "Only these ranks may call it: skip the call on other ranks, or add them to ranks=."
        )
    return tuple(sorted(given))


def in_words(ranks: Iterable[int]) -> str:
    """Return the words for some ranks: "rank 3", "ranks 0 to 7" or "ranks 0, 2, 4"."""
    return str(RankMap.from_ranks(sorted(ranks)))
