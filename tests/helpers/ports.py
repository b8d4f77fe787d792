"""TCP ports that the system gives to nobody else."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def held_port() -> int:
    """Return a port of this machine on which a store can listen, until this process ends.

    A socket of this process is bound to it, so the system gives it to no other one. As that socket
    does not listen, and lets others reuse its address, a store can.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])  # port: it stays bound
