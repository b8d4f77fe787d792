"""Why a job hangs: every stuck collective by axis, coordinate and line of code.

- `records`: the calls of each rank, as torch's flight recorder has them.
- `dumps`: files with dumps of flight recorders.
- `verdicts`: which groups are stuck, and why.
- `skips`: which rank skipped a call, and where two ranks were first out of step.
- `report`: verdicts as text and as data.
- `named_groups`: mesh axes and ranks of process groups, from c10d's names.
- `live`: records of a running job, exchanged through the store.
- `ras`: a running job as NCCL's RAS sees it, for `meshverse hang --live`.
- `watch`: the threads on each rank that find stuck calls in a running job.
"""

from .dumps import write_dump

__all__ = ["write_dump"]
