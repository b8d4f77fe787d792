"""What ranks tell one another through the store of the default process group.

- `board`: short texts under keys that belong to one run of the default process group.
- `claims`: what a rank says it is about to make, and how two ranks differ.
- `calls`: ranks compare what they are about to make. If they differ, all of them are told.
- `meeting`: members of a process group wait for each other before they create it.
- `waits`: ranks that wait for each other in a cycle find that out.

Nothing here knows meshes, layouts or process groups: callers give names, ranks and texts.
"""

from __future__ import annotations

from .board import Board, Run
from .calls import Call, CallOrder, RanksDifferError, first_keys, next_keys
from .claims import Statement, users_line
from .meeting import has_begun, meet, remove_meeting
from .ranks_text import shortened
from .waits import OwnWaits

__all__ = [
    "Board",
    "Call",
    "CallOrder",
    "OwnWaits",
    "RanksDifferError",
    "Run",
    "Statement",
    "first_keys",
    "has_begun",
    "meet",
    "next_keys",
    "remove_meeting",
    "shortened",
    "users_line",
]
