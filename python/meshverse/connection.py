"""Process groups across worlds, such as two jobs that each have a default process group.

Example: a trainer of 4 ranks and an engine of 2 ranks, each started by its own command, connect as
ranks 0 to 3 and ranks 4 to 5. `Reshard(..., group=connection)` then transfers weights from one to
the other. The default groups stay as they are.

The processes have their rendezvous in a store, in rounds. A process claims its rank in the current
round and increments a count. When the count is the number of processes, the round is complete, and
c10d creates the group. A process ends the round if it times out or finds its rank claimed, perhaps
by an earlier attempt of its own; the processes that wait in this round then join the next one. So a
side that joins late or restarts finds all the others in the same round.
"""

from __future__ import annotations

import contextlib
import operator
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from typing_extensions import Self

from meshverse._torch_compat.backends import check_backend, check_is_built, is_backend_options
from meshverse._torch_compat.c10d_creation import create_connected
from meshverse._torch_compat.c10d_groups import clone_store, end_group, find_c10d_group
from meshverse._torch_compat.private_names import BackendOptions, ProcessGroup
from meshverse._torch_compat.tracing import outside_torch_modes
from meshverse.for_extras import World, check_timeout
from meshverse.locks import Claim
from meshverse.store import StoreKeys
from meshverse.wording import rank_ranges

_SHOWN = 8  # missing ranks that an error names at most
_LOOKED_UP = 1024  # ranks that are looked up in one operation of the store
_MOST_PROCESSES, _LONGEST_NAME = 2**20, 200


