"""Find lines of tests and examples whose result depends on how fast or how busy the machine is.

A line that must be so says why, after the rule's name, on it or in the comment above it:

    timeout = timedelta(seconds=3)  # short-timeout: it must elapse
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Rule(NamedTuple):
    """A pattern of a line, and what to write instead.

    Attributes:
        name: what a comment that allows the line begins with.
        pattern: pattern of the line. If it has a group, that is a number of seconds.
        cure: what is right.
        least_seconds: from which number of seconds on a line is right.
    """

    name: str
    pattern: re.Pattern[str]
    cure: str
    least_seconds: float = 30


_RULES = (
    Rule(
        "short-timeout",
        re.compile(
            r"\bseconds=(\d[\d._]*)\b|timedelta\(milliseconds=|timedelta\(microseconds="
            r"|\.(?:join|result|wait|acquire)\((?:timeout=)?(\d[\d._]*)\)|\btimeout=(\d[\d._]*)\b"
            r"|\bTimer\((\d[\d._]*),|\bsetitimer\([^,]+, (\d[\d._]*)"
            r"|--timeout(?:=|[\"']?,? [\"']?)(\d[\d._]*)"
        ),
        "a timeout of at least 30 s, which elapses only if the test fails",
    ),
    Rule(
        "short-test",
        re.compile(r"\bmark\.timeout\((?:timeout=)?(\d[\d._]*)[,)]"),
        "what every test has: on a busy machine, imports alone can take minutes",
        1800,
    ),
    Rule(
        "sleep",
        re.compile(r"\bsleep\((?!folder)"),
        "wait for an event, a file or a key that says what the others have done",
    ),
    Rule(
        "duration",
        re.compile(
            r"assert.*(?:monotonic|perf_counter|process_time|time\.time)\(\).*<"
            r"|assert.*\b\w*seconds\b.*<|assert.*\b(?:took|elapsed|waited)\b.*<"
        ),
        "compare what happened, or measure it in benchmarks/",
    ),
    Rule(
        "port",
        re.compile(r"\bgetsockname\(\)|MASTER_PORT=?[\"': ]+\d{2,}"),
        "let the side that listens choose the port (0), and hand it over while it is bound",
    ),
)


def findings(path: Path) -> Iterator[str]:
    """Yield a line for each line that breaks a rule: where it is, and what to write instead."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        above = lines[number - 2].strip() if number > 1 else ""
        for rule in _RULES:
            said = line + above if above.startswith("#") else line
            if _breaks(rule, line) and not re.search(rf"# .*\b{rule.name}: \w+", said):
                yield f"{path}:{number}: {rule.name}: {rule.cure}"


def _breaks(rule: Rule, line: str) -> bool:
    for found in rule.pattern.finditer(line):
        seconds = next((float(number) for number in found.groups() if number), None)
        if seconds is None or seconds < rule.least_seconds:
            return True
    return False


if __name__ == "__main__":
    found = [line for name in sys.argv[1:] for line in findings(Path(name))]
    sys.exit("\n".join(found) or None)
