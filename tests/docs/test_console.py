"""The commands of README and the documentation: they exist, and print what the pages show."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.pages import ROOT, blocks_of, pages
from meshverse.tools.commands.main import main

_FILES = {
    "cluster.json": '{"node": {"n0": "0-10239"}}',
    "/etc/slurm/topology.conf": "SwitchName=s0 Nodes=tux[0-3]\n",
}


def _commands() -> Iterator[tuple[str, str, str]]:
    """Where it stands, a command, and what the page shows that it prints."""
    for page in pages():
        for block in blocks_of(page):
            if block.language in ("console", "bash"):
                lines = block.text.replace("\\\n", "")
                prompts = r"(?m)^\$ (.*)\n((?:(?!\$ ).*\n)*)" if "$ " in lines else r"(?m)^(.*)\n()"
                for command, shown in re.findall(prompts, lines):
                    yield block.where, command.partition("  #")[0].strip(), shown


_COMMANDS = list(_commands())


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [(where, words) for where, words in ((w, c.split()) for w, c, _ in _COMMANDS) if words]
    asked = [(where, words[1]) for where, words in asked if words[0] == "make" and len(words) > 1]
    assert len(asked) > 3
    assert [one for one in asked if one[1] not in targets] == []


def test_files_of_commands_exist() -> None:
    named = [(where, path) for where, command, _ in _COMMANDS for path in _scripts(command)]
    assert len(named) > 1
    assert [one for one in named if not (ROOT / one[1]).exists()] == []


def _scripts(command: str) -> list[str]:
    return re.findall(r"(?:examples|benchmarks|tools)/\w+\.py", command)


@pytest.mark.long
@pytest.mark.parametrize("name", ["one_gpu", "trainer_views", "transformer", "worlds"])
def test_a_module_among_the_examples_says_that_it_is_one(name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("A module, not a program: ")


@pytest.mark.parametrize(
    ("command", "shown"),
    [pytest.param(c, s, id=f"{w} {c}") for w, c, s in _COMMANDS if c.startswith("meshverse plan")],
)
def test_a_plan_prints_what_the_page_shows(
    command: str, shown: str, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in _FILES.items():
        (tmp_path / name.rpartition("/")[2]).write_text(text)
        command = command.replace(name, name.rpartition("/")[2])
    assert main(shlex.split(command)[1:]) == 0
    printed = capsys.readouterr().out
    if shown:
        assert printed == shown
