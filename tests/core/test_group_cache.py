"""The cache computes once, keeps no failure, and never hangs on itself."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from meshverse._core import AxisLayout, GroupCache, OptionsKey

AXIS, OTHER_AXIS = AxisLayout(4), AxisLayout(4, 2)
GLOO, NCCL = OptionsKey.of("gloo"), OptionsKey.of("nccl")


class Entry:
    """Something that can be referred to weakly, and that can refer to anything."""


def fail():
    raise KeyError("no such device")


def in_threads(count, work):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_an_entry_is_made_once_for_every_pair():
    cache = GroupCache()
    pairs = [(axis, key) for axis in (AXIS, OTHER_AXIS) for key in (GLOO, NCCL, GLOO.with_tag("x"))]
    made = [cache.get_or_create(axis, key, Entry) for axis, key in pairs]
    assert len(set(map(id, made))) == len(cache) == 6
    again = [cache.get_or_create(AxisLayout(a.sizes, a.strides), k, fail) for a, k in pairs]
    assert all(one is other for one, other in zip(made, again, strict=True))
    assert all(cache.get(*pair) is entry for pair, entry in zip(pairs, made, strict=True))
    assert cache.entries() == [(*pair, entry) for pair, entry in zip(pairs, made, strict=True)]
    assert (cache.requests, cache.hits, cache.created, cache.failures) == (12, 6, 6, 0)


def test_none_is_an_entry_like_any_other():
    cache = GroupCache()
    assert cache.get(AXIS, GLOO) is None
    assert cache.get_or_create(AXIS, GLOO, lambda: None) is None
    assert cache.get_or_create(AXIS, GLOO, fail) is None
    assert len(cache) == 1


def test_a_failure_passes_through_and_leaves_nothing():
    cache = GroupCache()
    with pytest.raises(KeyError, match="no such device") as raised:
        cache.get_or_create(AXIS, GLOO, fail)
    assert raised.traceback[-1].name == "fail"
    assert len(cache) == 0
    assert cache.get(AXIS, GLOO) is None
    assert cache.get_or_create(AXIS, GLOO, lambda: "made") == "made"
    assert (cache.requests, cache.hits, cache.created, cache.failures) == (2, 0, 1, 1)


def test_threads_wait_for_the_one_that_makes_it():
    cache, start, results = GroupCache(), threading.Barrier(16), []
    release = threading.Event()

    def make():
        release.wait(timeout=30)  # lets go of the interpreter, so that the others come in
        return Entry()

    def ask(i):
        if start.wait() == 0:
            release.set()
        results.append(cache.get_or_create(AXIS, GLOO, make))

    in_threads(16, ask)
    assert len(set(map(id, results))) == 1
    assert (cache.requests, cache.hits, cache.created) == (16, 15, 1)


def test_when_the_maker_fails_one_that_waits_tries_next():
    cache, start, lock = GroupCache(), threading.Barrier(8), threading.Lock()
    tries, results, errors = [], [], []

    def make():
        with lock:
            tries.append(None)
            if len(tries) <= 3:
                raise KeyError("not yet")
        return "made"

    def ask(i):
        start.wait()
        try:
            results.append(cache.get_or_create(AXIS, GLOO, make))
        except KeyError as error:
            errors.append(error)

    in_threads(8, ask)
    assert (len(tries), results, len(errors)) == (4, ["made"] * 5, 3)
    assert (cache.requests, cache.hits, cache.created, cache.failures) == (8, 4, 1, 3)


def test_different_entries_are_made_side_by_side():
    cache, both_inside = GroupCache(), threading.Barrier(2)

    def ask(i):
        cache.get_or_create((AXIS, OTHER_AXIS)[i], GLOO, lambda: both_inside.wait(timeout=30))

    in_threads(2, ask)
    assert len(cache) == 2


def test_making_one_entry_may_ask_for_another():
    cache = GroupCache()
    outer = cache.get_or_create(AXIS, GLOO, lambda: [cache.get_or_create(AXIS, NCCL, Entry)])
    assert outer == [cache.get(AXIS, NCCL)]
    assert [key for _, key, _ in cache.entries()] == [NCCL, GLOO]


def test_asking_for_the_entry_being_made_raises():
    cache = GroupCache()

    def make():
        return cache.get_or_create(AXIS, GLOO, make)

    with pytest.raises(RuntimeError, match=r"axis 4:1 with OptionsKey\('gloo'\).*is making it"):
        cache.get_or_create(AXIS, GLOO, make)
    assert cache.get_or_create(AXIS, GLOO, lambda: "made") == "made"


def test_threads_that_wait_for_each_other_are_told():
    cache, both_inside, refused = GroupCache(), threading.Barrier(2), []

    def ask(i):
        mine, other = (AXIS, OTHER_AXIS)[:: 1 - 2 * i]

        def make():
            both_inside.wait(timeout=30)
            try:
                return cache.get_or_create(other, GLOO, lambda: "made for the other")
            except RuntimeError as error:
                refused.append(str(error))
                return "made alone"

        cache.get_or_create(mine, GLOO, make)

    in_threads(2, ask)
    assert len(refused) == 1
    assert [entry for *_, entry in cache.entries()] == ["made alone"] * 2


def test_clear_forgets_and_lets_go():
    cache = GroupCache()
    alive = weakref.ref(cache.get_or_create(AXIS, GLOO, Entry))
    cache.clear()
    assert alive() is None
    assert (len(cache), cache.entries(), cache.get(AXIS, GLOO)) == (0, [], None)
    assert cache.get_or_create(AXIS, GLOO, lambda: "again") == "again"


def test_an_entry_made_while_the_cache_is_cleared_is_not_kept():
    cache = GroupCache()

    def make():
        cache.clear()
        return "made"

    assert cache.get_or_create(AXIS, GLOO, make) == "made"
    assert len(cache) == 0


def test_an_entry_that_uses_the_cache_as_it_dies_may():
    cache = GroupCache()
    entry = cache.get_or_create(AXIS, GLOO, Entry)
    lengths = []
    weakref.finalize(entry, lambda: lengths.append(len(cache)))
    del entry
    cache.clear()
    assert lengths == [0]


def test_a_cycle_through_the_cache_is_collected():
    cache = GroupCache()
    entry = cache.get_or_create(AXIS, GLOO, Entry)
    entry.cache = cache
    alive = weakref.ref(entry)
    assert cache in gc.get_referrers(entry)
    del entry, cache
    gc.collect()
    assert alive() is None
