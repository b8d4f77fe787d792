"""A saved state is untrusted: it gives a mesh, or a ValueError that names the field; no third."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from helpers.observation import observe
from helpers.worlds import fake_world, group_names
from meshverse import DeviceMesh, Universe, init_device_mesh, load_mesh, save_mesh
from meshverse._core import AxisLayout, Layout, RankMap
from meshverse.universe.world_universes import _universes

_NAMES = ("dp", "tp")


def _saved() -> dict[str, Any]:
    """A submesh of a mesh over all ranks, with its root."""
    return save_mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)["tp"])


def _with(path: str, value: Any) -> dict[str, Any]:
    """The saved state with one field changed, given as "mesh.names"."""
    state = copy.deepcopy(_saved())
    *outer, last = path.split(".")
    fields = state
    for name in outer:
        fields = fields[name]
    fields[last] = value
    return state


class _Everything:
    """All that a load might change: universes, their meshes, process groups."""

    def __init__(self) -> None:
        self._seen = {universe: _look(universe) for universe in _universes.alive()}
        self._groups = group_names()

    def is_unchanged(self) -> bool:
        now = {universe: _look(universe) for universe in _universes.alive()}  # dead ones may go
        same = all(self._seen.get(universe) == look for universe, look in now.items())
        return same and group_names() == self._groups


def _look(universe: Universe) -> list[Any]:
    return [repr(universe), list(universe.meshes), dict(universe.flattened)]


_REFUSED: dict[str, tuple[str, Any, str]] = {
    "a layout larger than the ranks": ("mesh.axes", [([8], [4])], "'mesh' is not a mesh over .*8"),
    "a layout that repeats positions": ("mesh.axes", [([4], [0])], "'mesh' is not a mesh"),
    "axes that overlap": ("root.axes", [([4], [1]), ([2], [1])], "'root' is not a mesh"),
    "a layout that does not tile the ranks": ("mesh.axes", [([3], [1])], "'mesh' is not a mesh"),
    "sizes that overflow": (
        "mesh.axes",
        [([2**31, 2**31, 2**31], [1, 1, 1])],
        "'mesh.axes' is .*does not fit a signed 64-bit integer",
    ),
    "a size beyond all ranks": ("mesh.axes", [([2**40], [1])], "'mesh.axes' is 1099511627776"),
    "a size of thousands of digits": ("mesh.axes", [([10**9999], [1])], "an integer of 33216 bits"),
    "a negative stride": ("mesh.axes", [([4], [-1])], "'mesh.axes' is -1"),
    "a size that is true": ("mesh.axes", [([True], [1])], "'mesh.axes' is True.*an integer"),
    "a size that is no number": ("mesh.axes", [([float("nan")], [1])], "'mesh.axes' is nan"),
    "sizes without strides": ("mesh.axes", [([4],)], "'mesh.axes' is .*pairs of sizes and strides"),
    "more sizes than strides": ("mesh.axes", [([2, 2], [1])], r"'mesh.axes' is .*\[2, 2\]"),
    "axes that are a number": ("mesh.axes", 4, "'mesh.axes' is 4: it must be a list"),
    "three names for one axis": ("mesh.names", ("a", "b", "c"), "'mesh' is not a mesh.*same len"),
    "no name for one axis": ("mesh.names", (), "'mesh' is not a mesh.*same length"),
    "one name twice": ("root.names", ("dp", "dp"), "'root' is not a mesh.*must be unique"),
    "a name that is a number": ("mesh.names", (3,), "'mesh.names' is 3: it must be a string"),
    "names that are text": ("root.names", "dp", "'root.names' is 'dp': it must be a list"),
    "two keys for one axis": ("mesh.keys", ["a", "b"], "'mesh.keys' is .*each of the 1 axes"),
    "a key that is a number": ("mesh.keys", [3], "'mesh.keys' is 3: it must be a string"),
    "a device type that is none": ("mesh.device_type", None, "'mesh.device_type' is None"),
    "an empty device type": ("mesh.device_type", "", "'mesh.device_type' is ''"),
    "an order that is a number": ("mesh.preserve_rank_order", 1, "'mesh.preserve_rank_order' is 1"),
    "two axes that were flattened": ("root.flattened", True, "'root.flattened' is True.*2 axes"),
    "flattened by a word": ("mesh.flattened", "no", "'mesh.flattened' is 'no'"),
    "no ranks": ("ranks", 0, "'ranks' is 0: it must be an integer from 1"),
    "an empty list of ranks": ("ranks", [], r"'ranks' is \[\].*at least one rank"),
    "more ranks than there can be": ("ranks", 2**31 + 1, "'ranks' is 2147483649"),
    "a rank that repeats": ("ranks", [0, 1, 1], "'ranks' is .*rank 1 stands at positions 1 and 2"),
    "a negative rank in the list": ("ranks", [0, -1], "'ranks' is -1"),
    "ranks in bytes": ("ranks", b"\0\1", "'ranks' is b.*a list"),
    "ranks that are true": ("ranks", True, "'ranks' is True"),
    "fewer ranks than the mesh has": ("ranks", 3, "'mesh' is not a mesh over ranks 0 to 2"),
    "a rank that is no number": ("rank", None, "'rank' is None: it must be an integer from -1"),
    "a negative rank": ("rank", -2, "'rank' is -2"),
    "a huge serial": ("serial", 2**63, "'serial' is 9223372036854775808"),
    "a tag that is no string": ("mesh.tags", [1, 2], "'mesh.tags' is 1: it must be a string"),
    "a tag that is no tag": ("mesh.tags", ["a\n", ""], "'mesh.tags' is .*printable"),
    "more tags than axes": ("mesh.tags", ["a"] * 5, "'mesh.tags' is .*one for each of the"),
    "a serial that is a float": ("serial", 0.0, "'serial' is 0.0"),
    "decoupled by a number": ("decoupled", 1, "'decoupled' is 1: it must be True or False"),
    "a mesh that is a list": ("mesh", [], r"'mesh' is \[\].*a dictionary with the fields device"),
    "a root that is none": ("root", None, "'root' is None.*a dictionary"),
    "a field too many": ("mesh.color", "red", r"unknown: \['color'\]; another version"),
    "a field of another type": ("3", 3, r"unknown: \['3'\]"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_refused_before_anything_is_made(case: str, world) -> None:
    path, value, message = _REFUSED[case]
    state = _with(path, value)
    before = _Everything()
    with pytest.raises(ValueError, match=message):
        load_mesh(state)
    assert before.is_unchanged()


@pytest.mark.parametrize("field", ["ranks", "rank", "serial", "decoupled", "mesh"])
def test_a_missing_field(field: str, world) -> None:
    state = _saved()
    del state[field]
    with pytest.raises(ValueError, match=rf"'state' is .*Missing or unknown: \['{field}'\]"):
        load_mesh(state)


@pytest.mark.parametrize("state", [None, 3, [], [("ranks", 8)]])
def test_no_state_at_all(state: Any, world) -> None:
    with pytest.raises(ValueError, match=r"'state' is .*a dictionary with the fields ranks, rank"):
        load_mesh(state)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_refused_load_counts_nothing(decoupled: bool, world) -> None:
    first = Universe(8)
    state = _with("mesh.names", ("a", "b", "c"))
    state["ranks"], state["decoupled"] = 8, decoupled
    serial = Universe(8).serial  # those without process groups count downwards
    with pytest.raises(ValueError, match="same length"):
        load_mesh(state)
    assert Universe(8).serial == serial - 1
    del first


def test_torch_load_checks_it_too(world) -> None:
    file = io.BytesIO()
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)
    torch.save({"mesh": mesh}, file)
    saved = file.getvalue()
    broken = saved.replace(b"device_type", b"device_tape")
    assert broken != saved
    before = _Everything()
    with pytest.raises(ValueError, match=r"unknown: \['device_tape', 'device_type'\]"):
        torch.load(io.BytesIO(broken), weights_only=True)
    assert before.is_unchanged()


# --- whatever Hypothesis finds -------------------------------------------------------------------

_MESHES: list[Callable[[], DeviceMesh]] = [
    lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES),
    lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)["tp"],
    lambda: init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES).flatten("all"),
    lambda: init_device_mesh("cpu", (2, 2, 2)),
    lambda: DeviceMesh("cpu", [[7, 5], [0, 3]], mesh_dim_names=_NAMES),
    lambda: DeviceMesh("cpu", 5),
]

_INTEGERS = st.integers(-2, 9) | st.integers() | st.sampled_from([2**31, 2**62, 2**63, 2**3000])
_ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | _INTEGERS
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=8,
)
_LIKELY = (
    st.lists(st.integers(0, 8), max_size=8)
    | st.lists(st.sampled_from(["dp", "tp", "x", None]), max_size=3)
    | st.lists(
        st.tuples(st.lists(st.integers(1, 8), max_size=2), st.lists(st.integers(0, 8), max_size=2)),
        max_size=3,
    )
)


def _places(value: Any, inside: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in nested dictionaries, lists and tuples."""
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, (list, tuple))
        else []
    )
    return [inside] + [place for key, inner in items for place in _places(inner, (*inside, key))]


