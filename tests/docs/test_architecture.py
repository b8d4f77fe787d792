"""The subpackages in docs/architecture.md: what is drawn is what is checked, and what is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TOP = Path(__file__).parents[2]
_PACKAGE = _TOP / "python" / "meshverse"


_PAGE = (_TOP / "docs" / "architecture.md").read_text(encoding="utf-8")


def _picture() -> dict[str, str]:
    """Return the text beside each subpackage in the picture, highest first."""
    drawn = _PAGE.partition("<!-- subpackages -->")[2].partition("<!-- end of subpackages -->")[0]
    return dict(re.findall(r"^  (\w+)(?:/|\.py) +(.+)$", drawn, flags=re.MULTILINE))


_SETTINGS = tomllib.loads((_TOP / "pyproject.toml").read_text(encoding="utf-8"))
_LINTER = _SETTINGS["tool"]["importlinter"]
_CONTRACTS: dict[str, dict[str, Any]] = {
    contract["id"]: contract for contract in _LINTER["contracts"] if contract["type"] == "layers"
}


def _levels(layers: list[str]) -> list[set[str]]:
    return [set(layer.split(" | ")) for layer in layers]


_FORMER = {"doctor", "pictures", "planner", "topology"}  # places of parts of tools/


def test_the_subpackages_are_drawn_in_the_order_that_is_checked() -> None:
    drawn = list(_picture())
    levels = _levels(_CONTRACTS["subpackages"]["layers"])
    levels.remove(_FORMER)
    for level in levels:
        assert set(drawn[: len(level)]) == level
        del drawn[: len(level)]
    assert not drawn


def test_every_folder_and_file_of_the_package_is_drawn() -> None:
    subpackages = {path.parent.name for path in _PACKAGE.glob("*/__init__.py")}
    files = {path.stem for path in _PACKAGE.glob("*.py")} - {"__init__"}
    assert subpackages | files == set(_picture()) | _FORMER


def _lists_its_modules() -> dict[Path, set[str]]:
    """Return the modules and subpackages that the first docstring of each folder lists."""
    listed = {}
    for file in sorted(_PACKAGE.rglob("__init__.py")):
        items = re.findall(
            r"^- ((?:`\w+`,?\s+)*`\w+`):", file.read_text("utf-8"), flags=re.MULTILINE
        )
        if items:
            listed[file.parent] = set(re.findall(r"\w+", " ".join(items)))
    return listed


def test_a_folder_that_lists_its_modules_lists_all_of_them() -> None:
    listed = _lists_its_modules()
    assert _PACKAGE / "universe" in listed
    for folder, names in listed.items():
        files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert names == files | {path.parent.name for path in folder.glob("*/__init__.py")}, folder


def test_every_import_is_checked() -> None:
    assert set(_LINTER) == {"root_package", "contracts"}
    for contract in _CONTRACTS.values():
        assert contract["exhaustive"]
        known = {"id", "name", "type", "containers", "exhaustive", "layers"}
        assert set(contract) == known | ({"ignore_imports"} & set(contract))


def _is_of_an_extra(module: str) -> bool:
    return module.split(".")[1:2] in (["connection"], ["hang"], ["parallel"], ["tools"])


def test_only_imports_of_extras_by_the_core_are_excused() -> None:
    excused = dict[str, set[str]]()
    for one in _CONTRACTS["subpackages"]["ignore_imports"]:
        importer, _, imported = one.partition(" -> ")
        assert not _is_of_an_extra(importer)
        excused.setdefault(imported, set()).add(importer)
    # A universe and its meshes have each other as attributes, in annotations only.
    assert excused.pop("meshverse.device_mesh.device_mesh") == {
        "meshverse.universe.universe",
        "meshverse.universe.universe_meshes",
    }
    assert all(map(_is_of_an_extra, excused))


def test_parallel_may_import_no_other_subpackage() -> None:
    (public,) = (each for each in _LINTER["contracts"] if each["id"] == "parallel.public")
    subpackages = set().union(*_levels(_CONTRACTS["subpackages"]["layers"]))
    allowed = {"__main__", "_torch_compat", "locks", "parallel"} | _FORMER
    assert public["source_modules"] == ["meshverse.parallel"]
    assert set(public["forbidden_modules"]) == {
        f"meshverse.{subpackage}" for subpackage in subpackages - allowed
    }
    assert "ignore_imports" not in public


_CORE = _TOP / "csrc"
_CORE_FOLDERS = re.findall(r"^csrc/(\w*)/? +(.+)$", _PAGE, flags=re.MULTILINE)


def _core_places() -> dict[Path, tuple[int, int]]:
    """Where each file of the core is drawn: its subpackage, and its place from the left."""
    places = {}
    for subpackage, (folder, drawn) in enumerate(_CORE_FOLDERS):
        for level, names in enumerate(drawn.split(" > ")):
            for name in names.split(", "):
                for path in (_CORE / folder).glob(f"{name}.*"):
                    places[path] = subpackage, level
    return places


def test_every_file_of_the_core_is_drawn() -> None:
    files = {path for folder, _ in _CORE_FOLDERS for path in (_CORE / folder).glob("*.*")}
    assert _core_places().keys() == files
    not_drawn = {"fuzz", "tests"}  # which are no part of it
    folders = {path.name for path in _CORE.iterdir() if path.is_dir()}
    assert folders - not_drawn == {folder for folder, _ in _CORE_FOLDERS if folder}


def test_files_of_the_core_include_files_to_their_right_or_in_folders_below() -> None:
    places = _core_places()
    for path, place in places.items():
        for name in re.findall(r'^#include "(.+)"$', path.read_text("utf-8"), flags=re.MULTILINE):
            beside = path.parent / name
            included = beside if beside in places else _CORE / name
            is_own = included.with_suffix("") == path.with_suffix("")
            assert is_own or place < places[included], f"{path.name} includes {name}"
