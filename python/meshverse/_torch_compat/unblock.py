"""Ending of collectives that wait for a process that does not answer."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from .private_names import c10d

_FDS = "/proc/self/fd"
_QUIET_MS = 50  # without data, after which a connection is not in use
_TCP_INFO_BYTES = 148  # of Linux's struct tcp_info, up to the last field that is read
_MOST_RANKS = 1_024  # of a job in which connections are made in place of a lost rank's
_ROUNDS = 3  # in one call, in which connections that are in use may become quiet

_of_python: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_is_noting = False


def open_sockets() -> set[str]:
    """Return the sockets of this process, as the kernel names them; Linux only, else none.

    From the first call on, sockets that Python creates are noted, by an audit hook.
    """
    global _is_noting
    if not _is_noting:
        _is_noting = True
        sys.addaudithook(_note_socket)
    return {name for _, name in _sockets()}


def _note_socket(event: str, arguments: tuple[object, ...]) -> None:
    if event == "socket.__new__":
        with contextlib.suppress(TypeError):  # not of Python's own class
            _of_python.add(arguments[0])  # type: ignore[arg-type]


def _numbers_of_python() -> set[int]:
    # Not by the garbage collector's list of objects: while this thread has that list, `tuple(...)`
    # of a generator fails in other threads.
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has added one meanwhile
            return {one.fileno() for one in _of_python}


def unblock_collectives(
    keep: Collection[str], kept_port: int, served_port: int, n_ranks: int, *, busy_too: bool
) -> None:
    """Have collectives of this process that wait for others raise an error. For other threads.

    NCCL aborts its communicators. gloo cannot: an operation waits until its timeout, or until a
    connection of its group is closed. So this closes all connections of this process but those of
    Python's own sockets and those named below: also those of other C++ libraries. If a connection
    is closed in the middle of a message, gloo waits on, so connections that are in use are left
    for the next call. A group that is being created may wait for a connection that the lost rank
    has not made: this makes and closes one in its place, in jobs of up to 1,024 ranks. 2.13.

    Args:
        keep: sockets to keep, of `open_sockets`.
        kept_port: port of a store, the connections to which are kept.
        served_port: port of a store that this process serves; -1 for none.
        n_ranks: number of ranks of the default group.
        busy_too: whether to close also connections that are in use.
    """
    for group in list(c10d._world.pg_names):
        with contextlib.suppress(RuntimeError):  # its backend has no `abort`
            group.abort()
    for _ in range(1 if busy_too else _ROUNDS):
        if _close_connections(keep, kept_port, served_port, n_ranks, busy_too=busy_too):
            return
        time.sleep(2 * _QUIET_MS / 1000)


def _close_connections(
    keep: Collection[str], kept_port: int, served_port: int, n_ranks: int, *, busy_too: bool
) -> bool:
    """As `unblock_collectives`; return whether no connection is left."""
    is_done = True
    of_python = _numbers_of_python()
    for number, name in _sockets():
        if name in keep or number in of_python:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            # The duplicate keeps the socket open, also if the other thread closes it meanwhile.
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            address = one.getsockname()
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if address[1] not in (kept_port, served_port):
                    _connect_in_place_of_others(address, n_ranks)
            elif kept_port not in (address[1], one.getpeername()[1]):
                if not busy_too and _is_busy(one):
                    is_done = False
                else:
                    one.shutdown(socket.SHUT_RDWR)
    return is_done


def _is_busy(connection: socket.socket) -> bool:
    """Return whether data are on their way in a connection, or were a moment ago."""
    with contextlib.suppress(BlockingIOError):
        if connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            return True
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (unacknowledged,) = struct.unpack_from("I", info, 24)  # packets
    sent, _, received = struct.unpack_from("III", info, 44)  # ms since the last data
    (unsent,) = struct.unpack_from("I", info, 144)  # bytes
    return bool(unacknowledged or unsent or min(sent, received) < _QUIET_MS)


def _connect_in_place_of_others(address: tuple[Any, ...], n_ranks: int) -> None:
    # gloo has one listening socket for each group. Of two ranks, one connects to the other, and
    # sends the number of this connection among those of the group: 8 bytes, from 0. What it sends
    # twice for one number is ignored.
    if n_ranks > _MOST_RANKS:  # it would take seconds, in which this process gives no sign of life
        return
    for number in range(n_ranks):
        with socket.create_connection(address[:2], timeout=0.2) as connection:
            connection.sendall(number.to_bytes(8, sys.byteorder))


def _sockets() -> Iterator[tuple[int, str]]:
    if not os.path.isdir(_FDS):
        return
    for number in os.listdir(_FDS):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(f"{_FDS}/{number}")
            if name.startswith("socket:"):
                yield int(number), name
