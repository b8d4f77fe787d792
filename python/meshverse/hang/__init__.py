"""Why a job hangs: every stuck collective by axis, coordinate and line of code.

- `records`: what each rank called, from dumps of torch's flight recorder.
- `verdicts`: which groups are stuck, and why.
- `report`: verdicts in words and as data.
- `named_groups`: group names in terms of meshes.
- `live`, `watch`: the same while the job lives.
"""

from .records import write_dump

__all__ = ["write_dump"]
