"""The record of locks finds mistakes, and checks the order that the documentation says."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.lock_order import KINDS, recorded
from helpers.worlds import fake_world
from meshverse import init_device_mesh, locks

_PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_it_finds_a_group_that_is_made_with_the_lock_held() -> None:
    with pytest.raises(AssertionError):  # at the end of the record, too
        _make_a_group_with_the_lock()


def _make_a_group_with_the_lock() -> None:
    with fake_world(8), recorded():
        mesh = init_device_mesh("cpu", (8,), lazy=True, isolate="a")
        with (
            locks.state_lock.held,
            pytest.raises(AssertionError, match="waits for a process group"),
        ):
            mesh.get_group()


def test_it_finds_c10d_called_with_the_lock_held() -> None:
    with pytest.raises(AssertionError):
        _use_a_store_with_the_lock()


def _use_a_store_with_the_lock() -> None:
    with (
        recorded(),
        locks.state_lock.held,
        pytest.raises(AssertionError, match="set is called while"),
    ):
        dist.HashStore().set("a", "b")


def test_a_wait_releases_the_lock() -> None:
    """Else the thread that is waited for would seem to wait out of order."""
    go_on = threading.Event()

    def change() -> None:
        with locks.state_lock.held:
            go_on.set()
            locks.state_changed.notify_all()

    with recorded():
        thread = threading.Thread(target=change)
        with locks.state_lock.held:
            thread.start()
            while not go_on.is_set():
                locks.state_changed.wait()
        thread.join(60)


def test_the_documentation_lists_them_in_this_order() -> None:
    table = _PAGE.read_text().partition("<!-- locks -->")[2].partition("<!-- end of locks -->")[0]
    rows = re.findall(r"^\| \d \| ([^|]*?) \|", table, re.MULTILINE)
    assert [row for row in rows if row in KINDS] == list(KINDS)
