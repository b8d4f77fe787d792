"""Collectives that wait are ended while others are on their way, on two real processes."""

from __future__ import annotations

import threading
import traceback
from multiprocessing.connection import Connection
from random import Random
from time import monotonic, sleep

import pytest
import torch
import torch.distributed as dist

from helpers.forked import CONTEXT
from meshverse import _torch_compat as compat

_ROUNDS = 15
_SECONDS = 4  # in which all collectives of a round have ended

pytestmark = [pytest.mark.long, pytest.mark.processes]


def _rounds(rank: int, port: int, answer: Connection) -> None:
    """In each round, send much, then wait for a message that never comes; send what went wrong."""
    torch.set_num_threads(1)
    kept = compat.open_sockets()
    try:
        for number in range(_ROUNDS):
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            dist.init_process_group(
                store=dist.PrefixStore(str(number), store), rank=rank, world_size=2, backend="gloo"
            )
            ended = threading.Event()
            thread = threading.Thread(target=_unblock, args=(rank, port, kept, ended, answer))
            thread.start()
            with pytest.raises(RuntimeError):
                _wait_for_each_other(number, rank)
            ended.set()
            thread.join()
            dist.destroy_process_group()
        answer.send("")
    except BaseException:
        answer.send(traceback.format_exc())
        raise


def _wait_for_each_other(number: int, rank: int) -> None:
    tensor = torch.zeros(40_000)
    for _ in range(Random(number).randint(50, 800)):
        dist.all_reduce(tensor)
    dist.recv(tensor, 1 - rank)


def _unblock(
    rank: int, port: int, kept: set[str], ended: threading.Event, answer: Connection
) -> None:
    sleep(0.1 + 0.05 * rank)
    begin = monotonic()
    while not ended.wait(0.1):
        compat.unblock_collectives(kept, port, -1, 2, busy_too=False)
        if monotonic() > begin + _SECONDS:
            answer.send("a collective did not end")
            return


@pytest.mark.timeout(240)
def test_no_collective_waits_for_the_rest_of_a_message() -> None:
    """gloo does so if a connection is closed in the middle of one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
    processes = [
        CONTEXT.Process(target=_rounds, args=(rank, store.port, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        assert [answer.poll(100) and answer.recv() for answer, _ in pipes] == ["", ""]
    finally:
        for process in processes:
            process.kill()
            process.join()
