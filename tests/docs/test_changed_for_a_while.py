"""State of others that is changed for a while: every such place is in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_TOP = Path(__file__).parents[2]
_PACKAGE = _TOP / "python" / "meshverse"

# Calls that change state of the process.
_CALLS = re.compile(
    r"signal\.signal|gc\.(enable|disable|freeze|unfreeze)|os\.(putenv|chdir|umask|environ\.\w+)"
    r"|torch\.((set_|use_)\w+|random\.fork_rng|(default_generator\.)?manual_seed)"
    r"|warnings\.(catch_warnings|simplefilter|filterwarnings)"
    r"|sys\.set\w+|restored\.callback"
)
_READS = {"os.environ.get", "os.environ.items"}


def _restored(node: ast.AST) -> Iterator[str]:
    """Yield what a statement of a `finally` block changes of an object other than `self`."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"update", "pop", "reset", "clear"}
    ):
        yield ast.unparse(node)
    for target in targets:
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            yield ast.unparse(target)


def _changes(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if _CALLS.fullmatch(name) and name not in _READS:
                yield name
        if isinstance(node, ast.Assign):
            for target in map(ast.unparse, node.targets):
                if re.match(r"(sys\.|os\.environ\[)", target):
                    yield target
        if isinstance(node, ast.Try):
            for statement in node.finalbody:
                for inner in ast.walk(statement):
                    yield from (w for w in _restored(inner) if not w.startswith("self."))


def _places() -> dict[str, list[str]]:
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (changed := list(_changes(node))):
                found[f"{name}: {node.name}"] = changed
    return found


def test_every_place_is_in_the_table() -> None:
    page = (_TOP / "docs" / "architecture.md").read_text("utf-8")
    table = page.partition("## State of others")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(.+?)` \|", table, flags=re.MULTILINE)) == set(_places())
