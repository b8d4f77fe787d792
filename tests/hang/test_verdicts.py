"""Verdicts on simulated ranks: who is missing, and what is the cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshverse import Hang
from meshverse.hang.records import ANY_SOURCE, Call, GroupSeen, Progress, RankRecord
from meshverse.hang.report import ReportFormatter
from meshverse.hang.verdicts import Cause, Stuck, find_stuck

_NOW = 100.0


def _call(group: str, number: int, *, done: bool = False, **changed: object) -> Call:
    call = Call(
        group, number, "all_reduce", done, _NOW - 60, ((4,),), "Float", "/x/train.py:8 in f"
    )
    return call._replace(**changed)  # type: ignore[arg-type]


def _records(
    groups: dict[str, Sequence[int]], calls: dict[int, Sequence[Call]]
) -> dict[int, RankRecord]:
    seen = {name: GroupSeen(f"axis {name[:2]}", ranks) for name, ranks in groups.items()}
    return {
        rank: RankRecord(rank, _NOW, list(own), {n: seen[n] for n in groups if rank in groups[n]})
        for rank, own in calls.items()
    }


def _verdict(found: Sequence[Stuck], index: int = 0) -> str:
    return ReportFormatter().verdict(found[index], {one.name: one for one in found})


def test_ranks_that_are_past_a_call_are_no_longer_waited_for() -> None:
    calls = {
        0: [_call("dp", 3, done=True), _call("dp", 4)],
        1: [_call("dp", 3)],
        2: [_call("dp", 7)],  # whose third call is out of the recorder's buffer
        3: [_call("dp", 2, done=True)],
    }
    (found,) = find_stuck(_records({"dp": range(4)}, calls))
    assert (found.call.number, [*found.waiting], found.past) == (3, [1], [0, 2])
    assert [missing.rank for missing in found.missing] == [3]
    assert found.cause is Cause.MISSING
    assert found.seconds == 60


def test_a_record_older_than_the_call_does_not_show_that_a_rank_is_missing() -> None:
    calls = {0: [_call("dp", 3)], 1: [_call("dp", 2, done=True, since=_NOW - 200)]}
    records = _records({"dp": range(2)}, calls)
    assert "rank 1 has not called it" in _verdict(find_stuck(records))
    records[1].time = _NOW - 61
    said = "the dump of rank 1 is older than the call of the others: it may have called it since."
    assert _verdict(find_stuck(records)).startswith(said)
    records[0].calls = [_call("dp", 0, operation="recv", peer=1)]
    records[1].calls = []
    assert _verdict(find_stuck(records)).startswith(said)


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        (Progress.CALLED, "a deadlock. Rank 1 waits in"),
        (Progress.ENQUEUED, "this may be a deadlock. Rank 1 waits in"),
        (Progress.STARTED, "a deadlock. Rank 1 waits in"),
    ],
)
def test_that_calls_wait_for_one_another_is_sure_only_where_starts_are_recorded(
    progress: Progress, said: str
) -> None:
    calls = {0: [_call("tp", 3, progress=progress)], 1: [_call("dp", 3, progress=progress)]}
    found = find_stuck(_records({"dp": range(2), "tp": range(2)}, calls))
    assert [one.cause for one in found] == [Cause.DEADLOCK] * 2
    verdict = _verdict(found, [one.name for one in found].index("dp"))
    assert verdict.startswith(said)
    assert ("not recorded (TORCH_NCCL_ENABLE_TIMING=1)" in verdict) == ("may" in said)


def test_of_a_shared_group_a_report_says_that_results_may_be_wrong() -> None:
    def report(label: str, second: dict[int, Sequence[Call]]) -> str:
        records = _records({"dp": range(2), "tp": range(2)}, {0: [_call("dp", 3)], **second})
        for record in records.values():
            record.groups["dp"] = GroupSeen(label, range(2))
        return ReportFormatter().text(find_stuck(records))

    skipped: dict[int, Sequence[Call]] = {1: [_call("tp", 3)]}
    other: dict[int, Sequence[Call]] = {1: [_call("dp", 3, operation="broadcast")]}
    late: dict[int, Sequence[Call]] = {1: [_call("dp", 2, done=True)]}
    dead: dict[int, Sequence[Call]] = {}
    shared = "axis dp (shared with ep, fsdp)"
    doubt = "not known whether a rank skipped a call on dp/ep/fsdp. If one did, results since then"
    for second in (skipped, other, late):
        assert report(shared, second).count(doubt) == 1
        assert "may be wrong" not in report("axis dp", second)
    slow = "If the missing ranks are only slow, nothing is wrong. It is not known"
    assert slow in report(shared, late)
    assert "slow" not in report(shared, other)
    assert "may be wrong" not in report(shared, dead)
    assert "may be wrong" not in report(shared, {1: [_call("dp", 3)]})


def test_all_have_come() -> None:
    (found,) = find_stuck(_records({"dp": range(2)}, {rank: [_call("dp", 3)] for rank in (0, 1)}))
    assert found.cause is Cause.UNKNOWN
    assert "all ranks have made the call, and torch's records show no mismatch" in _verdict([found])


def test_of_a_group_whose_ranks_are_not_known_nobody_is_said_to_have_come() -> None:
    records = _records({"dp": range(2)}, {0: [_call("dp", 3)]})
    records[0].groups["dp"] = GroupSeen("axis dp", None)
    (found,) = find_stuck(records)
    assert "Which other ranks it has is not recorded." in _verdict([found])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"operation": "broadcast"}, "operation all_reduce on ranks 0, 1; broadcast on rank 2"),
        ({"shapes": ((5,),)}, "shape (4,) on ranks 0, 1; (5,) on rank 2"),
        ({"dtype": "BFloat16"}, "dtype float32 on ranks 0, 1; bfloat16 on rank 2"),
    ],
)
def test_ranks_that_call_different_things(changed: dict[str, object], said: str) -> None:
    calls = {rank: [_call("dp", 3)] for rank in (0, 1)}
    calls[2] = [_call("dp", 3, **changed)]
    (found,) = find_stuck(_records({"dp": range(4)}, calls))
    assert found.cause is Cause.MISMATCH
    assert said in _verdict([found])


@pytest.mark.parametrize(
    "operation", ["all_reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base"]
)
def test_inputs_of_equally_many_elements_may_have_different_shapes(operation: str) -> None:
    shapes = (((8,), ()), ((4, 2), (1,)), ((2, 2, 2), (1, 1)))
    calls = {rank: [_call("dp", 3, operation=operation, shapes=shapes[rank])] for rank in range(3)}
    (found,) = find_stuck(_records({"dp": range(3)}, calls))
    assert (found.cause, found.differing) == (Cause.UNKNOWN, {})
    (found,) = find_stuck(_records({"dp": range(4)}, calls))
    assert found.cause is Cause.MISSING
    calls[3] = [_call("dp", 3, operation=operation, shapes=((9,), ()))]
    (found,) = find_stuck(_records({"dp": range(4)}, calls))
    assert found.cause is Cause.MISMATCH
    assert "; (9,), () on rank 3" in _verdict([found])


def test_shards_of_an_exchange_may_be_uneven() -> None:
    calls = {rank: [_call("ep", 1, operation="all_to_all", shapes=((rank,),))] for rank in range(2)}
    (found,) = find_stuck(_records({"ep": range(2)}, calls))
    assert found.cause is Cause.UNKNOWN


def test_groups_to_which_ranks_gave_one_number_are_kept_apart() -> None:
    # c10d counts the groups of a process: "3" is ranks 0 and 1 here, ranks 2 and 3 there.
    records = {
        rank: RankRecord(rank, _NOW, [_call("3", 1)], {"3": GroupSeen("axis tp", ranks)})
        for ranks in ((0, 1), (2, 3))
        for rank in ranks
    }
    records[3].calls = []
    found = find_stuck(records)
    assert [(one.seen.ranks, one.cause) for one in found] == [
        ([2, 3], Cause.MISSING),
        ([0, 1], Cause.UNKNOWN),
    ]


def test_a_group_that_waits_for_a_cause_follows() -> None:
    # Ranks 0-2 wait for rank 3 in dp. Rank 4 waits for rank 0 in tp.
    calls = {rank: [_call("dp", 1)] for rank in range(3)}
    calls |= {3: [], 4: [_call("tp", 9)]}
    found = find_stuck(_records({"tp": (0, 4), "dp": range(4)}, calls))
    assert [(one.group, one.cause) for one in found] == [
        ("dp", Cause.MISSING),
        ("tp", Cause.FOLLOWS),
    ]
    assert _verdict(found, 1) == (
        "caused by another hang: rank 0 waits in all_reduce number 1 on axis dp, ranks 0-3. There, "
        "rank 3 has not called it."
    )


def test_a_rank_that_is_missing_in_two_groups_is_reported_where_it_is_missing_first() -> None:
    # Rank 2 comes neither to tp nor, later, to the group of all, where rank 1 is missing for it.
    calls = {0: [_call("world", 1)], 1: [_call("tp", 1)], 2: []}
    found = find_stuck(_records({"tp": (1, 2), "world": range(3)}, calls))
    assert [(one.group, one.cause) for one in found] == [
        ("tp", Cause.MISSING),
        ("world", Cause.FOLLOWS),
    ]


def test_a_dead_rank_is_a_cause_though_another_missing_rank_waits_elsewhere() -> None:
    calls = {0: [_call("dp", 1)], 1: [_call("tp", 1)]}
    found = find_stuck(_records({"dp": range(3), "tp": (1, 5)}, calls))
    assert {one.group: one.cause for one in found} == {"dp": Cause.MISSING, "tp": Cause.MISSING}
    assert "there is no dump of rank 2" in _verdict([one for one in found if one.group == "dp"])


def test_a_call_that_waits_for_ranks_of_a_mismatch_follows() -> None:
    # In dp, ranks 0 and 1 call different operations. Rank 2 waits for rank 1 in tp, and is missing
    # in dp: with it, the ranks would wait as well.
    calls = {0: [_call("dp", 1)], 1: [_call("dp", 1, operation="broadcast")], 2: [_call("tp", 1)]}
    found = find_stuck(_records({"dp": range(3), "tp": (1, 2)}, calls))
    assert [(one.group, one.cause) for one in found] == [
        ("dp", Cause.MISMATCH),
        ("tp", Cause.FOLLOWS),
    ]


def test_missing_ranks_whose_records_were_not_read_are_named() -> None:
    # Rank 1 waits in tp instead.
    calls = {0: [_call("dp", 1)], 1: [_call("tp", 1)], 5: []}
    records = _records({"dp": range(3), "tp": (1, 5)}, calls)
    records[2] = RankRecord(2, _NOW, was_read=False)
    (found,) = (one for one in find_stuck(records) if one.group == "dp")
    assert found.cause is Cause.MISSING
    assert "the flight recorder of rank 2 was not read" in _verdict([found])


def _p2p(operation: str, peer: int) -> Call:
    return _call("pp", 1, operation=operation, peer=peer)


def test_a_send_without_its_receive() -> None:
    records = _records({"pp": (4, 6), "tp": (6, 7)}, {4: [_p2p("send", 1)], 6: [_call("tp", 2)]})
    group, pair = find_stuck(records)
    assert (group.group, group.cause) == ("tp", Cause.MISSING)  # of rank 7 there is no dump
    assert (pair.cause, pair.seen.ranks) == (Cause.FOLLOWS, [4, 6])
    verdict = _verdict([group, pair], 1)
    assert "rank 6 waits in all_reduce number 2 on axis tp, ranks 6, 7" in verdict
    assert "There, there is no dump of rank 7" in verdict
    del records[6].calls[:]
    (pair,) = find_stuck(records)
    assert pair.cause is Cause.PARTNER
    assert _verdict([pair]) == "a send without its receive: rank 6 has not called it."


def test_both_sides_of_a_transfer_are_there() -> None:
    calls = {4: [_p2p("send", 1)], 6: [_p2p("recv", 0)]}
    (found,) = find_stuck(_records({"pp": (4, 6)}, calls))
    assert (found.call.operation, found.cause) == ("send", Cause.UNKNOWN)


def test_two_receives_from_each_other_lack_their_sends() -> None:
    calls = {4: [_p2p("recv", 1)], 6: [_p2p("recv", 0)]}
    found = find_stuck(_records({"pp": (4, 6)}, calls))
    assert [one.cause for one in found] == [Cause.DEADLOCK, Cause.DEADLOCK]
    assert "One of these ranks must begin with the call that another one waits for" in _verdict(
        found
    )


def test_a_receive_from_any_rank_waits_for_nobody_in_particular() -> None:
    calls = {
        0: [_p2p("recv", ANY_SOURCE)],
        1: [],
        2: [_call("dp", 4)],
        3: [_call("tp", 5), _p2p("recv", ANY_SOURCE)._replace(group="tp")],
    }
    groups = {"pp": range(3), "dp": (0, 2), "tp": (3,)}
    found = find_stuck(_records(groups, calls))
    (received,) = (one for one in found if one.name == "pp: any to 0")
    assert (received.cause, received.missing) == (Cause.UNKNOWN, [])
    assert [each.rank for each in received.may_send] == [1, 2]
    text = ReportFormatter().text(found, [received])
    assert "may send:      rank 1, no call in this group yet" in text
    assert "rank 2, waiting in all_reduce number 4 on axis dp, ranks 0, 2 at" in text
    assert "rank 0 receives from any rank, and none has sent to it" in text
    # Rank 2 waits for rank 0: that is no deadlock, as rank 1 may send.
    (waits,) = (one for one in found if one.name == "dp")
    assert (waits.cause, waits.via) == (Cause.FOLLOWS, (0, "pp: any to 0"))


def test_in_a_group_of_two_a_receive_from_any_rank_waits_for_the_other_one() -> None:
    calls = {4: [_p2p("recv", ANY_SOURCE)], 6: []}
    (found,) = find_stuck(_records({"pp": (4, 6)}, calls))
    assert found.cause is Cause.PARTNER
    assert "a recv without its send: rank 6 has not called it" in _verdict([found])
    calls[6] = [_p2p("recv", 0)]
    assert {one.cause for one in find_stuck(_records({"pp": (4, 6)}, calls))} == {Cause.DEADLOCK}


@pytest.mark.parametrize("cause", Cause)
def test_the_guide_and_the_docstring_list_each_cause(cause: Cause) -> None:
    guide = Path(__file__).parents[2] / "docs" / "hangs.md"
    assert f"\n| `{cause.value}` | " in guide.read_text(encoding="utf-8")
    assert f'"{cause.value}"' in (Hang.__doc__ or "")


# --- any program ----------------------------------------------------------------------------------

_GROUPS = {
    "row0": (0, 1, 2),
    "row1": (3, 4, 5),
    "col0": (0, 3),
    "col1": (1, 4),
    "col2": (2, 5),
    "all": (0, 1, 2, 3, 4, 5),
}


@st.composite
def _programs(draw: st.DrawFn) -> dict[int, list[str]]:
    """Which groups each rank calls, in which order."""
    return {
        rank: draw(
            st.lists(st.sampled_from([n for n, r in _GROUPS.items() if rank in r]), max_size=4)
        )
        for rank in range(6)
    }


def _run(programs: dict[int, list[str]]) -> tuple[dict[int, int], dict[int, RankRecord]]:
    """Run the programs until no rank goes on; return where each stands, and the records."""
    at = dict.fromkeys(programs, 0)
    while True:
        now = {rank: calls[at[rank]] for rank, calls in programs.items() if at[rank] < len(calls)}
        complete = [n for n, ranks in _GROUPS.items() if all(now.get(r) == n for r in ranks)]
        if not complete:
            break
        for rank in _GROUPS[complete[0]]:
            at[rank] += 1
    calls = {
        rank: [
            _call(name, names[: index + 1].count(name), done=index < at[rank])
            for index, name in enumerate(names[: at[rank] + 1])
        ]
        for rank, names in programs.items()
    }
    return at, _records(dict(_GROUPS), calls)


@given(_programs())
def test_any_program_that_hangs(programs: dict[int, list[str]]) -> None:
    at, records = _run(programs)
    waits = {rank: calls[at[rank]] for rank, calls in programs.items() if at[rank] < len(calls)}
    found = {one.group: one for one in find_stuck(records)}
    assert set(found) == set(waits.values())
    follows = {}
    for name, one in found.items():
        assert set(one.waiting) == {rank for rank, group in waits.items() if group == name}
        assert {missing.rank for missing in one.missing} == set(_GROUPS[name]) - set(one.waiting)
        follows[name] = {waits[rank] for rank in _GROUPS[name] if waits.get(rank, name) != name}
        assert set(one.waits_on) == follows[name]

    def reaches(name: str, goal: str) -> bool:
        seen: set[str] = set()
        left = list(follows[name])
        while left:
            other = left.pop()
            if other == goal:
                return True
            if other not in seen:
                seen.add(other)
                left += follows[other]
        return False

    for name, one in found.items():
        is_deadlock = reaches(name, name)
        reported = {m.rank for other in follows[name] for m in found[other].missing}
        ended = [rank for rank in _GROUPS[name] if rank not in waits and rank not in reported]
        wanted = Cause.DEADLOCK if is_deadlock else Cause.MISSING if ended else Cause.FOLLOWS
        assert one.cause is wanted
        if is_deadlock:
            assert one.cycle[0] == name
            for first, second in zip(one.cycle, [*one.cycle[1:], name], strict=True):
                assert second in follows[first]
    causes = [one.cause for one in find_stuck(records)]
    assert causes == sorted(causes, key=[*Cause].index)
    assert not causes or causes[0] in (Cause.DEADLOCK, Cause.MISSING)
    assert ReportFormatter().text([*found.values()]).count("Stuck: ") == len(found)


def _at_helper(group: str, *callers: str) -> Call:
    return _call(group, 4, line="/me/comm.py:4 in reduce", callers=callers)


def test_calls_of_one_helper_come_with_its_callers() -> None:
    router, norm = "/me/loop.py:8 in router", "/me/loop.py:12 in norm"
    calls = {
        0: [_at_helper("tp", "/me/comm.py:30 in forward", router)],
        1: [_at_helper("etp", "/me/comm.py:30 in forward", norm)],
    }
    found = find_stuck(_records({"tp": range(2), "etp": range(2)}, calls))
    text = ReportFormatter().text(found)
    assert "rank 0 at me/comm.py:4 in reduce, called at me/loop.py:8 in router" in text
    assert "comm.py:30" not in text  # the same for both
    verdict = ReportFormatter().data(found)[0]["verdict"]
    assert "called at me/loop.py:8 in router" in verdict
    assert "called at me/loop.py:12 in norm" in verdict
    assert [one.call.line for one in found] == ["/me/comm.py:4 in reduce"] * 2  # as compared


def test_a_helper_that_one_place_calls_is_enough() -> None:
    calls = {rank: [_at_helper("dp", "/me/loop.py:8 in f")] for rank in (0, 1)}
    text = ReportFormatter().text(find_stuck(_records({"dp": range(3)}, {**calls, 2: []})))
    assert "ranks 0, 1 at me/comm.py:4 in reduce\n" in text
    assert "called at" not in text
