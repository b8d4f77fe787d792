"""How calls run: docs/journeys.md has the files and functions that each call goes through.

With MESHVERSE_WRITE_TABLES, the tables are written instead.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import meshverse
from helpers.crew import Crew
from meshverse.agreement import rendezvous
from meshverse.universe.universe_meshes import UniverseMeshes

_PAGE = Path(__file__).parents[2] / "docs" / "journeys.md"
_PACKAGE = str(Path(meshverse.__file__).parent) + os.sep
_TORCH = "2.13"  # of the tables; another one may need other functions of `_torch_compat`

_HAS_NAMES = sys.version_info >= (3, 11)  # in code objects, those of the classes
_Path = dict[str, list[str]]  # by file, the functions in the order of their first call


class _Seen:
    """The functions of the package that are called, until c10d is asked for a process group.

    What a rank does while it waits for others in a rendezvous depends on how long that takes, and
    is left out.
    """

    def __init__(self) -> None:
        self.files: _Path = {}
        self._is_over = False
        self._wait = rendezvous._Attempt._wait.__code__
        self._waiting: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code is self._wait and event in ("call", "return"):
            self._waiting = frame if event == "call" else None
        elif event == "call" and not self._is_over and self._waiting is None:
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            if code.co_filename.startswith(_PACKAGE) and "<" not in name.replace("<locals>", ""):
                file = code.co_filename.removeprefix(_PACKAGE).replace(os.sep, "/")
                names = self.files.setdefault(file, [])
                if name not in names:
                    names.append(name)

    def stop(self) -> None:
        self._is_over = True


@contextmanager
def _seen() -> Iterator[_Seen]:
    seen = _Seen()
    create = c10d._new_process_group_helper

    def first_stop(*given: Any, **named: Any) -> Any:
        seen.stop()
        return create(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", first_stop)
        threading.setprofile(seen)  # creation on gloo takes place in another thread
        sys.setprofile(seen)
        try:
            yield seen
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]


_Mesh = meshverse.DeviceMesh


def _mesh(**options: Any) -> _Mesh:
    names = ("dp", "tp")
    return meshverse.init_device_mesh("cpu", (2, 2), mesh_dim_names=names, **options)


def _mesh_with_options() -> _Mesh:
    return _mesh(backend_override={"tp": ("gloo", dist.ProcessGroupGloo._Options())})


def _mesh_with_slice() -> _Mesh:
    mesh = _mesh()
    mesh["tp"]
    return mesh


def _flat() -> _Mesh:
    return meshverse.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))


def _unflatten(mesh: _Mesh) -> None:
    mesh._unflatten("world", (2, 2), ("dp", "tp"))


def _unflattened() -> _Mesh:
    mesh = _flat()
    _unflatten(mesh)
    return mesh


class _Journey(NamedTuple):
    """A call of the page.

    Attributes:
        prepare: what is done before.
        call: the call, with what `prepare` returned.
        n_files: number of files that it may go through.
        n_functions: number of functions of them.
        beyond: the call whose files and functions its table does not list again.
    """

    prepare: Callable[[], Any]
    call: Callable[[Any], Any]
    n_files: int
    n_functions: int
    beyond: str = ""


_JOURNEYS = {
    "a slice, the first time": _Journey(_mesh, lambda mesh: mesh["tp"], 6, 21),
    "a slice, again": _Journey(_mesh_with_slice, lambda mesh: mesh["tp"], 1, 1),
    "init_device_mesh": _Journey(lambda: None, lambda _: _mesh(), 26, 148),
    "init_device_mesh with options": _Journey(
        _mesh, lambda _: _mesh_with_options(), 26, 128, "init_device_mesh"
    ),
    "unflatten, known groups": _Journey(_unflattened, _unflatten, 5, 13),
    "unflatten, a new group": _Journey(_flat, _unflatten, 19, 92),
}


def _cross(name: str) -> _Path:
    journey = _JOURNEYS[name]
    before = journey.prepare()
    dist.barrier()
    with _seen() as seen:
        made = journey.call(before)
    dist.barrier()
    del made, before
    return seen.files


def _together(of_ranks: list[_Path]) -> _Path:
    """Join the paths of all ranks: the last one in a rendezvous does what the others do not."""
    files: _Path = {}
    for path in of_ranks:
        for file, names in path.items():
            known = files.setdefault(file, [])
            known += [each for each in names if each not in known]
    return files


def _table(path: _Path) -> str:
    lines = ["| file | functions |", "|---|---|"]
    for file, names in path.items():
        functions = ", ".join(f"`{each.replace('.<locals>', '')}`" for each in names)
        lines.append(f"| `{file}` | {functions} |")
    return "\n".join(lines)


def _beyond(path: _Path, first: dict[str, set[str]]) -> _Path:
    """Return the path without the functions of another call's table."""
    cells = {file: set(functions) for file, functions in first.items()}
    left = {
        file: [
            each
            for each in names
            if f"`{each.replace('.<locals>', '')}`" not in cells.get(file, ())
        ]
        for file, names in path.items()
    }
    return {file: names for file, names in left.items() if names}


def _between(name: str) -> re.Pattern[str]:
    begin, end = re.escape(f"<!-- journey: {name} -->\n"), re.escape("<!-- end of journey -->")
    return re.compile(f"(?<={begin}).*?(?={end})", flags=re.DOTALL)


def _cells(table: str) -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", table, flags=re.MULTILINE)
    return {file: set(functions.split(", ")) for file, functions in rows}


@pytest.mark.processes
@pytest.mark.parametrize("name", _JOURNEYS)
def test_a_call_goes_through_no_more_functions(fresh_crew: Crew, name: str) -> None:
    path = _together(fresh_crew.run(_cross, 4, name))  # without what earlier tests cached
    journey, between = _JOURNEYS[name], _between(name)
    page = _PAGE.read_text(encoding="utf-8")
    listed = path
    if journey.beyond and (first := _between(journey.beyond).search(page)):
        listed = _beyond(path, _cells(first[0]))
    if "MESHVERSE_WRITE_TABLES" in os.environ:
        written = between.sub(lambda _: f"\n{_table(listed)}\n\n", page, count=1)
        _PAGE.write_text(written, encoding="utf-8")
    elif _HAS_NAMES and torch.__version__.startswith(_TORCH) and (found := between.search(page)):
        assert _cells(found[0]) == _cells(_table(listed))
    assert len(path) <= journey.n_files
    assert sum(map(len, path.values())) <= journey.n_functions


def test_the_spine_goes_through_the_functions_of_the_table() -> None:
    page = _PAGE.read_text(encoding="utf-8")
    found = _between("init_device_mesh").search(page)
    assert found
    cells = _cells(found[0])
    recorded = {(file, name.strip("`")) for file, names in cells.items() for name in names}
    spine = re.search(r"```\n(init_device_mesh .+?)```", page, flags=re.DOTALL)
    assert spine
    calls = re.findall(r"^ *([\w.]+)(?: +(\w[\w/]+\.py))?", spine[1], flags=re.MULTILINE)
    file, missing = "", []
    for name, its_file in calls:
        file = its_file or file
        if (file, name) not in recorded:
            missing.append(name)
    assert missing == ["DeviceMesh._take_group_names", "UniverseMeshes.add"]  # after c10d's call
    assert callable(_Mesh._take_group_names)
    assert callable(UniverseMeshes.add)


def test_every_table_of_the_page_is_recorded() -> None:
    tables = re.findall(r"<!-- journey: (.+) -->", _PAGE.read_text(encoding="utf-8"))
    assert set(tables) == set(_JOURNEYS) - {"a slice, again"}
