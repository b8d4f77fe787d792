"""Run the benchmarks and write their reports to benchmarks/results/."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "examples"))  # the trainer's recipe and the fake worlds

import consistency  # noqa: E402
import operations  # noqa: E402
import parallel_meshes  # noqa: E402
import scaling  # noqa: E402
import training  # noqa: E402
from harness import compare  # noqa: E402
from reports import Report  # noqa: E402

SUITES = {
    "operations": operations,
    "scaling": scaling,
    "parallel_meshes": parallel_meshes,
    "consistency": consistency,
    "training": training,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; by default all")
    parser.add_argument("--repetitions", type=int, default=15, help="of each comparison")
    arguments = parser.parse_args()
    unknown = set(arguments.suites) - set(SUITES)
    if unknown or arguments.repetitions < 2:
        parser.error(f"unknown suites {sorted(unknown)}, or fewer than 2 repetitions")

    command = shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]])
    for name in arguments.suites or SUITES:
        report = run_suite(name, command, arguments.repetitions)
        report.save(HERE / "results")
        print(f"\n{report.markdown()}", flush=True)


def run_suite(name: str, command: str, repetitions: int) -> Report:
    suite, results = SUITES[name], []
    if hasattr(suite, "results"):  # measures in processes of its own
        print(f"{name} ...", file=sys.stderr, flush=True)
        results = suite.results(repetitions)
    else:
        for comparison in suite.comparisons():
            print(f"{name}: {comparison.title} ...", file=sys.stderr, flush=True)
            results.append(compare(comparison, repetitions))
    quantities = suite.quantities() if hasattr(suite, "quantities") else []
    report = Report(name, suite.TITLE, command, repetitions, results, quantities)
    return replace(report, method=suite.METHOD) if hasattr(suite, "METHOD") else report


if __name__ == "__main__":
    main()
