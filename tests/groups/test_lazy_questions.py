"""With lazy groups, what only asks about a mesh or a rank's place in it makes no process group."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from helpers.asking import (
    OF_MESH,
    OF_MESH_BY_OPERATORS,
    OF_PARALLEL,
    OF_TORCH,
    OF_UNIVERSE,
    OF_UNIVERSE_INSIDE,
    USES_GROUPS_OF_MESH,
    USES_GROUPS_OF_UNIVERSE,
    Question,
    lazy_cube,
    lazy_meshes,
)
from helpers.worlds import groups_created, in_worlds
from meshverse import DeviceMesh, Universe

_TABLES = {
    "users, of a mesh": OF_MESH,
    "users, by operators": OF_MESH_BY_OPERATORS,
    "users, of a universe": OF_UNIVERSE,
    "inside of a universe": OF_UNIVERSE_INSIDE,
    "torch": OF_TORCH,
}
_ALL_QUESTIONS = [
    pytest.param(question, id=f"{table}: {name}")
    for table, questions in _TABLES.items()
    for name, question in questions.items()
]
in_several_places = in_worlds((8, 0), (8, 5))


@in_several_places
@pytest.mark.parametrize("question", _ALL_QUESTIONS)
def test_of_every_kind_of_mesh(world, question: Question) -> None:
    with groups_created(0):
        meshes = lazy_meshes()
        for mesh in meshes.values():
            question(mesh)
    with groups_created(3):  # which it would have seen
        meshes["root"].get_all_groups()


@in_several_places
@pytest.mark.parametrize("name", OF_PARALLEL)
def test_of_the_parallel_helpers(world, name: str) -> None:
    with groups_created(0):
        OF_PARALLEL[name](lazy_cube())


@pytest.mark.parametrize(
    ("kind", "asked", "uses_groups"),
    [
        (DeviceMesh, OF_MESH, USES_GROUPS_OF_MESH),
        (Universe, OF_UNIVERSE, USES_GROUPS_OF_UNIVERSE),
    ],
    ids=["DeviceMesh", "Universe"],
)
def test_every_public_name_is_in_the_tables(
    kind: type, asked: Mapping[str, Question], uses_groups: Mapping[str, str]
) -> None:
    public = {name for name in dir(kind) if not name.startswith("_")}
    assert public == set(asked) | set(uses_groups), "say in helpers/asking.py what it does"
    assert set(asked).isdisjoint(uses_groups)


@in_worlds((8, 5))
def test_where_a_rank_stands_in_a_collective(world) -> None:
    whole, node, pair, pair_on_node, is_local_master = OF_PARALLEL["MeshCollective"](lazy_cube())
    assert whole == (5, 8, 2, 1, False)
    assert [each[:2] for each in (node, pair, pair_on_node)] == [(1, 4), (1, 2), (1, 2)]
    assert is_local_master is False
