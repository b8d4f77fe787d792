"""The ranks of a move have a process group of their own, in which they begin each run together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from meshverse import DeviceMesh, init_device_mesh
from meshverse import _torch_compat as compat

from .gathering import Gathering
from .roster import in_words

__all__ = ["Together"]

_TELLING = timedelta(seconds=5)  # for the rank that looks who is behind to tell it
_NOTHING_SENT = "Nothing was sent, and the targets are as they were."


class Together:
    """The ranks of one move, as one of them sees them.

    All of them make it together. When it is made, all ranks have connected: any of them may close
    it at once.

    Args:
        meeting: of the move, where the ranks leave notes for each other.
        ranks: that have a part, ascending. A group is made if this rank is one of several.
        rank: this rank.
        device: on which the ranks' numbers are compared.
        timeout: how long to wait for other ranks, here and in each run.

    Raises:
        RuntimeError: a rank has ended, or did not come in time.
    """

    def __init__(
        self,
        meeting: Gathering,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        self._meeting, self._ranks, self._rank, self._device = meeting, ranks, rank, device
        self._is_open = True
        self._mesh: DeviceMesh | None = None
        if rank in ranks and len(ranks) > 1:
            self._mesh = init_device_mesh(
                device.type,
                (len(ranks),),
                mesh_dim_names=("reshard",),
                ranks=list(ranks),
                isolate=f"reshard {meeting.label}",
                timeout=timeout,
            )
            self._wait_until_all_have_connected()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks' process group; None where there is none.

        Who holds it keeps the port of the default group's store open, so nobody does.
        """
        return None if self._mesh is None else self._mesh.get_group()

    def _wait_until_all_have_connected(self) -> None:
        try:
            self._highest(0)
        except RuntimeError as error:
            raise RuntimeError(
                f"Reshard: {in_words(self._ranks)} made a process group, and one of them has ended "
                f"or did not come before all had connected: {error}"
            ) from error

    def begin(self, run: int, why_not: str) -> str:
        """Begin a run on all ranks or on none: a write to the store and an all-reduce of a number.

        Args:
            run: its number, counted from 1.
            why_not: why this rank cannot run; "" if it can.

        Returns:
            Why no rank begins it; "" if all do.

        Raises:
            RuntimeError: a rank has ended, or did not come in time.
        """
        if self._mesh is None:
            return why_not
        self._meeting.note(f"at/{self._rank}", str(run))
        if why_not:
            self._meeting.note(f"changed/{run}/{self._rank}", why_not)
        culprit = self._highest(self._rank + 1 if why_not else 0) - 1
        if culprit < 0:
            return ""
        if why_not:
            return f"{why_not} {_NOTHING_SENT}"
        theirs = self._meeting.read(f"changed/{run}/{culprit}")
        return f"Reshard: rank {culprit} cannot run: {theirs} {_NOTHING_SENT}"

    def _highest(self, number: int) -> int:
        with compat.untraced():  # also where a mode is active that makes no real tensors
            highest = torch.tensor(number, device=self._device)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.group)
            return int(highest)

    def who_is_behind(self, run: int) -> list[int]:
        """The ranks that have not come to a run, as far as the store tells.

        The first rank that asks reads the notes of all ranks, and tells the others.
        """
        if self._mesh is None:
            return []
        with contextlib.suppress(RuntimeError):  # the store has ended, with the rank that has it
            if self._meeting.is_first(f"behind/{run}"):
                behind = [rank for rank in self._ranks if self._at(rank) < run]
                self._meeting.note(f"behind/{run}/told", json.dumps(behind))
                return behind
            told = self._meeting.wait_for(f"behind/{run}/told", _TELLING)
            return [rank for rank in json.loads(told or "[]") if rank != self._rank]
        return []

    def _at(self, rank: int) -> int:
        return int(self._meeting.read(f"at/{rank}") or 0)

    def close(self) -> None:
        """Free the group. All ranks call it; none runs the move afterwards."""
        if not self._is_open:
            return
        self._is_open = False
        with contextlib.suppress(dist.DistError):  # the store has ended, and its texts with it
            self._meeting.leave()
        if self._mesh is not None:
            mesh, self._mesh = self._mesh, None
            mesh.universe.destroy()
