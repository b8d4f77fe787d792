"""Repeat the tests of real processes and threads with random pauses, beside busy processes.

    python tools/soak.py MINUTES [SEED]

Each round runs some files of both tiers, chosen at random, in a random order and with the pauses of
`tests/helpers/jitter.py`. Rounds take place beside 0, 4 and 8 busy processes and on one core, in
turn, until the time is over. The table at the end names each test that failed, with the seed that
shows it again; `build/soak/` has each round's output, and runs and failures of all tests.
"""

from __future__ import annotations

import collections
import csv
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

_FOLDER = Path("build/soak")
_SELECTED = "(processes or threads) and not sweep"
_FILES_PER_ROUND = 12
_SWITCH = "MESHVERSE_TEST_JITTER"
_NO_TESTS = 5  # pytest's exit status


class Load(NamedTuple):
    """Busy processes beside the tests of a round, and the cores that it may use."""

    n_busy: int
    is_on_one_core: bool = False

    def __str__(self) -> str:
        return "one core" if self.is_on_one_core else f"{self.n_busy} busy"


_LOADS = (Load(0), Load(4), Load(8), Load(0, is_on_one_core=True))


class Run(NamedTuple):
    """One run of one test."""

    test: str
    has_failed: bool
    seed: int
    load: Load


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", _SELECTED, *arguments]


def _files() -> list[str]:
    """Return the files that have such tests."""
    listed = subprocess.run(
        _pytest("--collect-only", "-q"), stdout=subprocess.PIPE, text=True, check=True
    )
    return sorted({line.split("::")[0] for line in listed.stdout.splitlines() if "::" in line})


@contextmanager
def _beside(n_busy: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_busy)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _round(files: list[str], seed: int, load: Load) -> list[Run]:
    """Run these files once; return what became of each test."""
    report, output = _FOLDER / f"{seed}.xml", _FOLDER / f"{seed}.txt"
    command = _pytest(
        "-n3", "--dist=loadfile", "--no-loadscope-reorder", f"--junitxml={report}",
        "--random-order", f"--random-order-seed={seed}", *files,
    )  # fmt: skip
    if load.is_on_one_core:
        command = ["taskset", "--cpu-list", "0", *command]
    with output.open("w") as file, _beside(load.n_busy):
        ended = subprocess.run(
            command,
            env=os.environ | {_SWITCH: str(seed)},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if ended.returncode == _NO_TESTS:
        return []
    if not report.exists():
        return [Run(f"pytest itself: {output}", True, seed, load)]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return [
        Run(
            f"{case.get('classname')}::{case.get('name')}",
            any(case.find(what) is not None for what in ("failure", "error")),
            seed,
            load,
        )
        for case in cases
        if case.find("skipped") is None
    ]


def _write_table(runs: list[Run]) -> int:
    """Print the tests that failed, write all to a file, and return how many failed."""
    by_test: dict[str, list[Run]] = collections.defaultdict(list)
    for run in runs:
        by_test[run.test].append(run)
    failed = {test: [run for run in all_ if run.has_failed] for test, all_ in by_test.items()}
    with (_FOLDER / "runs.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["test", "runs", "failures"])
        rows.writerows([test, len(by_test[test]), len(failed[test])] for test in sorted(by_test))
    bad = {test: failures for test, failures in failed.items() if failures}
    print("| test | runs | failures | seeds |\n| --- | ---: | ---: | --- |")
    for test, failures in sorted(bad.items()):
        seeds = ", ".join(f"{run.seed} ({run.load})" for run in failures)
        print(f"| {test} | {len(by_test[test])} | {len(failures)} | {seeds} |")
    print(f"| all {len(by_test)} tests | {len(runs)} | {sum(map(len, bad.values()))} | |")
    return len(bad)


def main(minutes: float, first_seed: int) -> int:
    """Run rounds until the time is over; return how many tests failed."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    _FOLDER.mkdir(parents=True)
    end, seed, runs = time.monotonic() + 60 * minutes, first_seed, []
    files, waiting = _files(), []
    while time.monotonic() < end:
        if len(waiting) < _FILES_PER_ROUND:  # each file comes before any comes again
            waiting += random.Random(seed).sample(files, len(files))
        chosen, waiting = waiting[:_FILES_PER_ROUND], waiting[_FILES_PER_ROUND:]
        load, began = _LOADS[(seed - first_seed) % len(_LOADS)], time.monotonic()
        found = _round(chosen, seed, load)
        runs += found
        n_failed = sum(run.has_failed for run in found)
        seconds = time.monotonic() - began
        print(f"seed {seed}, {load}: {len(found)} tests, {n_failed} failed, {seconds:.0f} s")
        sys.stdout.flush()
        seed += 1
    return _write_table(runs)


if __name__ == "__main__":
    minutes, *given = sys.argv[1:]
    sys.exit(min(main(float(minutes), int(given[0]) if given else int(time.time())), 100))
