"""Imports of `meshverse.parallel`: the modules it loads, and where its names are found."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import meshverse.parallel as parallel
from helpers.tiers import in_tiers
from meshverse.parallel import compat

_FOLDER = Path(parallel.__file__).parent
_COSTLY = {"torch.distributed.fsdp", "torch.distributed.tensor.parallel"}

# Names of other projects' functions, for programs that move over.
_OTHERS_NAMES = {
    "apply_fsdp2_sharding_recursively": "apply_fsdp_sharding_recursively",
    "nvfsdp_strategy_parallelize": "megatron_fsdp_strategy_parallelize",
}


# Answers each line, a program, with the modules that it imports beyond `import torch, meshverse`.
# Each runs in a fork, so that torch is imported once for all of them.
_SERVER = """
import json, os, sys, torch, meshverse
before = set(sys.modules)
for line in sys.stdin:
    if not os.fork():
        exec(json.loads(line))
        print(json.dumps([*(set(sys.modules) - before)]), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print(json.dumps("it failed"), flush=True)
"""


@pytest.fixture(scope="module")
def imported_by() -> Iterator[Callable[[str], set[str]]]:
    """The modules that a program imports."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None

        def ask(program: str) -> set[str]:
            print(json.dumps(program), file=server.stdin, flush=True)
            answer = json.loads(server.stdout.readline())
            assert answer != "it failed", program
            return set(answer)

        yield ask
        server.stdin.close()


@pytest.mark.long
def test_the_package_alone_imports_nothing(imported_by: Callable[[str], set[str]]) -> None:
    assert imported_by("import meshverse.parallel") == {"meshverse.parallel"}


@pytest.mark.parametrize(
    "names",
    in_tiers(
        [
            "ParallelismSizes, create_fsdp2_device_mesh, get_submesh, get_fsdp_dp_mesh",
            "CollectiveConfig, build_collective, MeshCollective",
            "import_class_from_path, destroy_dist_connection",
        ],
        ["ParallelismSizes, create_fsdp2_device_mesh, get_submesh, get_fsdp_dp_mesh"],
    ),
)
def test_what_needs_no_sharding_does_not_import_it(imported_by, names) -> None:
    imported = imported_by(f"from meshverse.parallel import {names}")
    assert not imported & _COSTLY
    assert imported > {"meshverse.parallel"}


@pytest.mark.long
def test_what_shards_imports_what_it_uses(imported_by: Callable[[str], set[str]]) -> None:
    assert imported_by("from meshverse.parallel import fsdp2_strategy_parallelize") > _COSTLY


def test_no_name_imports_another_extra(imported_by: Callable[[str], set[str]]) -> None:
    imported = imported_by(f"from meshverse.parallel import {', '.join(parallel.__all__)}")
    assert "meshverse.parallel.reshard.reshard" in imported
    others = ("meshverse.connection", "meshverse.hang", "meshverse.tools")
    assert not [module for module in imported if module.startswith(others)]


def test_every_public_name_is_there() -> None:
    for name in parallel.__all__:
        assert getattr(parallel, name).__module__.startswith("meshverse.parallel.")


def test_the_package_and_compat_and_config_are_all_there_is_to_import() -> None:
    files = {path.stem for path in _FOLDER.glob("*.py")}
    assert files == {"__init__", "compat", "config"}


def test_others_names_are_in_one_module_and_nowhere_else() -> None:
    assert sorted(compat.__all__) == sorted(_OTHERS_NAMES)
    for other, ours in _OTHERS_NAMES.items():
        assert getattr(compat, other) is getattr(parallel, ours)
        assert other not in parallel.__all__


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse((_FOLDER / "__init__.pyi").read_text())
    seen = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (listed,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert seen == parallel._HOME_OF
    assert sorted(seen) == sorted(parallel.__all__) == sorted(ast.literal_eval(listed))
    assert {*seen} <= set(dir(parallel))


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"'meshverse\.parallel' has no attribute 'no_such'"):
        parallel.no_such  # noqa: B018
    with pytest.raises(ImportError, match="no_such"):
        from meshverse.parallel import no_such  # noqa: F401


def test_no_import_is_hidden_elsewhere() -> None:
    """Under TYPE_CHECKING a cycle of imports would go unseen."""
    hiding = [path for path in _FOLDER.rglob("*.py") if "TYPE_CHECKING" in path.read_text()]
    assert not hiding
