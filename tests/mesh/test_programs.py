"""Random programs of meshes, beside stock: some in every run, many more in `make fuzz`."""

from __future__ import annotations

import os
import time

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from helpers.programs import Programs


def test_programs() -> None:
    run_state_machine_as_test(Programs, settings=settings(max_examples=25, stateful_step_count=15))


def test_programs_for_as_long_as_was_asked_for() -> None:
    # Without shrinking, which takes many minutes: the steps of a program are printed as they are.
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "0"))
    while time.monotonic() < end:
        run_state_machine_as_test(
            Programs,
            settings=settings(
                max_examples=200,
                stateful_step_count=30,
                derandomize=False,
                database=None,
                phases=[Phase.generate],
            ),
        )
