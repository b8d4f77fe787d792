"""Rendezvous of the members of a group: again and again, in threads, and elsewhere."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from helpers.crew import Crew
from helpers.turns import wait_until, wait_until_they_wait
from meshverse.agreement import Rendezvous, rendezvous
from meshverse.agreement.deadlock import Wait, note_key, read_wait
from meshverse.agreement.rendezvous import Waiting
from meshverse.store import Run, StoreKeys

_LONG = timedelta(seconds=60)
_SHORT = timedelta(seconds=0.3)  # short-timeout: it must elapse


class _World(NamedTuple):
    """A world, as far as a rendezvous needs one."""

    run_keys: StoreKeys
    rank: int
    is_over: bool = False


def _world(store: Any, rank: int) -> Any:
    run = Run(rank, world_size=4)
    run._number = 1  # no second run begins when a member comes again
    return _World(run.keys(store), rank)


def _join(
    store: Any,
    name: str,
    ranks: list[int],
    rank: int,
    timeout: timedelta | None = _LONG,
    own: Rendezvous | None = None,
    text: str | None = None,
) -> tuple[int, list[str]]:
    world = _world(store, rank)
    return (own or Rendezvous()).join(world, name, f"group {name}", ranks, timeout, text=text)


def _join_all(store: Any, name: str, ranks: list[int], own: dict[int, Rendezvous]) -> list[Any]:
    """All members, each a thread, join at once; what each got."""
    answers: dict[int, Any] = {}

    def join(rank: int) -> None:
        mine = own.setdefault(rank, Rendezvous())
        answers[rank] = _join(store, name, ranks, rank, own=mine, text=f"of {rank % 2}")

    threads = [threading.Thread(target=join, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [answers[rank] for rank in ranks]


def test_members_join_again_and_again_and_bring_texts() -> None:
    store, own = dist.HashStore(), dict[int, Rendezvous]()
    for attempt in range(3):
        texts = ["of 0", "of 1", "of 0"]
        assert _join_all(store, "x", [0, 1, 2], own) == [(attempt, texts)] * 3


def test_it_is_known_which_rendezvous_a_thread_is_in_and_in_which_one_inside_another() -> None:
    store, own, seen = dist.HashStore(), Rendezvous(), list[tuple[str, list[int]]]()

    def note() -> None:
        seen.extend((wait.label, list(wait.ranks)) for wait in own.waits.values())

    def look() -> RuntimeError:  # as a signal handler does
        note()
        if len(seen) == 1:
            with pytest.raises(RuntimeError, match="seen"):
                own.join(_world(store, 0), "y", "group y", [0, 2], _LONG, check=look)
            note()
        return RuntimeError("seen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_CHECK_SECONDS", 0.0)
        with pytest.raises(RuntimeError, match="seen"):
            own.join(_world(store, 0), "x", "group x", [0, 1], _LONG, check=look)
    assert seen == [("group x", [0, 1]), ("group y", [0, 2]), ("group x", [0, 1])]
    assert not own.waits
    own.waits[1] = Waiting("z", "group z", [0, 1], 0.0)
    own.reset_after_fork()
    assert not own.waits


def test_after_one_left_all_can_join_again() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=rf"rank {rank} waited 0:00:00.300000: 1 of 3 memb"):
            _join(store, "x", [0, 1, 2], rank, _SHORT)
    arguments = [(store, "x", [0, 1, 2], rank, _LONG, Rendezvous()) for rank in range(3)]
    threads = [threading.Thread(target=_join, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_who_joined_just_now_is_not_said_to_be_absent() -> None:
    store = dist.HashStore()

    def join() -> None:
        with pytest.raises(RuntimeError, match="rank 0 waited"):
            _join(store, "x", [0, 1, 2], 1)

    other = threading.Thread(target=join)  # which writes no note that it waits
    other.start()
    wait_until(lambda: _world(store, 0).run_keys.count("rendezvous/x/0/joined", 0))
    with pytest.raises(
        RuntimeError, match=r"2 of 3 members joined; missing: 1 of ranks \[1, 2\]\."
    ):
        _join(store, "x", [0, 1, 2], 0, _SHORT)
    other.join(30)


def test_nobody_joins_alone_after_a_rendezvous_that_was_complete() -> None:
    store, own = dist.HashStore(), dict[int, Rendezvous]()
    _join_all(store, "x", [0, 1], own)
    with pytest.raises(RuntimeError, match=r"1 of 2 members joined; missing: ranks \[1\]"):
        _join(store, "x", [0, 1], 0, _SHORT, own[0])


@pytest.mark.parametrize("text", [None, "here"])
def test_of_many_missing_members_some_are_named(text: str | None) -> None:
    # Without strings, a member that has joined just now looks like one that has not.
    certain = f"; missing: ranks {[*range(1, 17)]} and 3 others."
    words = certain if text else f"; possibly missing: ranks {[*range(1, 16)]}."
    with pytest.raises(RuntimeError, match=re.escape(f"1 of 20 members joined{words}")):
        _join(dist.HashStore(), "x", [*range(20)], 0, _SHORT, text=text)


def test_a_late_member_that_brings_a_text_gets_the_outcome() -> None:
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match=r"rank 0 waited .* missing: ranks \[1, 2\]"):
            _join(store, "x", [0, 1, 2], rank, _SHORT, text="here")


def test_keys_are_removed_from_the_store() -> None:
    store, own = dist.HashStore(), {0: Rendezvous(), 1: Rendezvous()}
    with pytest.raises(RuntimeError, match="rank 0 waited"):
        _join(store, "x", [0, 1], 0, _SHORT, own[0])
    second = threading.Thread(target=_join, args=(store, "x", [0, 1], 1, _LONG, own[1]))
    second.start()
    _join(store, "x", [0, 1], 0, own=own[0])
    second.join(30)
    assert store.num_keys() == 4  # of two attempts
    for rank, mine in own.items():
        mine.remove_from_store(_world(store, rank).run_keys, "x")
    assert store.num_keys() == 0


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1]], ids=["one never comes", "all come"])
def test_strings_are_removed_from_the_store_after_a_failure(ranks: list[int]) -> None:
    store, own = dist.HashStore(), {0: Rendezvous(), 1: Rendezvous()}
    for rank, mine in own.items():
        with pytest.raises(RuntimeError, match="rank 0 waited"):
            _join(store, "x", ranks, rank, _SHORT, mine, text="here")
        assert store.num_keys() == 2  # the count and the outcome
    for rank, mine in own.items():
        mine.remove_from_store(_world(store, rank).run_keys, "x")
    assert store.num_keys() == 2  # whoever joins again finds that this attempt has failed


def test_one_waits_for_ever_if_it_shall() -> None:
    store = dist.HashStore()
    first = threading.Thread(target=_join, args=(store, "x", [0, 1], 0, None), daemon=True)
    first.start()
    _join(store, "x", [0, 1], 1)
    first.join(30)
    assert not first.is_alive()


def test_a_group_of_one_waits_for_nobody() -> None:
    assert _join(None, "x", [3], 3, text="mine") == (0, ["mine"])


def _interrupted() -> str:
    """Rank 0 is interrupted in its wait for rank 2; the error that the others get, and how soon."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    rank, outcome, own = dist.get_rank(), "all joined", Rendezvous()
    store = _store()

    def interrupt_when_both_wait() -> None:
        wait_until_they_wait(0, 1, store=_world(store, rank).run_keys)
        os.kill(os.getpid(), signal.SIGALRM)

    if rank == 0:
        usual = signal.signal(signal.SIGALRM, interrupt)
        threading.Thread(target=interrupt_when_both_wait, daemon=True).start()
    if rank < 2:
        try:
            _join(store, "x", [0, 1, 2], rank, own=own)
        except (RuntimeError, KeyboardInterrupt) as error:
            outcome = repr(error)
    if rank == 0:
        signal.signal(signal.SIGALRM, usual)
    dist.barrier()
    if rank < 3:
        _join(store, "x", [0, 1, 2], rank, own=own)
    return outcome


