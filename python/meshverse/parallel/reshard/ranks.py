"""The process group of a move: its ranks exchange descriptions and begin each run over it."""

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
    """The process group of one move.

    Each move has its own, so it never queues behind other collectives; its ranks create and close
    it together. A move over a connection uses the connection's group and ranks instead, and leaves
    it open.

    Args:
        function: the function that the user called, for messages.
        name: name of the move, the same on all ranks.
        ranks: global ranks of the group; by default all ranks of the default group.
        timeout: for creating the group and for each collective; by default the default group's.
        connection: the connection, for tensors in several worlds.

    Attributes:
        label: the function and the name, for messages.
        ranks: global ranks, ascending; with a connection, its ranks.
        rank: this process's rank, in the same numbering.
        world_size: number of ranks in the world or connection.
        connection: the connection, or None.
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
                "what meshverse.connect() returns. A move within one world needs no group=."
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
        # The lowest number that no open move of these ranks and this name has isolates its group
        # from theirs. It is the same on all ranks, as they open and close the same moves. A count
        # of builds would not be, as a build may fail on some ranks only.
        with _lock:
            keys = ((self.rank, self.ranks, name, number) for number in itertools.count())
            key = next(key for key in keys if key not in _open or not _open[key].is_open())
            self._key, _open[key] = key, self
        # The default group's device type; the CPU, if it has several and that is one of them.
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
                    check_consistency=False,  # its errors are final, a move's are not
                )
        except BaseException as error:
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(
                f"{self.label}: {in_words(self.ranks)} could not create the process group of this "
                f"move. All these ranks must call it; if others do, pass them as ranks=. {error}"
            ) from error

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. While referenced, it keeps the default group's store open."""
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
        """Return a function's results from all ranks; if it raises on one of them, all raise.

        A rank on which it did not raise, or whose peer has ended, raises a RuntimeError.
        """
        answer: Any = None
        error: Exception | None = None
        try:
            if self._wrong:
                raise ValueError(f"{self._wrong} must be a timedelta above 0, or None.")
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
        """Return the data of all ranks by digest; the first rank that has a datum broadcasts it."""
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
            with compat.untraced():  # real tensors, even if FakeTensorMode is active
                collective(*arguments, group=self.group, **named)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.label}: a rank ended or failed before all ranks had exchanged their "
                f"descriptions: {error}"
            ) from error

    def find_reason(self, reason: str, device: torch.device) -> tuple[int, str]:
        """Return the highest rank with a reason not to run, and its reason; (-1, "") if none has.

        Costs one all-reduce of a number, and a broadcast if there is a reason.
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
        """Return a context that uses the group alone; it raises if another move here uses it."""
        return contextlib.nullcontext() if self.connection is None else self.connection.in_use()

    def close(self) -> None:
        """Free the group, unless it is a connection's. A second call does nothing."""
        with _lock:
            if self._key is not None and _open.get(self._key) is self:
                del _open[self._key]
        mesh, is_open, self._mesh = self._mesh, self.is_open(), None
        if mesh is not None and is_open:
            mesh.universe.destroy()


# Groups that are not closed, by this rank, all ranks, name and number. `_lock` protects them.
_open: dict[tuple[int, tuple[int, ...], str, int], MoveGroup] = {}
_lock = threading.Lock()


def _read_ranks(function: str, ranks: Sequence[int] | None, rank: int) -> tuple[int, ...]:
    given = list(range(dist.get_world_size()) if ranks is None else ranks)
    if not all(hasattr(each, "__index__") for each in given):
        raise ValueError(f"{function}(ranks={given!r:.80}): these must be global ranks (ints).")
    if rank not in given:
        raise ValueError(
            f"{function}(ranks={given!r:.80}) is called by rank {rank}, which is not among them. "
            "Call it on these ranks only, or list all ranks that call it."
        )
    return tuple(sorted(given))


def in_words(ranks: Iterable[int]) -> str:
    """Return ranks for a sentence: "rank 3", "ranks 0 to 7", "ranks 0, 2, 4"."""
    return str(RankMap.from_ranks(sorted(ranks)))
