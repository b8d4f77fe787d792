"""The cache computes once, keeps no failure, and never hangs on itself."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref

import pytest

from helpers.forked import SECONDS
from meshverse._core import AxisLayout, GroupCache, Layout, OptionsKey

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
        thread.join(timeout=SECONDS)
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


def test_several_entries_are_found_together_or_not_at_all():
    cache, key = GroupCache(), OptionsKey.of("gloo")
    axes = Layout([AxisLayout(2, 4), AxisLayout((2, 2), (1, 2))])
    assert cache.find(axes, 0, 2, key) is None
    cache.get_or_create(axes[0], key, lambda: "first")
    assert cache.find(axes, 0, 2, key) is None
    assert cache.find(axes, 0, 1, key) == ["first"]
    cache.get_or_create(axes[1].sorted(), key, lambda: "second")  # the same ranks, ascending
    assert axes[1] != axes[1].sorted()
    assert cache.find(axes, 0, 2, key) == ["first", "second"]
    assert cache.find(axes, 1, 1, key) == ["second"]
    assert cache.find(axes, 0, 2, OptionsKey.of("nccl")) is None
    assert cache.find(Layout([]), 0, 0, key) == []
    for first, n in ((1, 2), (-1, 2), (0, -1), (2**63 - 1, 1)):
        with pytest.raises(IndexError, match=f"{n} axes from axis {first} on of layout"):
            cache.find(axes, first, n, key)


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
    assert len(cache) == 1


def test_threads_wait_for_the_one_that_makes_it():
    cache, start, results, made = GroupCache(), threading.Barrier(16), [], []
    release = threading.Event()

    def make():
        made.append(None)
        release.wait(timeout=SECONDS)  # lets go of the interpreter, so that the others come in
        return Entry()

    def ask(i):
        if start.wait() == 0:
            release.set()
        results.append(cache.get_or_create(AXIS, GLOO, make))

    in_threads(16, ask)
    assert len(results) == 16
    assert len(set(map(id, results))) == len(made) == 1


class InterruptedWaitError(Exception):
    pass


@contextlib.contextmanager
def handled(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def interrupt(*unused):
    raise InterruptedWaitError


@contextlib.contextmanager
def being_made(cache):
    """An entry that another thread makes until the block ends, or until the event is set."""
    begun, release, results = threading.Event(), threading.Event(), []

    def make():
        begun.set()
        release.wait(timeout=SECONDS)
        return "made"

    maker = threading.Thread(
        target=lambda: results.append(cache.get_or_create(AXIS, GLOO, make)), daemon=True
    )
    maker.start()
    assert begun.wait(timeout=SECONDS)
    try:
        yield release
    finally:
        release.set()
    maker.join(timeout=SECONDS)
    assert results == ["made"]


@contextlib.contextmanager
def signal_soon(number=signal.SIGUSR1):
    """Send a signal within the block, as a rule once it waits."""
    # short-timeout: it must elapse
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_a_signal_ends_the_wait_of_the_main_thread():
    cache = GroupCache()
    with handled(signal.SIGUSR1, interrupt), being_made(cache):
        for _ in range(2):  # and it can wait again
            with pytest.raises(InterruptedWaitError), signal_soon():
                cache.get_or_create(AXIS, GLOO, fail)
    assert cache.get_or_create(AXIS, GLOO, fail) == "made"
    assert len(cache) == 1


def test_control_c_ends_the_wait():
    cache = GroupCache()
    with (
        handled(signal.SIGINT, signal.default_int_handler),
        being_made(cache),
        pytest.raises(KeyboardInterrupt),
        signal_soon(signal.SIGINT),
    ):
        cache.get_or_create(AXIS, GLOO, fail)


def test_a_signal_whose_handler_returns_does_not():
    cache, seen = GroupCache(), []

    def note(*unused):
        seen.append(cache.get(AXIS, GLOO))
        release.set()

    with being_made(cache) as release, handled(signal.SIGUSR1, note), signal_soon():
        assert cache.get_or_create(AXIS, GLOO, fail) == "made"
    assert seen == [None]  # handled while the main thread waited: the handler may use the cache


def test_a_handler_may_wait_for_the_same_entry():
    cache, seen = GroupCache(), []

    def wait_too(*unused):
        # short-timeout: it must elapse, as a rule once this waits; before, the result is the same
        threading.Timer(0.2, release.set).start()
        seen.append(cache.get_or_create(AXIS, GLOO, fail))

    with being_made(cache) as release, handled(signal.SIGUSR1, wait_too), signal_soon():
        assert cache.get_or_create(AXIS, GLOO, fail) == "made"
    assert seen == ["made"]


def test_who_gave_up_waiting_can_be_waited_for():
    cache, results = GroupCache(), []
    begun, other_begun, about_to_wait = (threading.Event() for _ in range(3))

    def make():
        begun.set()
        if not other_begun.wait(timeout=SECONDS):
            return "the main thread never came"
        # The main thread makes this one. It waited for mine, and does no longer.
        about_to_wait.set()
        return cache.get_or_create(OTHER_AXIS, GLOO, fail)

    maker = threading.Thread(target=lambda: results.append(cache.get_or_create(AXIS, GLOO, make)))
    with handled(signal.SIGUSR1, interrupt):
        maker.start()
        assert begun.wait(timeout=SECONDS)
        with pytest.raises(InterruptedWaitError), signal_soon():
            cache.get_or_create(AXIS, GLOO, fail)

    def make_other():
        other_begun.set()
        assert about_to_wait.wait(timeout=SECONDS)
        # A thread that waits in C++ cannot be seen to. If it waits later, the result is the same.
        time.sleep(0.1)  # sleep: so that it waits by now in most runs
        return "the main thread's"

    assert cache.get_or_create(OTHER_AXIS, GLOO, make_other) == "the main thread's"
    maker.join(timeout=SECONDS)
    assert results == ["the main thread's"]


def test_signals_while_many_threads_wait():
    cache, results = GroupCache(), []
    with handled(signal.SIGUSR1, interrupt), being_made(cache):
        waiting = [
            threading.Thread(target=lambda: results.append(cache.get_or_create(AXIS, GLOO, fail)))
            for _ in range(8)
        ]
        for thread in waiting:
            thread.start()
        with pytest.raises(InterruptedWaitError), signal_soon():
            cache.get_or_create(AXIS, GLOO, fail)
        assert results == []  # only the main thread's wait is over
    for thread in waiting:
        thread.join(timeout=SECONDS)
    assert results == ["made"] * 8


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
    assert len(cache) == 1


def test_different_entries_are_made_side_by_side():
    cache, both_inside = GroupCache(), threading.Barrier(2)

    def ask(i):
        cache.get_or_create((AXIS, OTHER_AXIS)[i], GLOO, lambda: both_inside.wait(timeout=SECONDS))

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


def test_threads_that_wait_for_each_other_get_an_error():
    cache, both_inside, refused = GroupCache(), threading.Barrier(2), []

    def ask(i):
        mine, other = (AXIS, OTHER_AXIS)[:: 1 - 2 * i]

        def make():
            both_inside.wait(timeout=SECONDS)
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


class Handle:
    """Not all in its fields, as objects of C++ extensions are."""

    def __init__(self):
        self.lock = threading.Lock()


def key_with(handle):
    return OptionsKey.of("gloo", types.SimpleNamespace(handle=handle))


def test_a_cycle_through_a_key_of_the_cache_is_collected():
    cache, handle = GroupCache(), Handle()
    handle.cache = cache
    for axis in (AXIS, OTHER_AXIS):
        cache.get_or_create(axis, key_with(handle), Entry)
    alive = weakref.ref(handle)
    del cache, handle
    gc.collect()
    assert alive() is None


def test_a_handle_of_a_live_cache_outlives_its_keys():
    """Whichever of those that have it go in a cycle."""
    cache, ends, handle = GroupCache(), GroupCache(), Handle()
    handle.owners = [key_with(handle), ends]
    ends.get_or_create(AXIS, handle.owners[0], Entry)
    cache.get_or_create(AXIS, handle.owners[0], Entry)
    alive = weakref.ref(handle)
    del handle, ends
    for _ in range(3):
        gc.collect()
    assert len(alive().owners[1]) == 1
    (entry,) = cache.entries()
    assert entry[1] == alive().owners[0]
    cache.clear()
    del entry
    gc.collect()
    assert alive() is None


def test_a_handle_in_a_cycle_lives_while_its_entry_is_made():
    cache, handle = GroupCache(), Handle()
    handle.cache = cache
    alive = weakref.ref(handle)

    def collect():
        gc.collect()
        assert alive().cache is not None
        return Entry()

    key = key_with(handle)
    del handle
    cache.get_or_create(AXIS, key, collect)
    del key, cache
    gc.collect()
    assert alive() is None


def test_what_makes_an_entry_is_called():
    cache, key = GroupCache(), OptionsKey.of("gloo")
    cache.get_or_create(AxisLayout(2), key, lambda: "made")
    with pytest.raises(TypeError, match="make must be callable"):
        cache.get_or_create(AxisLayout(2), key, "made")


_ENDS_WHILE_A_THREAD_MAKES_ONE = """
import threading, time
from meshverse._core import AxisLayout, GroupCache, OptionsKey

