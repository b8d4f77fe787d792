"""Agreement between ranks, through the store of the default process group.

- `rendezvous`: ranks wait for each other, above all before c10d connects a process group.
- `deadlock`: the search for ranks that wait for one another.
- `mismatch`: ranks compare the calls in which they make process groups.
- `program_line`: the line of the user's program, for messages.

Nothing here knows meshes, layouts or process groups: callers give names, ranks and texts.
"""

from __future__ import annotations

from .mismatch import ComparedCalls, Description, RanksDifferError, check_by_default
from .program_line import program_line
from .rendezvous import Rendezvous

__all__ = [
    "ComparedCalls",
    "Description",
    "RanksDifferError",
    "Rendezvous",
    "check_by_default",
    "program_line",
]
