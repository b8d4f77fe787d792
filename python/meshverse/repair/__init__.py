"""Repair of a job that has lost ranks, in the processes that are left.

- `membership`: which processes are the ranks of a job, decided in a store that outlives them.
- `heartbeat`: the thread by which each process shows that it is alive, and watches one other.
- `state`: undoing half a step, and copies of the state for new ranks.
- `resize`: transfer of the state to another number of ranks.
- `job`: what users call.
"""

from __future__ import annotations

from .job import Job, JobFailedError, RankLostError, join

__all__ = ["Job", "JobFailedError", "RankLostError", "join"]
