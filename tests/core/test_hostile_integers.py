"""Whatever integers are given, the core answers or raises: it neither crashes nor hangs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from helpers.forked import SECONDS
from meshverse._core import AxisLayout, Layout, RankMap

# In a process of its own, so that a crash is seen. Every integer parameter of every callable takes
# every hostile value, alone and in pairs, with plain values elsewhere. Then whatever an object has
# that needs no arguments is read.
_CALLS = """
import datetime, inspect, itertools, random
from types import SimpleNamespace
from meshverse import _core as c

HOSTILE = [-(2**63) - 1, -(2**63), -(2**62), -1, 0, 1, 2, 7, 2**62 - 1, 2**62, 2**63 - 1, 2**63]
GIVEN = 4  # where the value is not hostile
RAISED = (ValueError, TypeError, OverflowError, IndexError, MemoryError)

axis, key, cache, ranks = c.AxisLayout(4), c.OptionsKey.of("gloo"), c.GroupCache(), c.RankMap
layout, eight = c.Layout.from_shape((2, 4)), c.RankMap.identity(8)
groups, holders = c.RankGroups(axis, eight), c.Holders(eight, 0, layout)
cache.get_or_create(axis, key, object)

def side(dim=0, factor=1, other=-1, holders=0, right_to_left=False):
    return holders, [dim, other], [factor, 1], right_to_left

def plan(moves, rank=0, world=8, round_bytes=64, *nodes):
    return c.plan_reshard([holders], moves, rank, world, round_bytes, *nodes)

CALLS = {
    "AxisLayout": lambda a, b, d: c.AxisLayout((a, 2, b), (d, b, 1)),
    "AxisLayout row-major": lambda a, b: c.AxisLayout((a, b)),
    "AxisLayout.__call__": lambda i: c.AxisLayout((2, 2), (4, 1))(i),
    "AxisLayout.complement": lambda n: axis.complement(n),
    "Layout": lambda a, b: c.Layout([c.AxisLayout(a), c.AxisLayout(b, 0)]),
    "Layout.__getitem__": lambda i: layout[i],
    "Layout.from_shape": lambda a, b, d: c.Layout.from_shape((a, b), (d, 1)),
    "Layout.from_shape row-major": lambda a, b: c.Layout.from_shape((a, b)),
    "Layout.unflatten": lambda i, a, b: layout.unflatten(i, (a, b)),
    "Layout.select": lambda i, k: layout.select((i, k)),
    "Layout.slice": lambda i, k: layout.slice((i, k)),
    "Layout.concatenate": lambda a: layout.concatenate(c.Layout.from_shape((a,))),
    "Layout.coordinate": lambda p: layout.coordinate(p),
    "Layout.base": lambda p: layout.base(p),
    "RankMap": lambda n: c.RankMap(n),
    "RankMap.identity": lambda n: ranks.identity(n),
    "RankMap.from_ranks": lambda a, b: ranks.from_ranks([a, b]),
    "RankMap.rank_at": lambda p: eight.rank_at(p),
    "RankMap.position_of": lambda r: eight.position_of(r),
    "RankMap.position_of a sparse one": lambda a, r: ranks.from_ranks([3, a]).position_of(r),
    "RankArray": lambda n: c.RankArray(n),
    "RankGroups": lambda a, n: c.RankGroups(c.AxisLayout(a), ranks.identity(n)),
    "RankGroups.group_index": lambda p: groups.group_index(p),
    "RankGroups.coordinate": lambda p: groups.coordinate(p),
    "RankGroups.ranks_of": lambda p: groups.ranks_of(p),
    "RankGroups.fingerprint_of": lambda p: groups.fingerprint_of(p),
    "rank_group": lambda a, n, p: c.rank_group(c.AxisLayout(a), ranks.identity(n), p, ""),
    "OptionsKey": lambda t, f: c.OptionsKey(("gloo", t, "", "", {"a": ("float", f)})),
    "OptionsKey.of": lambda v: c.OptionsKey.of("gloo", SimpleNamespace(v=v, w=[v])),
    "OptionsKey.of with a timeout": lambda d: c.OptionsKey.of(
        "gloo", timeout=datetime.timedelta(days=d)
    ),
    "OptionsKey.with_tag": lambda t: key.with_tag(t),
    "OptionsKey.without_timeout": lambda t: key.with_tag(str(t)).without_timeout(),
    "data_in": lambda v: c.data_in(SimpleNamespace(v=v, w=[v])),
    "fresh_like": lambda v: c.fresh_like(v),
    "GroupCache": lambda n: c.GroupCache(n),
    "GroupCache.find": lambda first, n: cache.find(layout, first, n, key),
    "GroupCache.get": lambda a: cache.get(c.AxisLayout(a), key),
    "GroupCache.get_or_create": lambda a: cache.get_or_create(c.AxisLayout(a), key, object),
    "GroupCache.remove": lambda a: cache.remove(c.AxisLayout(a, 2), key),
    "HeldLock": lambda n: c.HeldLock(n),
    "Holders": lambda n, base, a: c.Holders(ranks.identity(n), base, c.Layout([c.AxisLayout(a)])),
    "Holders.coordinates_of": lambda r: holders.coordinates_of(r),
    "shard_shape": lambda n, m, d, f, a, b, i, k: c.shard_shape(
        [n, m], [d % 2 - 1, 0], [f, 1], False, [a, b], [i, k]
    ),
    "shard_shape, its dimension": lambda n, d, i: c.shard_shape([n], [d], [1], True, [8], [i]),
    "plan_reshard": lambda r, w, b, s: plan([([8, 4], 4, side(), side(-1))], r, w, b, s),
    "plan_reshard, its nodes": lambda w, a, b: plan([], 0, w, 64, 1, [a, b] * 4),
    "plan_reshard, a move": lambda n, size, b: plan(
        [([n, 2, n], size, side(), side(-1))], round_bytes=b
    ),
    "plan_reshard, a side": lambda d, f, o, h: plan([([8], 4, side(d, f, o, h), side(-1))]),
    "ring_steps": lambda n, p, q, s: c.ring_steps([n, 2], [[p, q, 0, 1]], [[0, s, 2, 3]]),
    "plan_reshard, strided": lambda n, f: plan([([n], 1, side(0, f), side(-1))]),
}

