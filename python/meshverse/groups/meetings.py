"""The meetings of a universe's ranks before they create process groups."""

from __future__ import annotations

from collections.abc import Sequence

from meshverse.agreement import (
    Board,
    Call,
    RanksDifferError,
    has_begun,
    meet,
    remove_meeting,
    shortened,
)
from meshverse.options.group_options import GroupOptions
from meshverse.world.world import World

__all__ = ["GroupMeetings"]


class GroupMeetings:
    """Where members of one universe's groups wait for each other, if creating a group would wait.

    Args:
        world: whose store is used.
        user: of the board, which stands for the universe.
    """

    def __init__(self, world: World, user: object) -> None:
        self._world, self._user = world, user
        self._first_in: set[str] = set()  # meetings to which this rank was the first to come

    def hold(
        self,
        name: str,
        axis_name: str,
        ranks: Sequence[int],
        options: GroupOptions,
        call: Call | None,
    ) -> str | None:
        """Wait for the other members of a group, if creating it would wait for them silently.

        Args:
            name: c10d's name of the group.
            axis_name: for messages.
            ranks: global ranks of the members, in ascending or mesh order.
            options: what the group shall be.
            call: that needs the group, if it is compared with those of other ranks.

        Returns:
            None if creating it does not wait. Otherwise which attempt to create it this is, the
            same text on all members; "" for the first.

        Raises:
            RuntimeError: see `agreement.meet`.
        """
        if len(ranks) == 1 or not self._world.creation_blocks(options.backend):
            return None
        board = self._world.board
        if board is None:
            return None
        self._world.run.add_user(self._user)
        differences = 0 if call is None else self._catch_up(board, name, call)
        key = _key(name, differences)
        try:
            check = None if call is None else call.check
            number = meet(
                *(board, self._world.waits, key, f"axis {axis_name!r}", ranks),
                *(options.timeout, check),
                first_in=self._first_in,
            )
            return f"{differences}.{number}" if differences or number else ""
        except RanksDifferError:
            raise
        except RuntimeError as error:
            group = f"the process group of axis {axis_name!r} with ranks {shortened(ranks)}"
            raise type(error)(f"Rank {self._world.rank} could not make {group}: {error}") from None

    def _catch_up(self, board: Board, name: str, call: Call) -> int:
        # A rank whose calls are no longer compared is not told how often the others have differed
        # since, but it sees where they wait for it.
        if not call.is_compared:
            while has_begun(board, _key(name, call.differences + 1)):
                call.catch_up(call.differences + 1)
        return call.differences

    def remove_from_store(self) -> None:
        """Remove what the meetings left in the store: no member waits in them any more."""
        board = self._world.board if self._first_in else None
        if board is None:
            return
        for meeting in sorted(self._first_in):
            remove_meeting(board, meeting)
            self._first_in.discard(meeting)


def _key(name: str, differences: int) -> str:
    # A rank that was told of a difference and tries again does not meet those who still wait for
    # the attempt before: they are about to be told too.
    return f"{name} after {differences}" if differences else name