def test_one_that_is_interrupted_tells_the_others(crew: Crew) -> None:
    first, second, *_ = crew.run(_interrupted, 4)
    assert first == "KeyboardInterrupt()"
    assert second == "RuntimeError('rank 0 left it: KeyboardInterrupt')"


# --- ranks that are elsewhere --------------------------------------------------------------------


def _store() -> dist.Store:
    return dist.PrefixStore("test", dist.distributed_c10d._get_default_store())


def _join_in(
    groups: dict[int, list[int]],
    seconds: float | dict[int, float],
    delays: dict[int, float],
    after: dict[int, list[int]] | None = None,
) -> Any:
    """Let each rank join its group of these; return its outcome."""
    rank, store = dist.get_rank(), _store()
    dist.barrier()  # a rank that comes after the others got their error joins the next rendezvous
    time.sleep(delays.get(rank, 0))  # sleep: others look for a deadlock meanwhile; it may be longer
    wait_until_they_wait(*(after or {}).get(rank, []), store=_world(store, rank).run_keys)
    outcome = "all joined"
    ranks, limit = groups[rank], seconds[rank] if isinstance(seconds, dict) else seconds
    try:
        world = _world(store, rank)
        Rendezvous().join(world, f"{ranks}", f"group of {rank}", ranks, timedelta(seconds=limit))
    except RuntimeError as error:
        outcome = str(error)
    return outcome


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param(
            {0: [0, 1], 1: [0, 1, 2], 2: [0, 1, 2], 3: [3]}, id="inside", marks=pytest.mark.long
        ),
        pytest.param(
            {0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [3, 0]}, id="around", marks=pytest.mark.long
        ),
        pytest.param({0: [0, 1, 3], 1: [0, 1, 2], 2: [0, 1, 2], 3: [0, 1, 3]}, id="across"),
    ],
)
def test_all_whose_group_is_in_a_deadlock_get_an_error_soon(
    crew: Crew, groups: dict[int, list[int]]
) -> None:
    late = [rank for rank in (1, 2, 3) if groups[rank] != [rank]]  # rank 0 comes when these wait
    for rank, answer in enumerate(crew.run(_join_in, 4, groups, 60, {}, {0: late})):
        if groups[rank] == [rank]:
            assert answer == "all joined"
            continue
        assert answer.startswith("deadlock: rank ")
        assert answer.count("waits to create group of") >= 2