def choices(n):
    yield (GIVEN,) * n
    for i, k in itertools.product(range(n), repeat=2):
        for a, b in itertools.product(HOSTILE, repeat=2):
            if i < k or (i == k and a == b):
                yield tuple(a if at == i else b if at == k else GIVEN for at in range(n))
    random.seed(0)
    for _ in range(300 if n > 2 else 0):
        yield tuple(random.choice([*HOSTILE, GIVEN]) for _ in range(n))

tried = {name.partition(" ")[0].partition(",")[0] for name in CALLS}

def read(made):
    repr(made)
    if type(made).__module__ != c.__name__:
        return
    for name in dir(type(made)):
        if not name.startswith("_"):
            try:
                found = getattr(made, name)
                if callable(found):
                    found = found()
                    tried.add(f"{type(made).__name__}.{name}")
                repr(found)[:100]
            except RAISED:
                pass

for name, call in CALLS.items():
    print("in", name, flush=True)
    for integers in choices(len(inspect.signature(call).parameters)):
        try:
            made = call(*integers)
        except RAISED:
            continue
        read(made)
read(cache), read(key), read(groups.all())

callables = set()
for name, found in vars(c).items():
    if callable(found):
        callables.add(name)
    if isinstance(found, type):
        callables |= {
            f"{name}.{method}" for method in vars(found)
            if not method.startswith("_") and callable(getattr(found, method))
        }
print("not tried:", sorted(callables - tried))
"""


def test_every_callable_answers_or_raises() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CALLS], capture_output=True, text=True, timeout=SECONDS
    )
    *_, last = done.stdout.splitlines()
    assert (done.returncode, last) == (0, "not tried: []"), f"{last}\n{done.stderr}"


class _NoInteger:
    def __repr__(self) -> str:
        return f"no {'integer'}"  # Python code, which runs while the error is made


@pytest.mark.parametrize(
    "call",
    [
        AxisLayout,
        lambda value: AxisLayout([value]),
        lambda value: RankMap.from_ranks([value]),
        lambda value: Layout.from_shape((2, 4)).select(value),
    ],
)
def test_what_is_no_integer_is_named(call: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"integer.*, got .*no integer"):
        call(_NoInteger())
