"""Any mesh, and any sequence of operations on it, looks the same in stock torch and here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

from helpers.meshes import MeshSpec, mesh_specs
from helpers.observation import OURS, STOCK, Outcome, assert_same, assert_same_outcome, attempt
from helpers.operations import Operation, Slice, operations
from helpers.versions import HAS_CANONICAL_LAYOUTS, needs_canonical_layouts
from helpers.worlds import fake_world, live_groups

_MAX_OPERATIONS = 6


@given(mesh_specs())
def test_new_meshes(spec: MeshSpec) -> None:
    with fake_world(spec.world_size, spec.rank):
        assert_same(spec.build(STOCK), spec.build(OURS))


@given(mesh_specs(), mesh_specs())
def test_equality_and_hash_of_new_meshes(spec: MeshSpec, other: MeshSpec) -> None:
    with fake_world(max(spec.world_size, other.world_size)):
        stock, ours = spec.build(STOCK), spec.build(OURS)
        other_stock, other_ours = other.build(STOCK), other.build(OURS)
        assert ours == stock
        assert stock == ours
        assert hash(ours) == hash(stock)
        expected = stock == other_stock
        assert (ours == other_ours) is (ours == other_stock) is (stock == other_ours) is expected


@given(mesh_specs(seen_by="a member"), st.data())
def test_sequences_of_operations(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        for stock, ours in _operate(spec, data):
            assert_same_outcome(stock, ours)


@pytest.mark.long
@given(mesh_specs(seen_by="an outsider"), st.data())
def test_sequences_of_operations_on_meshes_of_others(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        for stock, ours in _operate(spec, data):
            if stock.error is RuntimeError and ours.error is None:
                # Stock refuses a part of a mesh that this rank is in no copy of at once; ours is
                # a mesh, which refuses when its ranks are asked for.
                with pytest.raises(RuntimeError, match="original dimensions"):
                    _ = ours.value.mesh
            else:
                assert_same_outcome(stock, ours)


@needs_canonical_layouts
@given(mesh_specs(always_named=True), st.data())
def test_equality_and_hash_after_operations(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        pairs = [
            (stock.value, ours.value)
            for stock, ours in _operate(spec, data)
            if stock.error is None and ours.error is None
        ]
        for (one, our_one), (two, our_two) in itertools.product(pairs, repeat=2):
            expected = one == two
            assert (our_one == our_two) is (our_one == two) is (one == our_two) is expected
            if expected:
                assert hash(one) == hash(our_one) == hash(our_two)


@given(mesh_specs(always_named=True), st.data())
def test_one_group_for_the_same_ranks(spec: MeshSpec, data: st.DataObject) -> None:
    with fake_world(spec.world_size, spec.rank):
        ours = [spec.build(OURS)]
        for _ in range(_MAX_OPERATIONS):
            operation = data.draw(operations(ours))
            outcome = attempt(lambda op=operation: op.apply(OURS, ours))
            if outcome.error is None:
                ours.append(outcome.value)
        ranks = list(live_groups().values())
        assert len(ranks) == len(set(ranks))


def _operate(spec: MeshSpec, data: st.DataObject) -> Iterator[tuple[Outcome, Outcome]]:
    """The same operations on both, each on the meshes that came out so far; what each gives."""
    stock, ours = [spec.build(STOCK)], [spec.build(OURS)]
    for _ in range(data.draw(st.integers(1, _MAX_OPERATIONS))):
        operation = data.draw(operations(stock))
        pair = (
            attempt(lambda op=operation: op.apply(STOCK, stock)),
            attempt(lambda op=operation: op.apply(OURS, ours)),
        )
        if not _refused_for_an_axis_of_size_one(operation, stock, pair[0]):
            yield pair
        if all(outcome.error is None for outcome in pair):
            stock.append(pair[0].value)
            ours.append(pair[1].value)


def _refused_for_an_axis_of_size_one(
    operation: Operation, stock: list[StockDeviceMesh], outcome: Outcome
) -> bool:
    """Before 2.13, an axis of size 1 has a stride, and so a place in the order of a slice."""
    return (
        not HAS_CANONICAL_LAYOUTS
        and outcome.error is KeyError
        and isinstance(operation, Slice)
        and 1 in stock[operation.source].shape
    )
