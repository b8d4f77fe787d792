"""`meshverse store`: the store of jobs that repair themselves, in a process of its own."""

from __future__ import annotations

import argparse
import signal
import threading

import torch.distributed as dist


def add_store(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "store",
        help="run the store of jobs that repair themselves",
        description="Runs a TCPStore until it is interrupted. Processes of a job reach it by "
        "meshverse.repair.join('HOST:PORT', ...). Run it on a host that stays when others fail.",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=29400, help="port; 0 for a free one")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        store = dist.TCPStore(
            arguments.host, arguments.port, is_master=True, wait_for_workers=False
        )
    except RuntimeError as error:
        raise ValueError(f"store: port {arguments.port} cannot be used: {error}") from error
    print(f"The store of the jobs listens on port {store.port}.", flush=True)  # noqa: T201
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    is_over.wait()
    return 0
