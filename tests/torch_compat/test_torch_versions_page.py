"""docs/torch_versions.md: it tells of every private name that the source reads, and of no other."""

from __future__ import annotations

import re
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.private_names import COMPAT, names_read
from helpers.worlds import fake_world
from meshverse import DeviceMesh
from meshverse._torch_compat import private_names
from meshverse.device_mesh.device_mesh import _own_attributes

_PAGE = (Path(__file__).parents[2] / "docs" / "torch_versions.md").read_text(encoding="utf-8")
_INHERITED = {"_get_root_mesh"}  # of our meshes, by mesh/base.py
_VERSIONS = {"2.11", "2.12", "2.13", "2.14", "2.15"}


def _rows(heading: str) -> list[list[str]]:
    """The cells of all tables below a heading."""
    part = _PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def _listed() -> dict[str, tuple[set[str], str]]:
    """Name -> the files that read it, and since when torch has it."""
    rows = _rows("Private names that Meshverse reads")
    seen = {row[0].strip("`").rpartition(".")[2]: (set(row[1].split(", ")), row[2]) for row in rows}
    assert len(seen) == len(rows), "a name is seen of twice"
    return seen


def test_the_page_tells_who_reads_each_name() -> None:
    assert {name: files for name, (files, _) in _listed().items()} == names_read()


def test_the_page_tells_since_when_and_what_replaces_it() -> None:
    for row in _rows("Private names that Meshverse reads"):
        assert row[2] in _VERSIONS, row
        assert len(row[3]) > 5, row


def test_names_that_are_checked_at_import_are_listed() -> None:
    lists = private_names._PRIVATE_NAMES + private_names._PRIVATE_NAMES_SINCE_2_12
    listed = {name for _, name in lists if not name.startswith("__")}
    while_compiling = private_names._PRIVATE_NAMES_WHILE_COMPILING.values()
    listed.update(name for names in while_compiling for name in names)
    listed -= _INHERITED
    assert listed <= names_read().keys(), "the list has names that nobody reads"
    assert listed <= _listed().keys()
    newer = {name for name, (_, since) in _listed().items() if since > "2.12"}
    assert listed.isdisjoint(newer), "a torch without it would be refused"


def test_every_file_of_the_folder_is_read() -> None:
    assert {file for files in names_read().values() for file in files} < {
        file.stem for file in COMPAT.glob("*.py")
    }


def test_the_page_tells_what_torch_reads_of_our_meshes() -> None:
    cells = [row[0] for row in _rows("Private names that torch reads of our meshes")]
    result = set(re.findall(r"`(\w+)`", " ".join(cells)))
    with fake_world(8, 5):
        stock = StockDeviceMesh("cpu", list(range(8)), mesh_dim_names=("a",))
        of_stock = {*vars(stock), *dir(StockDeviceMesh)}
    ours = _own_attributes(DeviceMesh).union(vars(DeviceMesh))
    private = {name for name in ours if name.startswith("_") and not name.startswith("__")}
    assert result >= private & of_stock
    assert result <= private
