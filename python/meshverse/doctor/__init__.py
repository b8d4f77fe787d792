"""Checking a job's machines before the job: are all ranks there, and do they reach each other?

- `membership`: which ranks are there, which ones the others wait for, and which one reports.
- `doctor`: the steps of an examination, and the measurements of one rank.
- `examination`: the result, judged from the measurements of all ranks; as data and as a table.
"""

from __future__ import annotations

from .doctor import examine
from .examination import AxisExamined, Examination
from .membership import NotAllHereError

__all__ = ["AxisExamined", "Examination", "NotAllHereError", "examine"]
