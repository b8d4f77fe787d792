"""Operations on a growing list of meshes, drawn for one implementation and applied to both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.observation import Family
from helpers.versions import UNFLATTENS_BY_NAME

_NEW_NAMES = ("a", "b", "c", "d")
_UNKNOWN = "nowhere"

Meshes = Sequence[StockDeviceMesh]


class Operation(Protocol):
    """Something to do to meshes made so far; meshes are given by their index."""

    def apply(self, family: Family, meshes: Meshes) -> StockDeviceMesh: ...


@dataclass(frozen=True)
class Slice:
    source: int
    names: str | tuple[str, ...] | list[str]

    def apply(self, family: Family, meshes: Meshes) -> StockDeviceMesh:
        return meshes[self.source][self.names]


@dataclass(frozen=True)
class Flatten:
    source: int
    name: str | None

    def apply(self, family: Family, meshes: Meshes) -> StockDeviceMesh:
        return meshes[self.source]._flatten(self.name)


@dataclass(frozen=True)
class Unflatten:
    source: int
    axis: int | str
    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def apply(self, family: Family, meshes: Meshes) -> StockDeviceMesh:
        return meshes[self.source]._unflatten(self.axis, self.sizes, self.names)


@dataclass(frozen=True)
class Concatenate:
    sources: tuple[int, ...]

    def apply(self, family: Family, meshes: Meshes) -> StockDeviceMesh:
        return family.DeviceMesh._concatenate([meshes[index] for index in self.sources])


def operations(meshes: Meshes) -> st.SearchStrategy[Operation]:
    """Operations on these meshes: most of them possible, some to be refused."""
    return st.one_of(_slices(meshes), _flattens(meshes), _unflattens(meshes), _joins(meshes))


@st.composite
def _slices(draw: st.DrawFn, meshes: Meshes) -> Slice:
    source = draw(_index(meshes))
    own = meshes[source].mesh_dim_names or ("tp",)
    if draw(st.booleans()):  # some axes in the mesh's order
        chosen = [name for name in own if draw(st.booleans())] or list(own[-1:])
    else:
        known = [*own, *_flattened_names(meshes[source]), _UNKNOWN]
        chosen = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
    if len(chosen) == 1 and draw(st.booleans()):
        return Slice(source, chosen[0])
    return Slice(source, draw(st.sampled_from([tuple(chosen), chosen])))


def _flattened_names(mesh: StockDeviceMesh) -> Iterable[str]:
    root = mesh._get_root_mesh()
    # Stock looks for these in vain in another mesh that equals the root; here that is the root.
    return () if mesh is not root and mesh == root else root._flatten_mapping


@st.composite
def _flattens(draw: st.DrawFn, meshes: Meshes) -> Flatten:
    return Flatten(draw(_index(meshes)), draw(st.sampled_from([None, None, "flat", "loss", "tp"])))


@st.composite
def _unflattens(draw: st.DrawFn, meshes: Meshes) -> Unflatten:
    source = draw(_index(meshes))
    mesh = meshes[source]
    index = draw(st.integers(0, mesh.ndim - 1))
    rest, sizes = mesh.size(index), []
    for _ in range(draw(st.integers(0, 2))):
        sizes.append(draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= sizes[-1]
    wrong = mesh.mesh_dim_names is not None and draw(st.integers(0, 7)) == 0  # one error at a time
    sizes.append(rest + wrong)
    # Stock lets two axes have one name; ours refuses, see test_bad_input.
    free = [name for name in _NEW_NAMES if name not in (mesh.mesh_dim_names or ())]
    names = draw(st.permutations(free))[: len(sizes)]
    axis: int | str = index
    if UNFLATTENS_BY_NAME and mesh.mesh_dim_names and draw(st.booleans()):
        axis = mesh.mesh_dim_names[index]
    return Unflatten(source, axis, tuple(sizes), tuple(names))


@st.composite
def _joins(draw: st.DrawFn, meshes: Meshes) -> Concatenate:
    sources: list[int] = []
    names: set[str] = set()
    for index in draw(st.lists(_index(meshes), min_size=1, max_size=3)):
        its_names = meshes[index].mesh_dim_names or ()
        if names.isdisjoint(its_names):  # see _unflattens
            sources.append(index)
            names.update(its_names)
    return Concatenate(tuple(sources))


def _index(meshes: Meshes) -> st.SearchStrategy[int]:
    return st.integers(0, len(meshes) - 1)
