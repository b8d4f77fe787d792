"""Random programs: meshes made, derived, saved, isolated and destroyed, beside stock's.

Some in every run, many more in `make fuzz`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
import pickle
import time
from dataclasses import dataclass, field

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.distributed.device_mesh import DeviceMesh as StockDeviceMesh

import meshverse
from helpers.meshes import shapes
from helpers.observation import OURS, STOCK, assert_same, assert_same_outcome, attempt
from helpers.operations import Flatten, Slice, operations
from helpers.versions import HAS_CANONICAL_LAYOUTS
from helpers.worlds import fake_world
from meshverse import DeviceMesh, Universe, isolate

_NAMES = ("pp", "dp", "ep", "cp", "tp")
_MAX_LINES = 4
_MAX_PAIRS = 8


@dataclass
class Line:
    """A root mesh of each implementation, and what was derived from it.

    Attributes:
        stock, ours: the same meshes in both, in order; the roots first.
        is_plain: of each, whether it is under no isolation tag.
        has_own_root: whether ours has the first mesh of its universe as its root.
    """

    stock: list[StockDeviceMesh]
    ours: list[DeviceMesh]
    is_plain: list[bool] = field(default_factory=lambda: [True])
    has_own_root: bool = True

    @property
    def universe(self) -> Universe:
        return self.ours[0].universe

    @property
    def is_full(self) -> bool:
        return len(self.ours) >= _MAX_PAIRS

    def add(self, stock: StockDeviceMesh, ours: DeviceMesh, is_plain: bool) -> None:
        self.stock.append(stock)
        self.ours.append(ours)
        self.is_plain.append(is_plain)


class Programs(RuleBasedStateMachine):
    """One rank of a fake world, in which both implementations do the same."""

    def __init__(self) -> None:
        super().__init__()
        self._exits = contextlib.ExitStack()
        self.lines: list[Line] = []
        self.ended: list[DeviceMesh] = []  # of universes that were destroyed

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.size = data.draw(st.sampled_from([1, 2, 6, 8, 12, 16]))
        self.rank = data.draw(st.integers(0, self.size - 1))
        self._exits.enter_context(fake_world(self.size, self.rank))

    def teardown(self) -> None:
        self._exits.close()

    # --- meshes that come from no other ---------------------------------------------------------

    @precondition(lambda self: len(self.lines) < _MAX_LINES)
    @rule(data=st.data(), named=st.booleans(), lazy=st.booleans())
    def make_root(self, data: st.DataObject, named: bool, lazy: bool) -> None:
        shape = self._draw_shape(data, self.size)
        names = _NAMES[: len(shape)] if named else None
        ranks = self._draw_ranks(data, math.prod(shape))
        stock = STOCK.DeviceMesh("cpu", ranks.reshape(shape), mesh_dim_names=names)
        ours = meshverse.init_device_mesh(
            "cpu",
            shape,
            mesh_dim_names=names,
            ranks=ranks,
            lazy=lazy,
            preserve_rank_order=False,  # as torch's, whose groups are sorted
        )
        assert_same(stock, ours)
        self.lines.append(Line([stock], [ours]))

    @precondition(lambda self: self.lines and len(self.lines) < _MAX_LINES)
    @rule(data=st.data(), named=st.booleans())
    def make_root_on_the_same_groups(self, data: st.DataObject, named: bool) -> None:
        universe = data.draw(st.sampled_from(self.lines)).universe
        rest = universe.size
        shape = []
        while rest > 1 and len(shape) < len(_NAMES) - 1:
            shape.append(
                data.draw(st.sampled_from([n for n in range(1, rest + 1) if not rest % n]))
            )
            rest //= shape[-1]
        shape.append(rest)
        names = _NAMES[: len(shape)] if named else None
        ranks = universe.rank_views.tensor.reshape(shape)
        stock = STOCK.DeviceMesh("cpu", ranks, mesh_dim_names=names)
        if set(names or ()) & universe.flattened.keys():
            return  # of other ranks it is an error; see test_sharing_between_roots
        ours = meshverse.init_device_mesh(
            "cpu",
            tuple(shape),
            mesh_dim_names=names,
            universe=universe,
            preserve_rank_order=False,
        )
        assert ours.universe is universe
        assert_same(stock, ours)
        self.lines.append(Line([stock], [ours], has_own_root=ours is universe.root))

    @precondition(lambda self: len(self.lines) < _MAX_LINES)
    @rule(data=st.data())
    def make_parts(self, data: st.DataObject) -> None:
        parts, first = {}, 0
        for name in ("actor", "reference"):
            if first == self.size:
                break
            shape = self._draw_shape(data, self.size - first)
            parts[name] = {"mesh_shape": shape, "mesh_dim_names": _NAMES[: len(shape)]}
            first += math.prod(shape)
        meshes = meshverse.init_mesh_partition("cpu", parts)
        first = 0
        for name, part in parts.items():
            shape = part["mesh_shape"]
            ranks = torch.arange(first, first + math.prod(shape)).reshape(shape)
            stock = STOCK.DeviceMesh("cpu", ranks, mesh_dim_names=part["mesh_dim_names"])
            assert_same(stock, meshes[name])
            if stock.get_coordinate() is not None and len(self.lines) < _MAX_LINES:
                self.lines.append(Line([stock], [meshes[name]]))
            first += math.prod(shape)

    # --- meshes that come from others -----------------------------------------------------------

    @precondition(lambda self: any(not line.is_full for line in self.lines))
    @rule(data=st.data(), tag=st.sampled_from([None, None, None, "x", "y"]))
    def derive(self, data: st.DataObject, tag: str | None) -> None:
        line = data.draw(st.sampled_from([line for line in self.lines if not line.is_full]))
        operation = data.draw(operations(line.stock))
        if isinstance(operation, Flatten) and not self._flattens_as_stock(line, operation, tag):
            return
        stock = attempt(lambda: operation.apply(STOCK, line.stock))
        with isolate(tag) if tag is not None else contextlib.nullcontext():
            ours = attempt(lambda: operation.apply(OURS, line.ours))
        if self._is_of_another_form(line, operation, stock.error):
            return
        assert_same_outcome(stock, ours)
        if stock.error is None:
            line.add(stock.value, ours.value, not _is_tagged(ours.value))

    @precondition(lambda self: any(not line.is_full for line in self.lines))
    @rule(data=st.data(), copied=st.sampled_from(["pickle", "copy", "deepcopy"]))
    def copy(self, data: st.DataObject, copied: str) -> None:
        line = data.draw(st.sampled_from([line for line in self.lines if not line.is_full]))
        index = data.draw(st.integers(0, len(line.ours) - 1))
        mesh = line.ours[index]
        if copied == "pickle":
            there = pickle.loads(pickle.dumps(mesh))
        else:
            there = getattr(copy, copied)(mesh)
        assert there == mesh
        assert hash(there) == hash(mesh)
        assert there.universe is mesh.universe
        for axis in range(mesh.ndim):
            assert there.get_group(axis) is mesh.get_group(axis)
        assert_same(line.stock[index], there)
        line.add(line.stock[index], there, line.is_plain[index])

    # --- the end --------------------------------------------------------------------------------

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def destroy(self, data: st.DataObject) -> None:
        universe = data.draw(st.sampled_from(self.lines)).universe
        universe.destroy()
        universe.destroy()  # does nothing
        for line in [line for line in self.lines if line.universe is universe]:
            self.lines.remove(line)
            for stock, ours in zip(line.stock, line.ours, strict=True):
                assert attempt(lambda ours=ours: ours.get_group(0)).error is RuntimeError
                assert ours.shape == stock.shape
                assert ours.mesh.tolist() == stock.mesh.tolist()
                assert ours.get_coordinate() == stock.get_coordinate()
                assert repr(ours)
            self.ended += line.ours[:2]

    # --- laws -----------------------------------------------------------------------------------

    @invariant()
    def equality_is_stocks_but_for_tags(self) -> None:
        if not HAS_CANONICAL_LAYOUTS:
            return
        pairs = [
            pair
            for line in self.lines
            for pair in zip(line.stock, line.ours, line.is_plain, strict=True)
        ]
        for (stock, ours, plain), (other, our_other, other_plain) in itertools.product(
            pairs, repeat=2
        ):
            if plain and other_plain:
                assert (ours == our_other) is (ours == other) is (stock == other)
            elif plain is not other_plain:
                assert ours != our_other
            if ours == our_other:
                assert hash(ours) == hash(our_other)
        for mesh, (_, ours, _) in itertools.product(self.ended, pairs):
            assert mesh != ours

    @invariant()
    def no_process_group_twice(self) -> None:
        for universe in {id(line.universe): line.universe for line in self.lines}.values():
            groups = [
                (tuple(group.request.my_ranks()), group.request.options.key)
                for group in universe.groups
                if group.name is not None
            ]
            assert len(groups) == len(set(groups))
            report = universe.explain()
            assert len(report.to_dict()["groups"]) == len(groups)

    # --- what is drawn --------------------------------------------------------------------------

    def _draw_shape(self, data: st.DataObject, limit: int) -> tuple[int, ...]:
        return data.draw(shapes().filter(lambda shape: math.prod(shape) <= limit))

    def _draw_ranks(self, data: st.DataObject, count: int) -> torch.Tensor:
        """Global ranks, mine among them."""
        if data.draw(st.booleans()) and self.rank < count:
            return torch.arange(count)
        ranks = data.draw(st.permutations(range(self.size)))
        mine = ranks.index(self.rank)
        place = data.draw(st.integers(0, count - 1))
        ranks[mine], ranks[place] = ranks[place], ranks[mine]
        return torch.tensor(ranks[:count])

    def _flattens_as_stock(self, line: Line, operation: Flatten, tag: str | None) -> bool:
        """Flattened meshes are kept at the universe's first root, by name and tag."""
        axes = {
            name
            for other in self.lines
            if other is not line and other.universe is line.universe
            for name in other.stock[0].mesh_dim_names or ()
        }
        source = line.stock[operation.source]
        name = operation.name or "_".join(source.mesh_dim_names or ())
        is_plain = tag is None and line.is_plain[operation.source]
        return is_plain and line.has_own_root and name not in axes

    def _is_of_another_form(
        self, line: Line, operation: object, error: type[Exception] | None
    ) -> bool:
        """Before 2.13, an axis of size 1 has a stride, and so a place in the order of a slice."""
        return (
            not HAS_CANONICAL_LAYOUTS
            and error is KeyError
            and isinstance(operation, Slice)
            and 1 in line.stock[operation.source].shape
        )


def _is_tagged(mesh: DeviceMesh) -> bool:
    return bool(mesh.description.tags)


def test_programs() -> None:
    run_state_machine_as_test(Programs, settings=settings(max_examples=25, stateful_step_count=15))


def test_programs_for_as_long_as_was_asked_for() -> None:
    # Without shrinking, which takes many minutes: the steps of a program are printed as they are.
    end = time.monotonic() + float(os.environ.get("FUZZ_SECONDS", "0"))
    while time.monotonic() < end:
        run_state_machine_as_test(
            Programs,
            settings=settings(
                max_examples=200,
                stateful_step_count=30,
                derandomize=False,
                database=None,
                phases=[Phase.generate],
            ),
        )