def _changed(value: Any, place: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    if not place:
        return change(value)
    key, *rest = place
    if isinstance(value, dict):
        return {**value, key: _changed(value[key], tuple(rest), change)}
    items = [_changed(v, tuple(rest), change) if i == key else v for i, v in enumerate(value)]
    return type(value)(items)


def _without_last(value: Any) -> Any:
    return value[:-1] if isinstance(value, (list, tuple)) else dict(list(value.items())[:-1])


@pytest.mark.long
@given(st.data())
def test_any_change_of_a_saved_state(data: st.DataObject) -> None:
    with fake_world(8, 5):
        kept = [make() for make in _MESHES]
        groups = group_names()
        state: Any = save_mesh(data.draw(st.sampled_from(kept)))
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.sampled_from(_places(state)))
            new = data.draw(_ANYTHING | _LIKELY)
            shorter = data.draw(st.booleans())
            state = _changed(
                state,
                place,
                lambda old, new=new, shorter=shorter: (
                    _without_last(old) if shorter and isinstance(old, (list, tuple, dict)) else new
                ),
            )
        before, looks = _Everything(), [observe(mesh) for mesh in kept]
        try:
            mesh = load_mesh(state)
        except ValueError as error:
            assert len(str(error)) < 1500  # noqa: PT017
            assert before.is_unchanged()
        else:
            _check_whole(mesh, state)
        assert [observe(mesh) for mesh in kept] == looks
        assert group_names() == groups


