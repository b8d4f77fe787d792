"""The end of a world, whatever the user presses."""

from __future__ import annotations

import signal

import pytest
import torch.distributed as dist

from helpers.worlds import FakeWorld
from meshverse.parallel import destroy_dist_connection

pytestmark = pytest.mark.usefixtures("world")


def test_destroying_ignores_ctrl_c(world: FakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError("the handler of before was called")

    destroy = dist.destroy_process_group

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        destroy()

    before = signal.signal(signal.SIGINT, handler)
    try:
        monkeypatch.setattr(dist, "destroy_process_group", interrupted)
        destroy_dist_connection()
        assert not dist.is_initialized()
        assert signal.getsignal(signal.SIGINT) is handler
        destroy_dist_connection()  # nothing left to destroy
    finally:
        signal.signal(signal.SIGINT, before)


def test_handler_is_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such luck")

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(RuntimeError, match="no such luck"):
        destroy_dist_connection()
    assert signal.getsignal(signal.SIGINT) is before