class EndsLate:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)  # sleep: the thread wakes up meanwhile, and is ended

def make():
    begun.set()
    while True:
        time.sleep(0.01)  # sleep: forever

late, begun, cache = EndsLate(), threading.Event(), GroupCache()
arguments = AxisLayout(4), OptionsKey.of("gloo"), make
threading.Thread(target=cache.get_or_create, args=arguments, daemon=True).start()
begun.wait()
"""


def _run(program):
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)


def test_python_ends_while_a_thread_makes_an_entry():
    ended = _run(_ENDS_WHILE_A_THREAD_MAKES_ONE)
    assert ended.returncode == 0, ended.stderr


_ENDS_WHILE_THREADS_WAIT = """
import sys, threading, time
from meshverse._core import AxisLayout, GroupCache, OptionsKey, ring_steps

cache, axis, key = GroupCache(), AxisLayout(2), OptionsKey.of("gloo")
begun = threading.Event()
placements = [[*range(1 << 17)]] * 64

def make():
    begun.set()
    while True:
        time.sleep(0.001)  # sleep: forever

def compute():
    while True:
        ring_steps([1 << 17], [[0] * (1 << 17)], placements)

threading.Thread(target=cache.get_or_create, args=(axis, key, make), daemon=True).start()
assert begun.wait(60)
for work in (lambda: cache.get_or_create(axis, key, object), compute):
    threading.Thread(target=work, daemon=True).start()

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # sleep: the threads ask for Python's lock while the interpreter ends

