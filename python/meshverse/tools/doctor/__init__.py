"""Checks of a job's machines before the job starts: ranks, clocks, process groups and their speed.

- `membership`: the ranks that have started, those that others wait for, and the one that reports.
- `doctor`: the steps of an examination, and the measurements of one rank.
- `examination`: the result of an examination, from the measurements of all ranks.
"""

from __future__ import annotations

from .doctor import examine
from .examination import AxisExamined, Examination
from .membership import NotAllHereError

__all__ = ["AxisExamined", "Examination", "NotAllHereError", "examine"]
