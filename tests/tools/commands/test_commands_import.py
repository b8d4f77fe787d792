"""Imports of each command, in a process of its own, and the package in such a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshverse
from helpers.forked import SECONDS
from helpers.hang_catalogue import CATALOGUE
from helpers.recorded_job import Format

_SCRIPT = "import sys; from meshverse.tools.commands.main import main; sys.exit(main())"


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Return the modules that a process imported which ran with `-X importtime`."""
    return set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))


@pytest.fixture
def dumps(tmp_path: Path) -> str:
    """Folder with the dumps of a hang of which one rank is missing."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    CATALOGUE[0].job.write(folder, Format("nccl"))
    return str(folder)


@pytest.fixture(params=["module", "script"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """Arguments of Python that start the command, as a module or as a script of that name."""
    if request.param == "module":
        return ["-m", "meshverse"]
    (tmp_path / "meshverse").write_text(_SCRIPT)
    return [str(tmp_path / "meshverse")]


def test_a_hang_is_read_without_torch_by_few_modules(start: list[str], dumps: str) -> None:
    done = _run("-X", "importtime", *start, "hang", dumps)
    imported = _imported(done)
    ours = {name for name in imported if name.partition(".")[0] == "meshverse"}
    assert (done.returncode, "torch" in imported) == (1, False), done.stderr
    assert "Verdict: rank 3" in done.stdout
    assert "meshverse.hang.verdicts" in ours
    assert len(ours) <= 13, sorted(ours)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("--version", 0),
        ("--help", 0),
        ("plan dp=4,tp=8 --json", 0),
        ("plan --degrees dp_shard=4,tp=2,ep=2 --svg {folder}/plan.svg", 0),
        ("plan dp=4,tp=8 --world-size 9", 2),
        ("hang {folder}/dumps --mesh x=4", 1),
        ("hang nowhere", 2),
        ("run nowhere.py --lr 1", 2),
        ("palm", 2),
    ],
)
def test_a_command_that_needs_no_torch_does_not_import_it(
    arguments: str, status: int, dumps: str, tmp_path: Path
) -> None:
    words = arguments.format(folder=tmp_path).split()
    done = _run("-X", "importtime", "-m", "meshverse", *words)
    imported = _imported(done)
    assert done.returncode == status, done.stderr
    assert "meshverse.tools.commands.main" in imported
    assert "torch" not in imported


@pytest.mark.long
def test_nodes_are_planned_with_torch() -> None:
    done = _run("-X", "importtime", "-m", "meshverse", "plan", "dp=4,tp=8", "--node-size", "8")
    assert done.returncode == 0, done.stderr
    assert "nodes per group" in done.stdout
    assert "torch" in _imported(done)


_USES_NAMES = """
import meshverse
assert sorted(set(meshverse.__all__) - set(dir(meshverse))) == []
print(sorted(name for name in meshverse.__all__ if not hasattr(meshverse, name)))
print(meshverse.DeviceMesh.__name__, meshverse.tools.planner.plan.__name__, meshverse.hang.__name__)
from meshverse import *
from meshverse import no_such_name
"""


def test_a_program_that_a_command_runs_has_all_public_names(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_USES_NAMES)
    done = _run("-m", "meshverse", "run", str(tmp_path / "program.py"))
    assert done.stdout == "[]\nDeviceMesh plan meshverse.hang\n"
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("ImportError: cannot import name 'no_such_name' from 'meshverse'")
    )


@pytest.mark.long
def test_a_program_that_a_command_runs_has_what_the_import_does(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import threading, torch\n"
        "print([one.name for one in threading.enumerate()][1:])\n"
        "print(any('load_mesh' in str(one) for one in torch.serialization.get_safe_globals()))\n"
    )
    command = ("-m", "meshverse", "run", str(tmp_path / "program.py"))
    assert (
        _run(*command, MESHVERSE_WATCH="60").stdout
        == "['meshverse watch', 'meshverse watch, alone']\nTrue\n"
    )
    assert _run(*command, MESHVERSE_WATCH="").stdout == "[]\nTrue\n"


@pytest.mark.long
def test_a_program_whose_arguments_look_like_a_command_imports_all_at_once(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import meshverse, sys; print('DeviceMesh' in vars(meshverse))")
    done = _run(str(program), "-m", "meshverse")
    assert done.stdout == "True\n", done.stderr


def test_every_public_name_can_be_seen() -> None:
    assert [name for name in meshverse.__all__ if not hasattr(meshverse, name)] == []
    assert {"hang", "parallel", "tools", *meshverse.__all__} == set(dir(meshverse))