sys.slow = Slow()
time.sleep(0.2)  # sleep: both threads are most likely in the core by then; if not, they end well
raise SystemExit(3)
"""


def test_a_process_ends_while_daemon_threads_are_in_the_core():
    ended = _run(_ENDS_WHILE_THREADS_WAIT)
    assert ended.returncode == 3, ended.stderr


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_makes_what_a_thread_of_its_parent_was_making():
    cache, begun, go_on = GroupCache(), threading.Event(), threading.Event()
    old = cache.get_or_create(OTHER_AXIS, GLOO, Entry)
    answers = []

    def make():
        begun.set()
        assert go_on.wait(SECONDS)
        return "the parent's"

    def ask():
        answers.append(cache.get_or_create(AXIS, GLOO, make))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(SECONDS)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a hang
        cache.reset_after_fork()
        kept = cache.get_or_create(OTHER_AXIS, GLOO, fail) is old
        made = cache.get_or_create(AXIS, GLOO, lambda: "the child's") == "the child's"
        os._exit(0 if kept and made and len(cache) == 2 else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert status == 0
    assert answers == ["the parent's"] * 4


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_fork_in_a_handler_of_what_waits_goes_on_in_the_child():
    """The main thread waits for an entry; its handler forks, and the child makes the entry."""
    cache, begun, go_on = GroupCache(), threading.Event(), threading.Event()
    children = []

    def make():
        begun.set()
        assert go_on.wait(SECONDS)
        return "the parent's"

    def handle(number, frame):
        children.append(os.fork())
        if children == [0]:
            signal.alarm(60)  # ends a hang
            cache.reset_after_fork()
        else:
            go_on.set()

    usual = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=lambda: cache.get_or_create(AXIS, GLOO, make), daemon=True)
    thread.start()
    assert begun.wait(SECONDS)
    # short-timeout: it must elapse, as a rule once this waits
    threading.Timer(0.2, signal.raise_signal, [signal.SIGUSR1]).start()
    try:
        made = cache.get_or_create(AXIS, GLOO, lambda: "the child's")
    finally:
        if children == [0]:
            os._exit(0 if made == "the child's" else 1)
        signal.signal(signal.SIGUSR1, usual)
    assert made == "the parent's"
    thread.join(SECONDS)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
