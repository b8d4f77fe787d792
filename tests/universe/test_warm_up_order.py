"""`warm_up`, `suspend` and `resume` take groups in one order, however each rank requested them."""

from __future__ import annotations

import pytest

from helpers.worlds import fake_world
from meshverse import Universe, init_device_mesh
from meshverse.universe.groups_in_order import in_one_order


def _order_on(rank: int, *, is_part_first: bool, tag: str) -> list[tuple[list[int], str]]:
    """Ranks and tags of this rank's groups, two of which have ranks 0 and 2."""
    with fake_world(4, rank):
        universe = Universe(4, lazy=True)

        def part() -> None:
            init_device_mesh("cpu", (2,), mesh_dim_names=("pair",), universe=universe, ranks=[0, 2])

        def whole(tag: str | None = None) -> None:
            init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("dp", "tp"), universe=universe, isolate=tag
            )

        for create in (part, whole) if is_part_first else (whole, part):
            create()
        whole(tag)
        chosen = in_one_order(universe._all_groups(), None)
        requests = [one.group.request for one in chosen]
        return [([*request.my_ranks()], request.options.tag) for request in requests]


@pytest.mark.parametrize("tag", "abcd")  # one of them comes before the groups without a tag
def test_members_take_their_groups_in_the_same_order(tag: str) -> None:
    one, other = (
        _order_on(0, is_part_first=True, tag=tag),
        _order_on(2, is_part_first=False, tag=tag),
    )
    shared = [ranks for ranks, _ in one].count([0, 2])
    assert shared == 2
    assert [each for each in one if each[0] == [0, 2]] == [
        each for each in other if each[0] == [0, 2]
    ]
