"""Messages name the nearest known name, the line of the user's program, and how to start it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked import Forked
from helpers.worlds import in_worlds
from meshverse import DeviceMesh, Topology, init_device_mesh, isolate
from meshverse.parallel import get_flat_mesh, get_submesh
from meshverse.program_line import program_line
from meshverse.tools.commands.main import main

_AXES = ("dp_shard", "tp")


def _mesh(**extra: Any) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_AXES, **extra)
    mesh.flatten("everything")
    return mesh


# --- did you mean --------------------------------------------------------------------------------

_MISSPELLED: dict[str, Callable[[DeviceMesh], object]] = {
    "slice": lambda mesh: mesh["dp_shrad"],
    "slice of two": lambda mesh: mesh["dp_shrad", "tp"],
    "get_group": lambda mesh: mesh.get_group("dp_shrad"),
    "get_local_rank": lambda mesh: mesh.get_local_rank("dp_shrad"),
    "_get_all_submeshes": lambda mesh: mesh._get_all_submeshes("dp_shrad"),
    "unflatten": lambda mesh: mesh.unflatten("dp_shrad", (1, 2), ("a", "b")),
    "backend_override": lambda mesh: _mesh(backend_override={"dp_shrad": "gloo"}),
    "backend_override of unflatten": lambda mesh: mesh.unflatten(
        "tp", (2, 2), ("dp_shard2", "b"), backend_override={"dp_shrad2": "gloo"}
    ),
    "isolate": lambda mesh: _mesh(isolate={"dp_shrad": "mine"}),
    "traffic": lambda mesh: init_device_mesh(
        "cpu",
        (2, 4),
        mesh_dim_names=_AXES,
        topology=Topology.uniform(8, node_size=4),
        traffic={"dp_shrad": 1.0},
    ),
    "draw": lambda mesh: mesh.draw("dp_shrad"),
    "draw of the universe": lambda mesh: mesh.universe.draw("dp_shrad"),
    "warm_up": lambda mesh: mesh.universe.warm_up(["dp_shrad"]),
    "suspend": lambda mesh: mesh.universe.suspend(["dp_shrad"]),
    "memory_stats": lambda mesh: mesh.universe.memory_stats(["dp_shrad"]),
    "get_flat_mesh": lambda mesh: get_flat_mesh(mesh, "dp_shrad"),
    "get_submesh": lambda mesh: get_submesh(mesh, ("dp_shrad", "tp")),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("how", _MISSPELLED)
def test_an_unknown_axis_comes_with_the_nearest(how: str) -> None:
    mesh = _mesh()
    with pytest.raises((KeyError, RuntimeError, ValueError)) as caught:
        _MISSPELLED[how](mesh)
    assert "Did you mean 'dp_shard" in str(caught.value)


@pytest.mark.usefixtures("world")
def test_flattened_axes_are_near_too() -> None:
    mesh = _mesh()
    for ask in (mesh.get_group, mesh.draw, lambda name: get_flat_mesh(mesh, name)):
        with pytest.raises(KeyError, match=r"Did you mean 'everything'\?"):
            ask("evrything")


@pytest.mark.parametrize(
    "arguments",
    [["--degrees", "dp_shrad=4,tp=2"], ["dp_shard=4,tp=2,loss=dp_shrad*tp"]],
)
def test_the_plan_names_the_nearest(arguments: list[str], capsys: Any) -> None:
    assert main(["plan", *arguments]) == 2
    assert "Did you mean 'dp_shard'?" in capsys.readouterr().err


@pytest.mark.usefixtures("world")
def test_a_flattened_axis_is_drawn() -> None:
    mesh = _mesh()
    drawn = mesh.draw("everything")
    assert "everything" in str(drawn)
    assert str(drawn) == str(mesh["tp"].draw("everything"))


# --- the user's line -----------------------------------------------------------------------------


def test_a_line_of_a_program_without_a_file() -> None:
    names: dict[str, Any] = {"program_line": program_line}
    exec("\n\nline = program_line()", names)
    assert names["line"] == "<string>:3"


def test_a_line_is_not_one_of_an_installed_package(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages" / "helper"
    names: dict[str, Any] = {"program_line": program_line}
    exec(compile("def call(): return program_line()", str(folder / "lib.py"), "exec"), names)
    assert names["call"]().startswith(f"{__file__}:")
    # Where the program itself is installed, it is the line to tell.
    seen: list[str] = []
    names["seen"] = seen
    program = "import threading\nthread = threading.Thread(target=lambda: seen.append(call()))"
    exec(compile(program, str(folder / "train.py"), "exec"), names)
    names["thread"].start()
    names["thread"].join()
    assert seen == [f"{folder / 'lib.py'}:1"]


def test_a_line_of_a_thread() -> None:
    seen: list[str] = []

    def run() -> None:
        seen.append(program_line())

    for target in (run, lambda: run()):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert all(line.startswith(f"{__file__}:") for line in seen)
    arguments = {"target": lambda line: seen.append(line()), "args": (program_line,)}
    thread = threading.Thread(**arguments, name="x")
    thread.start()
    thread.join()
    assert seen[-1].startswith(f"{__file__}:")


def test_a_line_under_torch_compile() -> None:
    line_untraced = torch.compiler.disable(program_line)

    def step(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        return tensor * 2, line_untraced()

    _, line = torch.compile(step, backend="eager")(torch.ones(2))
    assert line == f"{__file__}:{step.__code__.co_firstlineno + 1}"


# --- the log -------------------------------------------------------------------------------------


def _logged(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("meshv")]


@in_worlds((10_240, 0))
def test_the_log_tells_each_group_and_why_it_is_new(world: Any, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, logger="meshverse")
    mesh = init_device_mesh("cpu", (1280, 8), mesh_dim_names=_AXES)
    with isolate("mine"):
        mesh["tp"].get_group()
        mesh.flatten("all").get_group()
    init_device_mesh("cpu", (8,), mesh_dim_names=("other",), timeout=timedelta(hours=1))
    init_device_mesh("cpu", (1280, 8), mesh_dim_names=_AXES, lazy=True).get_group("tp")
    lines = [line for line in _logged(caplog) if line.startswith("process group of axis")]
    shard, tp, mine, all_ranks, other, lazy = lines
    assert "axis 'dp_shard' with ranks [0, 8, 16, 24, 32, 40, ... 10232]" in shard
    assert "created by its members, requested at " in shard
    assert f"{__file__}:" in shard
    assert "the first group of these ranks" in tp
    assert "Not shared with axis 'tp', which has options" in mine
    assert "Not shared with the default group, which has options 'fake', timeout=1800s" in all_ranks
    assert "Not shared with axis 'tp', which has options" in other
    assert "created by its members at first use" in lazy
    assert "of a mesh in another universe, created without universe=" in lazy
    assert max(map(len, lines)) < 500


@in_worlds((10_240, 777))
def test_the_log_has_one_line_a_group_and_not_one_a_rank(world: Any, caplog: Any) -> None:
    # Rank 777 is the first of no group of these but of the one along "one".
    caplog.set_level(logging.DEBUG, logger="meshverse")
    mesh = init_device_mesh("cpu", (1280, 8), mesh_dim_names=_AXES)
    assert _logged(caplog) == []
    mesh.unflatten("tp", (8, 1), ("eight", "one"))
    [line] = _logged(caplog)
    assert "axis 'one' with ranks [777]" in line


# --- how to start --------------------------------------------------------------------------------


def test_a_program_without_a_launcher_gets_an_error_that_says_how_to_start(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from meshverse import init_device_mesh\ninit_device_mesh('cpu', (2, 2))\n")
    unset = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    status, _, err = Forked([str(script)], env=environment).communicate()
    assert status == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("ValueError: Error initializing torch.distributed using env://")
    assert (
        "Start the program with a launcher, such as `torchrun --nproc-per-node 4 train.py`" in last
    )
