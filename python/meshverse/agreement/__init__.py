"""Agreement between ranks, through the store of the default process group.

- `rendezvous`: ranks wait for each other, above all before c10d connects a process group.
- `deadlock`: the search for ranks that wait for one another in different rendezvous.
- `mismatch`: the comparison of the calls in which ranks request process groups.

Counts of compared calls and numbers of rendezvous attempts are kept per world, that is, per default
process group, from `init_process_group` to its end. A revived world keeps its counts of calls, and
takes the attempts of the new default group.

This subpackage does not import those of meshes, layouts and process groups: its callers pass names,
ranks and strings.
"""

from __future__ import annotations

from .mismatch import ComparedCalls, Description, RanksDifferError, check_by_default
from .rendezvous import LeftoverError, Rendezvous

__all__ = [
    "ComparedCalls",
    "Description",
    "LeftoverError",
    "RanksDifferError",
    "Rendezvous",
    "check_by_default",
]
