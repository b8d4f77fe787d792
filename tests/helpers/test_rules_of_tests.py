"""Rules for tests that `make lint` checks line by line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_CHECK = Path(__file__).parents[2] / "tools" / "check_tests.py"
_BREAK = {
    "timeout = timedelta(seconds=1.5)": "short-timeout",
    "x = timedelta(milliseconds=40_000)": "short-timeout",
    "thread.join(5)": "short-timeout",
    "run(call, timeout=29.5)": "short-timeout",
    "options = fake_options(seconds=7)": "short-timeout",
    "threading.Timer(0.2, event.set)": "short-timeout",
    "signal.setitimer(signal.ITIMER_REAL, 0.7)": "short-timeout",
    'start("dp=3", "--timeout", "3")': "short-timeout",
    'start("dp=3 --timeout=3.5")': "short-timeout",
    "pytestmark = pytest.mark.timeout(200)": "short-test",
    "time.sleep(0.1)": "sleep",
    'program = "import time; time.sleep(1)"': "sleep",
    "assert time.monotonic() - start < LIMIT": "duration",
    "assert 1 <= seconds < 20": "duration",
    "port = probe.getsockname()[1]": "port",
    'environment = {"MASTER_PORT": "29500"}': "port",
}
_KEEP = (
    "timeout = timedelta(seconds=30)",
    "thread.join()",
    "pytestmark = [COMPILES, pytest.mark.timeout(3600)]",
    "run(call, timeout=300)",
    "text = f'seconds={_SECONDS}'",
    'start("dp=3", "--timeout", "40")',
    'start("dp=3", "--timeout", _TIMEOUT)',
    "sleep(folder)  # the helper that ends the default group",
    "assert seconds >= 2",
    'environment = {"MASTER_PORT": str(port)}',
)


def _found(path: Path, text: str) -> list[str]:
    path.write_text(text + "\n", encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(_CHECK), str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == bool(ended.stderr)
    return ended.stderr.splitlines()


@pytest.mark.parametrize(("line", "rule"), _BREAK.items())
def test_a_line_that_breaks_a_rule_is_found_unless_it_says_why(
    tmp_path: Path, line: str, rule: str
) -> None:
    path = tmp_path / "test_it.py"
    [found] = _found(path, line)
    assert found.startswith(f"{path}:1: {rule}: ")
    assert _found(path, f"{line}  # {rule}: it must elapse") == []
    assert _found(path, f"# Of one rank. {rule}: it must elapse\n{line}") == []
    assert len(_found(path, f"{line}  # {rule}")) == 1  # no reason
    assert len(_found(path, f"x = 1  # {rule}: of another line\n{line}")) == 1


@pytest.mark.parametrize("line", _KEEP)
def test_other_lines_are_left_alone(tmp_path: Path, line: str) -> None:
    assert _found(tmp_path / "test_it.py", line) == []
