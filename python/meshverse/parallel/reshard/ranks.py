"""The process group of one move, in which its ranks exchange what they have and begin each run."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshverse import Connection, DeviceMesh, init_device_mesh
from meshverse import _torch_compat as compat
from meshverse._core import RankMap

_Answer = TypeVar("_Answer")


class MoveGroup:
    """A process group of one move's own, so that it never queues behind other collectives.

    All of its ranks create it together, and all of them close it. Over a connection, it is the
    connection's, which stays, and ranks are those of the connection.

    Args:
        function: what the user called, for messages.
        name: of the move. All ranks give the same.
        ranks: global ranks of the group; by default all ranks of the default group.
        timeout: of group creation and of every collective; by default that of the default group.
        connection: whose processes move tensors, if these are in several worlds.

    Attributes:
        label: the function and the name.
        ranks: global ranks, ascending.
        rank: this process's global rank.
        world_size: number of ranks that a mesh could have.
        connection: see above.
    """

    def __init__(
        self,
        function: str,
        name: str,
        ranks: Sequence[int] | None,
        timeout: timedelta | None,
        connection: Connection | None = None,
    ) -> None:
        self.label = f"{function}(name={name!r})" if name else function
        self.connection, self._wrong = connection, ""
        self._mesh: DeviceMesh | None = None
        self._key: tuple[int, tuple[int, ...], str, int] | None = None
        if connection is None:
            self._create(function, name, ranks, timeout)
            return
        if not isinstance(connection, Connection):
            raise TypeError(
                f"{function}(group={connection!r:.80}) of type {type(connection).__name__}: give "
                "what meshverse.connect() returns. Moves in one world make a group of their own."
            )
        if ranks is not None or timeout is not None:
            raise ValueError(
                f"{function}(group=...): ranks and timeout are those of the connection. Leave out "
                "ranks= and timeout=."
            )
        self.rank, self.world_size = connection.rank, connection.size
        self.ranks = tuple(range(connection.size))
        _ = connection.group  # raises if it is closed

    def _create(
        self, function: str, name: str, ranks: Sequence[int] | None, timeout: timedelta | None
    ) -> None:
        if dist.get_backend() == "fake":
            raise RuntimeError(
                f"{function}: the backend 'fake' exchanges nothing between ranks. Use another one."
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.ranks = _read_ranks(function, ranks, self.rank)
        is_timeout = isinstance(timeout, timedelta) and timeout > timedelta(0)
        self._wrong = "" if is_timeout or timeout is None else f"timeout={timeout!r}"
        # The lowest number that no open move of these ranks and this name has. It isolates the
        # groups of moves that are open at the same time, which are the same on all ranks. A number
        # of all builds would not be, as builds may fail on some ranks only.
        with _lock:
            keys = ((self.rank, self.ranks, name, number) for number in itertools.count())
            key = next(key for key in keys if key not in _open or not _open[key].is_open())
            self._key, _open[key] = key, self
        # The type of device that the default group is for, the CPU if it is among several.
        types = [part.partition(":")[0] for part in dist.get_backend_config().split(",")]
        try:
            with compat.untraced():
                self._mesh = init_device_mesh(
                    "cpu" if "cpu" in types else types[0],
                    (len(self.ranks),),
                    mesh_dim_names=("reshard",),
                    ranks=list(self.ranks),
                    isolate=f"reshard {key[-1]} {name}".rstrip(),
                    timeout=timeout if is_timeout else None,
                    check_consistency=False,  # a mismatch of meshes is final, one of moves is not
                )
        except BaseException as error:
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"{self.label}: {in_words(self.ranks)} could not create the process group of this "
                f"move. All of these ranks call it; give ranks= if other ranks do. {error}"
            ) from error

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Who keeps it keeps the port of the default group's store open."""
        if self.connection is not None:
            return self.connection.group
        if self._mesh is None:
            raise RuntimeError(f"{self.label}: its process group was closed.")
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
        """Return what a function returns on each rank; if it raises on one of them, all raise.

        Where it raised on another rank, or a rank has ended, that is a RuntimeError.
        """
        answer: Any = None
        error: Exception | None = None
        try:
            if self._wrong:
                raise ValueError(f"{self._wrong}: give a timedelta above 0, or None.")
            answer = describe()
        except Exception as caught:  # noqa: BLE001  (the others must not wait for this rank)
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
        """Return the contents that ranks have, by digest; the first rank that has one sends it."""
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
            with compat.untraced():  # also where a mode is active that makes no real tensors
                collective(*arguments, group=self.group, **named)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.label}: a rank has ended or failed before all had exchanged what they "
                f"have: {error}"
            ) from error

    def find_reason(self, reason: str, device: torch.device) -> tuple[int, str]:
        """Return a rank that gives a reason not to go on, and its reason; (-1, "") if none does.

        Costs one all-reduce of a number where no rank gives a reason.
        """
        with compat.untraced():
            highest = torch.tensor(self.rank if reason else -1, device=device)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
            rank = int(highest)
            reasons: list[Any] = [reason]
            if rank >= 0:
                dist.broadcast_object_list(reasons, src=rank, group=self.group)
        return rank, reasons[0]

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Use the group alone; RuntimeError if another move of this process uses it."""
        return contextlib.nullcontext() if self.connection is None else self.connection.in_use()

    def close(self) -> None:
        """Free the group, unless it is a connection's. A second call does nothing."""
        with _lock:
            if self._key is not None and _open.get(self._key) is self:
                del _open[self._key]
        mesh, is_open, self._mesh = self._mesh, self.is_open(), None
        if mesh is not None and is_open:
            mesh.universe.destroy()


# Those that were not closed, by this rank, all ranks, name and number; and what protects them.
_open: dict[tuple[int, tuple[int, ...], str, int], MoveGroup] = {}
_lock = threading.Lock()


def _read_ranks(function: str, ranks: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    given = list(range(dist.get_world_size()) if ranks is None else ranks)
    if not all(hasattr(each, "__index__") for each in given):
        raise ValueError(f"{function}(ranks={given!r:.80}): give global ranks, as ints.")
    if rank not in given:
        raise ValueError(
            f"{function}(ranks={given!r:.80}) is called by rank {rank}, which is not among them. "
            "Call it on these ranks only, or give all ranks that call it."
        )
    return tuple(sorted(given))


def in_words(ranks: Iterable[int]) -> str:
    """Return ranks for a sentence: "rank 3", "ranks 0 to 7", "ranks 0, 2, 4"."""
    return str(RankMap.from_ranks(sorted(ranks)))
