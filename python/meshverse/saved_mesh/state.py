"""Reading a saved mesh from plain data: it comes from a file, so every field is checked.

All fields are checked before a mesh or universe is created. If `save_mesh` writes a new field, add
it to one of the two tables of readers at the end of this file, and to the tuple that `read_state`
fills from that table.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from meshverse._core import AxisLayout, Layout, RankMap
from meshverse._torch_compat.stock_layouts import FLATTENED_ARE_DISTINCT
from meshverse.layouts.derivation import MeshDescription
from meshverse.layouts.user_input import LARGEST_RANK, check_axis_names, check_layout
from meshverse.options.isolation_tags import check_tag, tag_parts

MeshState: TypeAlias = dict[str, Any]
"""A mesh as plain data: numbers, strings, lists and dictionaries of them."""


class SavedMesh(NamedTuple):
    """One mesh of a saved state.

    Attributes:
        description: description of the mesh.
        keys: digests of the options keys of its groups, one per axis; empty if the mesh had no
            groups, or was saved by a rank outside.
    """

    description: MeshDescription
    keys: list[str | None]


class SavedState(NamedTuple):
    """The contents of a saved state, as `save_mesh` wrote it.

    Attributes:
        rank_map: ranks of the mesh's universe, by position.
        rank: global rank of the process that saved the mesh; -1 without a default group.
        serial: number of the universe.
        decoupled: whether the mesh is loaded without process groups, into a separate universe.
        mesh: the mesh.
        root: its root mesh; None if the mesh itself was a root.
    """

    rank_map: RankMap
    rank: int
    serial: int
    decoupled: bool
    mesh: SavedMesh
    root: SavedMesh | None

    @property
    def descriptions(self) -> list[MeshDescription]:
        """Descriptions of the mesh and its root: a universe that has one of them fits."""
        return [each.description for each in (self.root, self.mesh) if each is not None]


def read_state(state: object) -> SavedState:
    """Read and check a saved state.

    Raises:
        ValueError: a field is missing or unknown, or has a value that `save_mesh` cannot have
            written. The message gives the field, its value and the rule.
    """
    if isinstance(state, (str, bytes, os.PathLike)):
        raise ValueError(
            f"load_mesh() got {_shown(state)} of type {type(state).__name__}, and opens no file: "
            "pass the dictionary that save_mesh() returned. If you saved that in a file, such as "
            "by torch.save() or as JSON, read the file first."
        )
    fields = _read_fields(state, "state", _STATE_FIELDS, optional=("root",))
    rank_map = fields["ranks"]
    return SavedState(
        rank_map,
        fields["rank"],
        fields["serial"],
        fields["decoupled"],
        _read_mesh(fields["mesh"], "mesh", rank_map),
        _read_mesh(fields["root"], "root", rank_map) if "root" in fields else None,
    )


def _read_mesh(saved: object, name: str, rank_map: RankMap) -> SavedMesh:
    fields = _read_fields(saved, name, _MESH_FIELDS)
    layout, keys, tags = fields["axes"], fields["keys"], fields["tags"]
    try:
        check_layout(layout, rank_map)
        names = check_axis_names(fields["names"], len(layout))
    except (AssertionError, RuntimeError, ValueError) as error:
        what = f"A saved mesh whose {name!r} is not a mesh over {rank_map}"
        raise ValueError(f"{what}: {error}") from error
    for field, values in (("keys", keys), ("tags", tags)):
        if values and len(values) != len(layout):
            rule = f"a list with one for each of the {len(layout)} axes, or an empty list"
            raise _refusal(f"{name}.{field}", values, rule)
    if fields["flattened"] and len(layout) != 1:
        raise _refusal(f"{name}.flattened", True, f"False for {len(layout)} axes")
    return SavedMesh(
        MeshDescription(
            fields["device_type"],
            layout,
            names,
            fields["preserve_rank_order"],
            fields["flattened"] and FLATTENED_ARE_DISTINCT,
        ).with_tags(tags),
        keys,
    )


# --- readers of single fields, which take the value and the field's name -------------------------

_Reader: TypeAlias = Callable[[Any, str], Any]


def _read_fields(
    values: object, name: str, readers: Mapping[str, _Reader], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise _refusal(name, values, f"a dictionary with the fields {', '.join(readers)}")
    wrong = (readers.keys() ^ values.keys()).difference(optional)
    if wrong:
        raise _refusal(
            name,
            list(values),
            f"a dictionary with the fields {', '.join(readers)}. Missing or unknown: "
            f"{_shown(sorted(map(str, wrong)))}; another version of meshverse may have saved it",
        )
    inside = "" if name == "state" else f"{name}."
    return {field: readers[field](value, f"{inside}{field}") for field, value in values.items()}


def _rank_map(ranks: Any, name: str) -> RankMap:
    if type(ranks) is int:
        return RankMap.identity(_integer(1, LARGEST_RANK + 1)(ranks, name))
    listed = _listed(_integer(0, LARGEST_RANK))(ranks, name)
    try:
        return RankMap.from_ranks(listed)
    except ValueError as error:
        rule = f"a number of ranks, or a list of unique global ranks ({error})"
        raise _refusal(name, ranks, rule) from None


def _layout(axes: Any, name: str) -> Layout:
    pairs = _listed(_listed(_unchecked))(axes, name)
    if any(len(pair) != 2 for pair in pairs):
        raise _refusal(name, axes, "a list of pairs of sizes and strides")
    sizes_of = _listed(_integer(1, LARGEST_RANK + 1))
    strides_of = _listed(_integer(0, LARGEST_RANK + 1))
    modes = [(sizes_of(sizes, name), strides_of(strides, name)) for sizes, strides in pairs]
    try:
        return Layout([AxisLayout(sizes, strides) for sizes, strides in modes])
    except (OverflowError, ValueError) as error:
        raise _refusal(name, axes, f"the layouts of axes ({error})") from None


def _tags(tags: Any, name: str) -> list[str]:
    read = _listed(_string)(tags, name)
    try:
        for tag in filter(None, read):  # an axis without a tag has ""
            for part in tag_parts(tag):
                check_tag(part)
    except ValueError as error:
        raise _refusal(name, tags, f"isolation tags ({error})") from None
    return read


def _listed(read: _Reader) -> Callable[[Any, str], list[Any]]:
    """Return a reader of lists or tuples, which reads each element with `read`."""

    def read_all(values: Any, name: str) -> list[Any]:
        if type(values) not in (list, tuple):
            raise _refusal(name, values, "a list")
        return [read(value, name) for value in values]

    return read_all


def _or_none(read: _Reader) -> _Reader:
    return lambda value, name: None if value is None else read(value, name)


def _integer(smallest: int, largest: int) -> Callable[[Any, str], int]:
    def read(value: Any, name: str) -> int:
        if type(value) is not int or not smallest <= value <= largest:  # True is not accepted
            raise _refusal(name, value, f"an integer from {smallest} to {largest}")
        return value

    return read


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):  # or a subclass, such as `class Dim(str, Enum)`
        raise _refusal(name, value, "a string")
    return value


def _device_type(value: Any, name: str) -> str:
    if not _string(value, name):
        raise _refusal(name, value, "a string that is not empty")
    return value  # type: ignore[no-any-return]


def _flag(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise _refusal(name, value, "True or False")
    return value


def _unchecked(value: Any, _: str) -> Any:
    return value


_STATE_FIELDS: dict[str, _Reader] = {
    "ranks": _rank_map,
    "rank": _integer(-1, LARGEST_RANK),  # -1 if there was no default process group
    "serial": _integer(-(2**63), 2**63 - 1),
    "decoupled": _flag,
    "mesh": _unchecked,  # `read_state` reads these two after the ranks
    "root": _unchecked,
}

_MESH_FIELDS: dict[str, _Reader] = {
    "device_type": _device_type,
    "axes": _layout,
    "names": _or_none(_listed(_string)),
    "preserve_rank_order": _flag,
    "flattened": _flag,
    "keys": _listed(_or_none(_string)),
    "tags": _tags,
}


def _refusal(name: str, value: object, rule: str) -> ValueError:
    return ValueError(f"A saved mesh whose {name!r} is {_shown(value)}: it must be {rule}.")


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:  # Python refuses to write thousands of digits
        return repr(x) if x.bit_length() <= 64 else f"an integer of {x.bit_length()} bits"


def _shown(value: object) -> str:
    return _Short().repr(value)
