"""Checking a job's machines before the job: are all ranks there, and do they reach each other?

- `roll_call`: which ranks are there, and which one the others wait for.
- `measuring`: what one rank measures: the store, its clock, its speed, its groups.
- `outliers`: what is out of line, in numbers of all ranks.
- `verdict`: what the measurements of all ranks say of the job.
- `examination`: the result, as data and as a table.
- `doctor`: all of it, in the order in which the ranks do it.
"""

from __future__ import annotations

from .doctor import examine
from .examination import AxisExamined, Examination

__all__ = ["AxisExamined", "Examination", "examine"]
