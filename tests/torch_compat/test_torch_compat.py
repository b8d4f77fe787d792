"""The private names of torch that Meshverse relies on: all listed, all there."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from helpers.private_names import PRIVATE_MODULES
from meshverse._torch_compat import private_names as compat

_OWNERS = {
    name: getattr(compat, name)
    for name in ("c10d", "opaque_object", "python_dispatch", "stock_module", "StockDeviceMesh")
}
# Modules of torch that are private themselves: whatever is used of them counts.
_PRIVATE_OWNERS = {
    name: getattr(compat, name)
    for name in ("c10d_core", "c_extension", "fake_tensor", "functorch", "guards")
}
# The same, as a program that compiles has imported them.
_WHILE_COMPILING = {
    alias: module
    for alias, module in PRIVATE_MODULES.items()
    if module in compat._PRIVATE_NAMES_WHILE_COMPILING
}


def _private_names_used() -> set[tuple[str, str]]:
    """(owner, name) of every private attribute of a module or class of torch in the source."""
    sources = Path(compat.__file__).parent.glob("*.py")
    return {
        (node.value.id, node.attr)
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (
            (node.value.id in _OWNERS and node.attr.startswith("_"))
            or node.value.id in _PRIVATE_OWNERS
        )
    }


@pytest.mark.parametrize(
    ("owner", "name"),
    compat._PRIVATE_NAMES,
    ids=lambda value: value if isinstance(value, str) else value.__name__.rpartition(".")[2],
)
def test_a_listed_name_is_there(owner: object, name: str) -> None:
    assert hasattr(owner, name)


def test_every_name_used_is_listed() -> None:
    names = compat._PRIVATE_NAMES + compat._PRIVATE_NAMES_SINCE_2_12
    listed = {(id(owner), name) for owner, name in names}
    used = _private_names_used()
    assert len(used) > 10
    missing = {
        f"{owner}.{name}"
        for owner, name in used
        if (id({**_OWNERS, **_PRIVATE_OWNERS}[owner]), name) not in listed
    }
    assert missing == set()


@pytest.mark.parametrize("module", compat._PRIVATE_NAMES_WHILE_COMPILING)
def test_a_name_that_is_read_while_compiling_is_there(module: str) -> None:
    names = compat._PRIVATE_NAMES_WHILE_COMPILING[module]
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


def test_every_name_that_is_read_while_compiling_is_listed() -> None:
    source = (Path(compat.__file__).parent / "one_graph.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    read = {(ast.unparse(node.value), node.attr) for node in nodes}
    used = {(_WHILE_COMPILING[owner], name) for owner, name in read if owner in _WHILE_COMPILING}
    listed = compat._PRIVATE_NAMES_WHILE_COMPILING.items()
    assert len(used) > 5
    assert used <= {(module, name) for module, names in listed for name in names}


def test_a_torch_without_a_name_is_refused_in_one_sentence(monkeypatch) -> None:
    compat.require_supported_torch()
    names = (*compat._PRIVATE_NAMES, (compat.c10d, "_gone_for_good"))
    monkeypatch.setattr(compat, "_PRIVATE_NAMES", names)
    with pytest.raises(ImportError, match=r"torch 2\.11 and newer.*_gone_for_good"):
        compat.require_supported_torch()
