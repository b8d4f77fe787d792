"""The examples in docstrings, which the site's reference shows: of the core and of the package."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import meshverse
from helpers.pages import ROOT
from meshverse import _core

_CLASSES = [value for value in vars(_core).values() if inspect.isclass(value)]
_MEMBERS = {
    f"{cls.__name__}.{name}": member
    for cls in _CLASSES
    for name, member in vars(cls).items()
    if not name.startswith("_")
}
_OF_CORE = {cls.__name__: cls for cls in _CLASSES} | _MEMBERS
_MODULES = [
    one.name
    for one in pkgutil.walk_packages(meshverse.__path__, "meshverse.")
    if one.name not in ("meshverse.__main__", "meshverse._core")
    # Former places of folders of tools/, which warn when they are imported.
    and one.name not in [f"meshverse.{name}" for name in meshverse._FORMER_FOLDERS]
]


@pytest.fixture
def no_world() -> Iterator[None]:
    """Whatever an example leaves of a world is taken down."""
    hook = sys.excepthook  # torch wraps it in every world
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = hook


def _check(text: str, names: dict[str, Any], name: str) -> None:
    examples = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    failures: list[str] = []
    doctest.DocTestRunner().run(examples, out=failures.append)
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", _OF_CORE)
def test_docstrings_of_the_core(name: str) -> None:
    text = inspect.getdoc(_OF_CORE[name])
    assert text
    _check(text, dict(vars(_core)), name)


def test_there_are_examples() -> None:
    texts = [inspect.getdoc(value) or "" for value in _OF_CORE.values()]
    assert sum(">>>" in text for text in texts) >= 15


@pytest.mark.parametrize("name", _MODULES)
def test_examples_of_the_package(name: str, no_world: None) -> None:
    module = importlib.import_module(name)
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        failures: list[str] = []
        doctest.DocTestRunner().run(test, out=failures.append)
        assert not failures, "".join(failures)


def test_no_message_names_a_file_that_an_installed_package_lacks() -> None:
    named = []
    for path in (ROOT / "python" / "meshverse").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        explained = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        named += [
            (path.name, node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if id(node) not in explained  # a docstring
            if any(name in node.value for name in ("docs/", "examples/", ".md"))
        ]
    assert named == []
