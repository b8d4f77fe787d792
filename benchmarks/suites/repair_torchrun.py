"""The job as torchrun starts it, and starts it again: its last checkpoint is loaded at start."""

from __future__ import annotations

import time

_STARTED = time.monotonic_ns()

import os  # noqa: E402 - after the clock
import sys  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from suites.repair_model import Plan, build, load, note, save  # noqa: E402


def main() -> None:
    plan = Plan.read(sys.argv[1])
    note(plan, "started", at_ns=_STARTED)
    note(plan, "imported")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    note(plan, "default group")
    train(plan, rank)
    dist.destroy_process_group()


def train(plan: Plan, rank: int) -> None:
    """Build, load the last checkpoint, and run the steps that are left."""
    built = build(init_device_mesh, plan.compiled)
    note(plan, "built")
    first = load(plan, built, rank)
    note(plan, "state")
    for step in range(first, plan.steps):
        if plan.is_next(step):  # as if there were a checkpoint of each step, at no cost
            dist.barrier()  # nobody has been killed in this step yet
            save(plan, built, rank, step)
            dist.barrier()
        loss = built.forward_backward(step, partial(plan.maybe_die, step, rank))
        built.optimizer.step()
        built.optimizer.zero_grad()
        plan.keep(rank, step, loss)


if __name__ == "__main__":
    main()