def connect(
    name: str,
    store: dist.Store | str,
    *,
    rank: int,
    size: int,
    backend: str | None = None,
    options: BackendOptions | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> Connection:
    """Create a process group of processes that may have different default groups, or none.

    All `size` processes must call this, in any order, with the same arguments except `rank`.

    Args:
        name: name of the connection. Connections that share a store have different names.
        store: store that all of the processes reach; or "host:port", where rank 0 then starts a
            store, which lasts as long as the process of rank 0.
        rank: rank of this process in the connection, from 0. The jobs may be in any order.
        size: number of processes in the connection.
        backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", ...; by default "cpu:gloo,cuda:nccl" if there
            are CUDA devices and NCCL, else "gloo".
        options: options object for the backend.
        timeout: longest wait for the other processes, and timeout of the group's operations.

    Raises:
        ValueError: an argument is not valid, the size or backend differs from that of another
            process, another live process has this rank, this torch was built without the backend,
            or this process has an open connection of this name.
        TypeError: `store` is neither a store nor an address, `rank` or `size` is no integer, the
            timeout is not a timedelta, `name` or `backend` is no string, or `options` is not an
            options object.
        RuntimeError: some processes did not join in time (the error names their ranks), the store
            cannot be reached, or c10d could not connect the processes.

    Example:
        >>> trainer = meshverse.connect(
        ...     "weights", "10.0.0.1:29700", rank=dist.get_rank(), size=6
        ... )  # doctest: +SKIP
    """
    if isinstance(rank, bool) or isinstance(size, bool):
        raise TypeError(f"connect(rank={rank!r}, size={size!r}): pass integers.")
    rank, size = operator.index(rank), operator.index(size)
    if not 0 <= rank < size <= _MOST_PROCESSES:
        raise ValueError(
            f"connect(rank={rank}, size={size}): ranks run from 0 to size - 1, and a connection "
            f"has at most {_MOST_PROCESSES:,} processes."
        )
    if not isinstance(name, str):
        raise TypeError(f"connect({name!r:.80} of type {type(name).__name__}): pass a string.")
    if not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(
            f"connect({name[:80]!r}): pass a name of 1 to {_LONGEST_NAME} characters, the same in "
            "all processes."
        )
    check_timeout(timeout)
    if options is not None and not is_backend_options(options):
        raise TypeError(
            f"options={options!r} of type {type(options).__name__}: pass an options object of the "
            "backend, such as ProcessGroupNCCL.Options()."
        )
    if backend is None:
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
    if not isinstance(backend, str):
        raise TypeError(
            f"backend={backend!r} of type {type(backend).__name__}: pass the name of a backend."
        )
    backend = backend.lower()
    check_backend(backend)
    check_is_built(backend)
    with _claimed(name) as key:
        rounds = _Rounds(name, _store_at(store, rank, size, timeout), rank, size, timeout)
        number = rounds.join(f"{size} processes, backend {backend}")
        # Noted before it is created, so that the next call ends what an interrupted one left.
        group_name = f"meshverse-connection-{name}-{number}"
        _last[key] = (lambda: None), group_name
        own_store = dist.PrefixStore(str(number), rounds.store)
        made = Connection(name, group_name, own_store, rank, size, backend, options, timeout)
        _last[key] = weakref.ref(made), group_name
        return made


# Stores that this process started, by address. They last until it ends: after rank 0 has raised an
# error, other ranks still read the reason.
_hosted: dict[str, dist.Store] = {}
# By process id and name, as a fork has its parent's neither: the last connection with its group's
# c10d name, and who is connecting it now.
_last: dict[tuple[int, str], tuple[Callable[[], Connection | None], str]] = {}
_claims: dict[tuple[int, str], Claim] = {}
# By process id: what identifies this process. Containers may have equal host names and process ids.
_identities: dict[int, str] = {}


@contextlib.contextmanager
def _claimed(name: str) -> Iterator[tuple[int, str]]:
    """Claim a name while it is being connected; ValueError if this process uses it already.

    The group of a connection that was dropped without `close()` ends: nothing else would end it.
    """
    key, mine = (os.getpid(), name), object()
    claim = _claims.setdefault(key, Claim())
    try:
        if not claim.take(mine):
            raise ValueError(
                f"Another thread of this process is connecting {name!r}. Pass another name."
            )
        if (last := _last.get(key)) is not None:
            known, group_name = last[0](), last[1]
            if known is not None and known.is_open:
                raise ValueError(
                    f"A connection {name!r} is open in this process. close() it first, or pass "
                    "another name."
                )
            end_group(group_name, abort=True)
            del _last[key]
        yield key
    finally:
        try:
            claim.give_back(mine)
        finally:
            claim.give_back(mine)  # if a signal handler has raised as the first began


def _store_at(store: dist.Store | str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    if isinstance(store, dist.Store):
        # A client of its own: one that waits blocks all threads that share it.
        return clone_store(store)  # type: ignore[no-any-return]
    if not isinstance(store, str):
        raise TypeError(
            f"connect(store={store!r:.80} of type {type(store).__name__}): pass a store of "
            'torch.distributed, or "host:port".'
        )
    host, colon, port = store.removeprefix("tcp://").rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"connect(store={store!r}): pass an address as host:port, with a number.")
    try:
        found = dist.TCPStore(
            *(host.strip("[]"), int(port), size, rank == 0, timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
        if rank == 0:
            _hosted.setdefault(store, found)
        return found
    except dist.DistError as error:
        raise RuntimeError(
            (
                f"connect(rank=0): this process could not start a store at {store}"
                if rank == 0
                else f"connect(rank={rank}): no store answered at {store} within {timeout}. The "
                "process of rank 0 starts it there, when it connects"
            )
            + f": {str(error).splitlines()[0]}"
        ) from error


class _Rounds:
    """Rounds of the rendezvous of one connection; see the module's docstring."""

    def __init__(
        self, name: str, store: dist.Store, rank: int, size: int, timeout: timedelta
    ) -> None:
        self._name, self._rank, self._size, self._timeout = name, rank, size, timeout
        self.store = dist.PrefixStore(f"meshverse connection {name}", store)
        self._keys = StoreKeys(self.store, "rounds", size)
        self._attempt = os.urandom(8).hex()  # identifies this call of `connect`
        self._process = _identities.setdefault(os.getpid(), os.urandom(8).hex())
        self._address = f"{socket.gethostname()}:{os.getpid()}"

    def join(self, settings: str) -> int:
        """Join rounds until one is complete; return its number.

        Args:
            settings: settings that must be equal in all processes, in words.

        Raises:
            ValueError: other processes have other settings, or another live one has this rank.
            RuntimeError: some processes did not join in time, or the store cannot be reached.
        """
        deadline = time.monotonic() + self._timeout.total_seconds()
        taken_by = ""
        try:
            while True:
                number = self._current()
                found = self._keys.put_first(f"{number} settings", settings)
                if found != settings:
                    self._refuse(
                        number,
                        f"rank {self._rank} has {settings}, and others have {found}. Pass the same "
                        "in all processes.",
                    )
                mine = f"{self._attempt} {self._process} {self._address}"
                attempt, process, there = self._keys.put_first(
                    f"{number} {self._rank}", mine
                ).split(" ", 2)
                if attempt != self._attempt:
                    if process == taken_by != self._process:  # twice, so that process is alive
                        self._refuse(
                            number,
                            f"processes {there} and {self._address} (as host:pid) both have rank "
                            f"{self._rank}. Pass a different rank in each.",
                        )
                    taken_by = process
                    self._end(number)
                    continue
                self._keys.count(f"{number} count")
                try:
                    is_complete = self._wait(number, deadline)
                except BaseException:  # also of a signal handler
                    with contextlib.suppress(dist.DistError):  # the store failed
                        self._end(number)  # the others must not wait with this rank counted
                    raise
                if is_complete:
                    self._end(number)  # a later `connect` uses the next round
                    return number
        except dist.DistError as error:
            raise RuntimeError(
                f"connect({self._name!r}): rank {self._rank} lost the store, which ends with the "
                f"process that hosts it: {str(error).splitlines()[0]}"
            ) from error

    def _refuse(self, number: int, why: str) -> NoReturn:
        """Raise ValueError in this process and in all that wait in this round."""
        self._keys.put_first(f"{number} error", why)
        self._keys.write("refused", f"{number} {why}")
        self._end(number)
        raise ValueError(f"connect({self._name!r}): {why}")

    def _lately_refused(self, number: int) -> str:
        refused, _, why = self._keys.read("refused").partition(" ")
        # Each process ends one round at most, so an older refusal is of an earlier attempt.
        return why if refused and int(refused) + self._size >= number else ""

    def _current(self) -> int:
        return int(self._keys.put_first("round", "0"))

    def _end(self, number: int) -> None:
        self._keys.replace("round", str(number), str(number + 1))

    def _is_complete(self, number: int) -> bool:
        return self._keys.count(f"{number} count", 0) >= self._size

    def _wait(self, number: int, deadline: float) -> bool:
        """Wait until a round is complete; return False if it has ended before that.

        Raises:
            ValueError: processes in this round disagree.
            RuntimeError: the round was not complete in time.
        """
        began = time.monotonic()
        while not self._is_complete(number):
            self._keys.pause()
            if self._current() != number:
                if refused := self._keys.read(f"{number} error"):
                    raise ValueError(f"connect({self._name!r}): {refused}")
                return self._is_complete(number)
            if time.monotonic() > deadline and not self._is_complete(number):
                missing, refused = self._missing(number), self._lately_refused(number)
                raise RuntimeError(
                    f"connect({self._name!r}): rank {self._rank} waited {self._timeout} for "
                    f"{missing}. Start all processes with the same name, store "
                    "and size, and each with a different rank."
                    + (f" An earlier error of one of them: {refused}" if refused else "")
                )
            self._keys.pause_between_looks(time.monotonic() - began)
        return True

    def _missing(self, number: int) -> str:
        """Return the ranks that have not joined a round, in words."""
        missing, everyone = list[int](), range(self._size)
        blocks = [everyone[i : i + _LOOKED_UP] for i in everyone[::_LOOKED_UP]][::-1]
        while blocks and len(missing) <= _SHOWN:
            block = blocks.pop()
            if self._keys.have_all([f"{number} {rank}" for rank in block]):
                continue
            half = len(block) // 2
            if half:
                blocks += [block[half:], block[:half]]
            else:
                missing.append(block[0])
        if not missing:
            return "a process that ended as it joined"
        more = " and more" * (len(missing) > _SHOWN)
        return (
            f"rank{'s' * (len(missing) != 1)} {rank_ranges(missing[:_SHOWN])}{more} of {self._size}"
        )


class Connection:
    """A process group of processes that may have different default groups; see `connect`.

    Attributes:
        name: name of the connection.
        rank: rank of this process in the connection.
        size: number of processes in the connection.
        nodes: number of the host, from 0, of each rank of the connection.
    """

    def __init__(
        self,
        name: str,
        group_name: str,
        store: dist.Store,
        rank: int,
        size: int,
        backend: str,
        options: BackendOptions | None,
        timeout: timedelta,
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self._in_use = Claim()
        self._group: ProcessGroup | None = None
        try:
            with outside_torch_modes():
                self._group = create_connected(
                    *(store, rank, size),
                    backend=backend,
                    backend_options=options,
                    timeout=timeout,
                    name=group_name,
                    description=f"connection {name}",
                )
                self._exchange_places()
        except RuntimeError as error:
            self._end()
            raise RuntimeError(
                f"connect({name!r}): rank {rank} could not be connected with the others, perhaps "
                f"because one of them has ended meanwhile: {error}"
            ) from error
        except BaseException:
            self._end()
            raise

    def _exchange_places(self) -> None:
        """Find out each process's host, and which processes are ranks of this process's world."""
        world = World.current()
        own = os.urandom(8).hex(), 0  # this key is unique, for a process without a world
        self._why_not_known = ""
        if world is not None:
            key, run_keys = own[0], world.run_keys
            if run_keys is None:
                self._why_not_known = (
                    " The store of this world's default group allows no rendezvous, so nothing "
                    "tells which other processes are of this world."
                )
            else:
                key = run_keys.put_first("connections", key)
            own = key, world.rank
        everyone: list[Any] = [None] * self.size
        host = socket.gethostname()
        dist.all_gather_object(everyone, (*own, host), group=self._group)
        hosts = list(dict.fromkeys(host for *_, host in everyone))
        numbers = {host: number for number, host in enumerate(hosts)}
        self.nodes = tuple(numbers[host] for *_, host in everyone)
        self._by_world_rank = {
            world_rank: rank for rank, (key, world_rank, _) in enumerate(everyone) if key == own[0]
        }

    @property
    def group(self) -> ProcessGroup:
        """Process group of the connection, for collectives of torch.distributed.

        `src=` and `dst=` are ranks of the connection. For this process's rank use `rank`:
        `torch.distributed.get_rank(group)` looks the process up by its rank in the default group.

        Raises:
            RuntimeError: the connection was closed, or ended with the default group.
        """
        if not self.is_open or self._group is None:
            raise RuntimeError(
                f"The connection {self.name!r} of {self.size} processes was closed, or ended with "
                "the default process group. Call meshverse.connect() again, in all of them."
            )
        return self._group

    @property
    def is_open(self) -> bool:
        """Whether the process group can be used."""
        group = self._group
        return group is not None and find_c10d_group(group.group_name) is group

    def rank_of(self, world_rank: int) -> int:
        """Return the connection's rank for a global rank of this process's world.

        Raises:
            ValueError: that rank is not in the connection, or is another process's and this world
                has no store that tells which one's.
        """
        rank = self._by_world_rank.get(world_rank)
        if rank is None:
            raise ValueError(
                f"Rank {world_rank} of this world is not in the connection {self.name!r}, which "
                f"contains ranks {rank_ranges(sorted(self._by_world_rank))} of this world."
                f"{self._why_not_known}"
            )
        return rank

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Reserve the connection for one transfer; RuntimeError if another one is running."""
        caller = object()
        try:
            if not self._in_use.take(caller):
                raise RuntimeError(
                    f"Another transfer is running over the connection {self.name!r}. Wait for it; "
                    "or, to run both at once, connect again under another name."
                )
            yield
        finally:
            self._in_use.give_back(caller)

    def close(self) -> None:
        """End the process group in this process, which then needs the connection no more.

        Operations that others still run on it fail. A second call does nothing. If the connection
        is dropped instead, its group stays until this process connects the name again.
        """
        self._end()

    def _end(self) -> None:
        group, is_open, self._group = self._group, self.is_open, None
        if group is not None and is_open:
            dist.destroy_process_group(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self.is_open else ", closed"
        return f"Connection({self.name!r}, rank {self.rank} of {self.size}{state})"
