"""Names that completion at a prompt shows of a universe: those for users, and each has a text."""

from __future__ import annotations

from helpers.worlds import in_worlds
from meshverse import Universe, init_device_mesh


@in_worlds((8, 5))
def test_a_prompt_shows_names_for_users(world) -> None:
    universe = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")).universe
    shown = {name for name in dir(universe) if not name.startswith("_")}
    assert len(shown) == 19
    assert {"destroy", "draw", "explain", "part", "suspend", "warm_up", "whole"} < shown
    for name in shown:
        assert hasattr(universe, name)
        assert f"{name}: " in Universe.__doc__ or getattr(Universe, name).__doc__
    assert "__init__" in dir(universe)
