"""The commands of README and the documentation: they exist, and print what the pages show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.forked import SECONDS
from helpers.hang_catalogue import CATALOGUE
from helpers.pages import ROOT, blocks_of, pages
from helpers.recorded_job import BEGIN, Format
from meshverse.tools.commands.main import _COMMANDS as _NAMES
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


def _is_ours(command: str, *names: str) -> bool:
    return any(f"meshverse {name}" in command for name in names)


def test_every_command_that_is_shown_exists() -> None:
    shown = [(where, command) for where, command, _ in _COMMANDS if _is_ours(command, "")]
    wrong = [
        (where, command)
        for where, command in shown
        if command.split()[0] in ("meshverse", "torchrun") and not _is_ours(command, *_NAMES)
    ]
    assert len(shown) > 10
    assert wrong == []


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


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param(c, s, id=f"{w} {c}")
        for w, c, s in _COMMANDS
        if c.startswith("meshverse hang /tmp/dumps")
    ],
)
def test_dumps_give_what_the_page_shows(command: str, shown: str, tmp_path, capsys) -> None:
    CATALOGUE[0].job.write(tmp_path, Format("nccl"))
    for dump in tmp_path.iterdir():
        os.utime(dump, (BEGIN + 602, BEGIN + 602))
    assert main(shlex.split(command.replace("/tmp/dumps", str(tmp_path)))[1:]) == 1
    printed = capsys.readouterr().out
    assert "Verdict: rank 3 (x=3) has not called it" in printed
    if shown:
        assert printed == shown


_TRAINS = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for names in ("ab", "cd")]
print(f"{type(meshes[0]).__module__} {sys.argv[1:]}\\n", end="", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, id=c)
        for w, c, _ in _COMMANDS
        if c.startswith("torchrun") and "commands.md" in w
    ],
)
def test_torchrun_starts_the_command_as_the_page_shows(command: str, tmp_path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    words = [*shlex.split(command)[1:]]
    if _is_ours(command, "doctor"):  # its own timeout is for a machine with nothing else to do
        words += ["--timeout", str(SECONDS)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(
        torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    if _is_ours(command, "doctor"):
        assert done.stdout.endswith("\nNo problem.\n")
        assert done.stdout.count("axes ") == 1  # of one rank
    else:
        assert done.stdout.count("meshverse.device_mesh [") == 4
        assert done.stderr.count("meshverse run: rank 0 of 4.") == 1


@pytest.mark.long
@pytest.mark.processes
def test_torchrun_ends_with_1_whatever_the_status_of_the_command(tmp_path) -> None:
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m meshverse doctor dp=3"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"exitcode  : 2 \(pid: \d+\)", done.stderr)
    assert done.stderr.count("meshverse doctor: ") == 1