@pytest.mark.parametrize(
    ("size", "expected"),
    [(3, "group 'x' with ranks [0, 1, 2] at"), (1_000, "group 'x' with 1000 ranks, among them [")],
)
def test_a_note_of_a_large_group_says_that_it_names_some_of_its_ranks(
    size: int, expected: str
) -> None:
    note = Wait(7, "key", "group 'x'", "train.py:3", range(size), size)
    read = {note_key(7): note.to_text()}.__getitem__
    known = read_wait(7, read)
    assert known is not None
    assert expected in str(known)
    assert len(known.ranks) <= 64


class _GoesOnMeanwhile:
    """A store: before one reads the note of rank 2, ranks 1 and 2 complete a rendezvous.

    They have also removed its keys, and rank 2 waits in the reader's one.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, *values: str) -> bytes:
        if key.endswith(note_key(2)):
            others = _world(self._store, 2).run_keys
            others.remove(note_key(1))
            others.write(note_key(2), Wait(2, "rendezvous/x/0", "x", "", [0, 1, 2], 3).to_text())
        return self._store.compare_set(key, *values)


def test_a_note_that_is_outdated_is_no_part_of_a_deadlock() -> None:
    store = dist.HashStore()
    note = Wait(1, "rendezvous/y/0", "y", "", [1, 2], 2)
    _world(store, 1).run_keys.write(note_key(1), note.to_text())
    timeout = timedelta(seconds=4)  # short-timeout: it must elapse
    with pytest.raises(RuntimeError, match="rank 0 waited 0:00:04"):
        _join(_GoesOnMeanwhile(store), "x", [0, 1, 2], 0, timeout)


@pytest.mark.long
def test_who_waits_for_no_deadlock_waits_on(crew: Crew) -> None:
    groups = {0: [0, 1], 1: [1, 2], 2: [2, 3], 3: [2, 3]}
    seconds = {0: 6, 1: 6, 2: 60, 3: 60}
    # Rank 3 comes after rank 0 has looked for a cycle twice.
    result, _, *others = crew.run(_join_in, 4, groups, seconds, {3: 4})
    assert others == ["all joined"] * 2
    # Rank 1 gives up at about the same time: it may or may not be found waiting for rank 2.
    assert result.startswith("rank 0 waited 0:00:06: 1 of 2 members joined; ")


@pytest.mark.long
def test_the_one_who_is_elsewhere_is_named(crew: Crew) -> None:
    groups = {0: [0, 1], 1: [1, 2], 2: [2], 3: [3]}
    seconds = {0: 1.5, 1: 30, 2: 30, 3: 30}  # rank 1 still waits when rank 0 gives up
    result, *_ = crew.run(_join_in, 4, groups, seconds, {}, {0: [1]})
    where = (
        r"1 of 2 members joined; "
        r"rank 1 waits to create group of 1 with ranks \[1, 2\] at \S+, for rank 2\. Those that "
    )
    assert re.search(where, result)


def _in_two_threads(delays: dict[tuple[int, str], float]) -> list[str]:
    """Each rank comes to x in its main thread and to y in another; errors."""
    rank, store, own, seen = dist.get_rank(), _store(), Rendezvous(), []

    def come(name: str) -> None:
        # sleep: the other rank looks for a deadlock meanwhile; it may be longer
        time.sleep(delays.get((rank, name), 0))
        try:
            own.join(_world(store, rank), name, name, [0, 1], _LONG)
        except RuntimeError as error:
            seen.append(str(error))

    other = threading.Thread(target=come, args=("y",))
    other.start()
    come("x")
    other.join(30)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    "delays",
    [
        pytest.param(
            {(1, "x"): 3, (1, "y"): 4}, id="one rank waits in both", marks=pytest.mark.long
        ),
        pytest.param({(0, "y"): 4, (1, "x"): 4}, id="each waits in one, and comes to the other"),
    ],
)
def test_what_threads_wait_for_is_no_deadlock(
    crew: Crew, delays: dict[tuple[int, str], float]
) -> None:
    assert crew.run(_in_two_threads, 2, delays) == [[], []]


def _no_use_when_all_have_joined() -> int:
    """Rank 0 learns that there is no use in waiting, just after rank 1 has joined as the last."""
    rank, store = dist.get_rank(), _store()
    world, limit = _world(store, rank), timedelta(seconds=30)

    def check() -> RuntimeError:
        store.set("rank 0 checks", "")
        store.wait(["rank 1 has joined"])
        return RuntimeError("there is no use in waiting")

    if rank == 0:
        return Rendezvous().join(world, "pair", "pair", [0, 1], limit, check=check).attempt
    store.wait(["rank 0 checks"])
    attempt = Rendezvous().join(world, "pair", "pair", [0, 1], limit).attempt
    store.set("rank 1 has joined", "")
    return attempt


def test_what_all_have_joined_is_not_left(crew: Crew) -> None:
    assert crew.run(_no_use_when_all_have_joined, 2) == [0, 0]


class _StopError(RuntimeError):
    """The error of a signal handler of the program."""


def test_what_a_signal_handler_raises_is_raised_if_all_have_joined_too() -> None:
    store = dist.HashStore()

    def check() -> None:
        _join(store, "pair", [0, 1], 1)
        raise _StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_CHECK_SECONDS", 0.0)
        with pytest.raises(_StopError):
            Rendezvous().join(_world(store, 0), "pair", "pair", [0, 1], _LONG, check=check)