def _check_whole(mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """Check that a mesh was loaded, and the one that the state describes."""
    assert type(mesh) is DeviceMesh
    layout = Layout([AxisLayout(sizes, strides) for sizes, strides in state["mesh"]["axes"]])
    assert mesh.layout == layout
    copies = mesh.layout.collapse().complement(mesh.universe.size)
    assert mesh.layout.size * copies.size == mesh.universe.size
    assert mesh.mesh_dim_names is None or len(mesh.mesh_dim_names) == mesh.ndim
    assert load_mesh(save_mesh(mesh)) == mesh or mesh.universe.token is not None
    if mesh.universe.size <= 64 and mesh.get_coordinate() is not None:
        ranks = mesh.mesh.flatten().tolist()
        assert len(set(ranks)) == len(ranks) == mesh.layout.size
        assert mesh.universe.rank in ranks
        assert isinstance(hash(mesh), int)
    assert repr(mesh)


@given(_ANYTHING | _LIKELY, _ANYTHING | _LIKELY)
def test_the_cores_objects_check_what_they_are_loaded_from(first: Any, second: Any) -> None:
    for make in (
        lambda: RankMap(first),
        lambda: AxisLayout(first, second),
        lambda: Layout(first),
        lambda: Layout([AxisLayout(first), AxisLayout(first, second)]),
    ):
        try:
            made = make()
        except (ValueError, TypeError, OverflowError):
            continue
        assert pickle.loads(pickle.dumps(made)) == made


def test_a_state_by_hand_may_use_lists(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=_NAMES)
    state = save_mesh(mesh)
    state["mesh"]["names"] = list(_NAMES)
    assert load_mesh(state) is mesh
    assert dist.get_process_group_ranks(load_mesh(state).get_group("tp")) == [4, 5, 6, 7]


def test_a_rank_may_be_an_integer_of_numpy(world) -> None:
    universe = Universe(8, rank=np.int64(world.rank))  # type: ignore[arg-type]
    mesh = DeviceMesh("cpu", torch.arange(8), universe=universe)
    assert load_mesh(save_mesh(mesh)) == mesh
    with pytest.raises(TypeError, match="float"):
        Universe(8, rank=3.0)  # type: ignore[arg-type]
