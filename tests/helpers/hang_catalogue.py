"""Hangs by name, with the root cause that `meshverse hang` is to name.

Each program says what a rank calls; its lines are numbered from 1 (`/me/train.py`). `nccl` is the
verdict where no times of the GPU are recorded, `timed` with TORCH_NCCL_ENABLE_TIMING=1 (as `nccl`
unless given), `gloo` that of gloo's dumps with --mesh. A verdict is the cause of the first stuck
call, and parts of its text.
"""

from __future__ import annotations

from typing import NamedTuple

from .recorded_job import Job, Step


class Verdict(NamedTuple):
    """The expected verdict: the cause, its parts in the text, and others that must not be there."""

    cause: str
    parts: tuple[str, ...]
    never: tuple[str, ...] = ()


class CataloguedHang(NamedTuple):
    """A job that hangs, its mesh for --mesh, and its verdicts by format."""

    what: str
    mesh: str
    job: Job
    nccl: Verdict
    timed: Verdict | None = None
    gloo: Verdict | None = None


def reduces(group: str, kind: str = "all_reduce", **changed: object) -> Step:
    return Step(kind, group, **changed)  # type: ignore[arg-type]


def sends(group: str, peer: int, **changed: object) -> Step:
    return Step("send", group, peer=peer, **changed)  # type: ignore[arg-type]


def receives(group: str, peer: int, **changed: object) -> Step:
    return Step("recv", group, peer=peer, **changed)  # type: ignore[arg-type]


def batch(*steps: Step) -> Step:
    return Step("batch", batch=steps)


STOPS, SYNCS, DIES, KERNEL = (Step(kind) for kind in ("stops", "syncs", "dies", "kernel"))
WORLD, DP, TP, CP = (reduces(axis) for axis in ("world", "dp", "tp", "cp"))
_SQUARE = {"dp": [(0, 2), (1, 3)], "tp": [(0, 1), (2, 3)]}
_LINE = {"pp": [(0, 1, 2, 3)]}
_ONE_CAUSE = "Verdict: rank 3 (x=3) has not called it"
_ENQUEUED = Verdict(
    "unknown", ("all ranks have enqueued the call", "look at the ranks' stacks"), ("network",)
)
_NO_P2P = Verdict("", ("Gloo does not record sends and receives",))


def _mismatch(*parts: str) -> Verdict:
    return Verdict("mismatch", ("the ranks make different calls", *parts))


def _missing(*parts: str) -> Verdict:
    return Verdict("missing", parts)


def _deadlock(*parts: str) -> Verdict:
    return Verdict("deadlock", ("a deadlock", *parts))


def _partner(*parts: str) -> Verdict:
    return Verdict("partner", parts)


_LATE = _missing(_ONE_CAUSE)
# A step of training in one group, and one in two groups: calls with the lines that make them.
_GATHER = reduces("world", "all_gather", shape=(33,), line=5)
_OTHER_GATHER = reduces("world", "all_gather", shape=(33,), line=9)
_SCATTER = reduces("world", "reduce_scatter", shape=(66,), line=6)
_LOG = reduces("world", shape=(1,), line=8)
_STEP = [_GATHER, _SCATTER, _LOG]
_TP_STEP = [reduces("tp", line=5), reduces("tp", line=6), reduces("world", "barrier", line=8)]
_EITHER = "Either a rank skipped or added an earlier call, or its arguments are wrong."
_NO_SKIP = ("skipped all_", "skipped barrier", "skipped reduce_", "skipped broad", "earlier rep")
_DEAD = _missing("Verdict: there is no dump of rank 3")

CATALOGUE = [
    CataloguedHang(
        "a rank is in its data loader",
        "x=4",
        Job([[WORLD, WORLD, SYNCS]] * 3 + [[WORLD, STOPS]]),
        _LATE,
        gloo=_LATE,
    ),
    CataloguedHang(
        "a rank has died", "x=4", Job([[WORLD, WORLD]] * 3 + [[DIES]]), _DEAD, gloo=_DEAD
    ),
    CataloguedHang(
        "a rank has one batch less",
        "x=4",
        Job([[WORLD] * 4] * 3 + [[WORLD] * 3]),
        _LATE,
        gloo=_LATE,
    ),
    CataloguedHang(
        "a call on one rank alone",
        "x=4",
        Job([[WORLD, WORLD]] + [[WORLD]] * 3),
        _missing("ranks 1-3 have not called it"),
        gloo=_missing("ranks 1-3 have not called it"),
    ),
    CataloguedHang(
        "two groups crossed by two ranks",
        "dp=2 tp=2",
        Job([[TP, DP], [DP, TP], [DP, TP], [TP, DP]], _SQUARE),
        _deadlock("axis dp", "axis tp", "must use these groups in the same order"),
        gloo=_deadlock("axis dp", "axis tp"),
    ),
    CataloguedHang(
        "one rank crosses a group with the world",
        "dp=2 tp=2",
        Job([[TP, WORLD], [WORLD, TP], [TP, WORLD], [TP, WORLD]], _SQUARE),
        _deadlock("axis tp", "the default group"),
        gloo=_deadlock("axis tp", "the default group"),
    ),
    CataloguedHang(
        "three groups crossed in a ring",
        "",
        Job(
            [
                [reduces("a"), reduces("c")],
                [reduces("b"), reduces("a")],
                [reduces("c"), reduces("b")],
            ],
            {"a": [(0, 1)], "b": [(1, 2)], "c": [(2, 0)]},
        ),
        _deadlock("axis a", "axis b", "axis c"),
    ),
    CataloguedHang(
        "a rank skips a call and goes on to a barrier",
        "dp=2 tp=2",
        Job(
            [[TP, reduces("world", "barrier")]] * 3 + [[reduces("world", "barrier")]],
            _SQUARE,
        ),
        _deadlock("axis tp", "the default group", "skip none"),
        gloo=_deadlock("axis tp", "the default group", "skip none"),
    ),
    CataloguedHang(
        "a rank skips a call of the same group",
        "x=4",
        Job([[reduces("world", "broadcast"), WORLD]] * 3 + [[WORLD]]),
        _mismatch("operation broadcast on ranks 0-2; all_reduce on rank 3"),
        gloo=_mismatch("operation broadcast on ranks 0-2; all_reduce on rank 3"),
    ),
    CataloguedHang(
        "a rank skips a call of later rounds",
        "x=4",
        Job([_STEP * 3] * 3 + [_STEP * 2 + _STEP[:2] + [_GATHER]]),
        _mismatch(
            "Stuck: all_reduce or all_gather number 9 on the default group, ranks 0-3, "
            "float32 (1,) or float32 (33,), for",
            "Rank 3 (x=3) skipped all_reduce number 9 on the default group, which ranks 0-2 called "
            "at me/train.py:8 in train: look at the condition around that line. In earlier "
            "repetitions of these calls, that one came before what rank 3 called instead.",
        ),
        gloo=_mismatch("Rank 3 (x=3) skipped all_reduce number 9 on the default group, which "),
    ),
    CataloguedHang(
        "most ranks skip a call of later rounds",
        "x=3",
        Job([_STEP * 3] + [_STEP * 2 + [_SCATTER]] * 2),
        _mismatch("Ranks 1, 2 skipped all_gather number 7 on the default group, which rank 0 "),
        gloo=_mismatch(
            "Ranks 1, 2 skipped all_gather number 7 on the default group, which rank 0 "
        ),
    ),
    CataloguedHang(
        "a rank skips a call before others",
        "x=4",
        Job([[_LOG, *_STEP]] * 3 + [_STEP]),
        _mismatch(
            "Rank 3 (x=3) skipped all_reduce number 1 on the default group, which ranks 0-2 called "
            "at me/train.py:8 in train: look at the condition around that line. Its next calls are "
            "those which the other ranks made after it."
        ),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "a rank makes another call than in earlier rounds",
        "x=4",
        Job([_STEP * 3] * 3 + [_STEP * 2 + [reduces("world", "broadcast", line=9)]]),
        Verdict(
            "mismatch",
            (
                _EITHER,
                "Before, rank 0 called all_reduce number 6 at me/train.py:8 in train; rank 3 ",
                "by line: me/train.py:5 in train (rank 0: 3, rank 3: 2); ",
                "me/train.py:9 in train (rank 0: 0, rank 3: 1).",
            ),
            _NO_SKIP,
        ),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "a rank repeats a call of earlier rounds",
        "x=4",
        Job([_STEP * 4] * 3 + [[*_STEP * 2, _GATHER, _GATHER, *_STEP[1:], *_STEP]]),
        Verdict("mismatch", (_EITHER,), _NO_SKIP),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "a rank makes an extra call before the first round",
        "x=4",
        Job([_STEP] * 3 + [[_LOG, *_STEP]]),
        Verdict("mismatch", (_EITHER,), _NO_SKIP),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "a rank makes an extra call between rounds",
        "x=2",
        Job([_STEP * 4, [*_STEP * 2, reduces("world", "broadcast", line=9), *_STEP * 2]]),
        Verdict("mismatch", (_EITHER,), _NO_SKIP),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "a rank makes an extra call that is like the next one",
        "x=4",
        Job(
            [[_GATHER, *_STEP] * 3] * 3 + [[_GATHER, *_STEP, _OTHER_GATHER, *[_GATHER, *_STEP] * 2]]
        ),
        Verdict("mismatch", (_EITHER, "me/train.py:9 in train (rank 0: 0, rank 3: 1)"), _NO_SKIP),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "either of two ranks may have skipped a call",
        "x=2",
        Job([[_LOG, _GATHER] * 2, [_GATHER, _LOG] * 2]),
        Verdict("mismatch", (_EITHER,), _NO_SKIP),
        gloo=Verdict("mismatch", (_EITHER,), _NO_SKIP),
    ),
    CataloguedHang(
        "a rank skips a call of later rounds and goes on to a barrier",
        "dp=2 tp=2",
        Job([_TP_STEP * 3] * 3 + [_TP_STEP * 2 + [_TP_STEP[0], _TP_STEP[2]]], _SQUARE),
        _deadlock(
            "Rank 3 (dp=1, tp=1) skipped all_reduce number 6 on axis tp, which rank 2 called at "
            "me/train.py:6 in train: look at the condition around that line. In earlier "
            "repetitions of these calls, that one came before what rank 3 called instead."
        ),
        gloo=_deadlock("Rank 3 (dp=1, tp=1) skipped all_reduce number 6 on axis tp, which rank 2 "),
    ),
    CataloguedHang(
        "a rank skips a barrier of later rounds",
        "dp=2 tp=2",
        Job([_TP_STEP * 4] * 3 + [_TP_STEP * 2 + _TP_STEP[:2] + _TP_STEP[:2]], _SQUARE),
        _deadlock(
            "Rank 3 (dp=1, tp=1) skipped barrier number 3 on the default group, which ranks "
        ),
        gloo=_deadlock(
            "Rank 3 (dp=1, tp=1) skipped barrier number 3 on the default group, which ranks "
        ),
    ),
    CataloguedHang(
        "a rank crosses a group with the world for the first time",
        "dp=2 tp=2",
        Job([[*_TP_STEP[1:], TP]] * 3 + [[_TP_STEP[2], _TP_STEP[1], TP]], _SQUARE),
        Verdict("deadlock", ("skip none",), _NO_SKIP),
        gloo=Verdict("deadlock", ("skip none",), _NO_SKIP),
    ),
    CataloguedHang(
        "another operation",
        "x=4",
        Job([[WORLD]] * 3 + [[reduces("world", "_all_gather_base")]]),
        _mismatch("_all_gather_base on rank 3"),
        gloo=_mismatch("_all_gather_base on rank 3"),
    ),
    CataloguedHang(
        "another shape",
        "x=4",
        Job([[WORLD]] * 3 + [[reduces("world", shape=(5,))]]),
        _mismatch("(5,) on rank 3"),
        gloo=_mismatch("(5,) on rank 3"),
    ),
    CataloguedHang(
        "another dtype",
        "x=4",
        Job([[WORLD]] * 3 + [[reduces("world", dtype="BFloat16")]]),
        _mismatch("bfloat16 on rank 3"),
        gloo=_mismatch("bfloat16 on rank 3"),
    ),
    CataloguedHang(
        "another root",
        "x=4",
        Job(
            [[reduces("world", "broadcast")]] * 3 + [[reduces("world", "broadcast", root=1)]],
        ),
        _ENQUEUED._replace(parts=(*_ENQUEUED.parts, "Compare roots")),
        gloo=Verdict("unknown", ("all ranks have made the call", "Compare roots")),
    ),
    CataloguedHang(
        "a rank's GPU is in a kernel",
        "x=4",
        Job([[WORLD, WORLD, SYNCS]] * 3 + [[WORLD, KERNEL, WORLD]]),
        _ENQUEUED,
        timed=Verdict("late", ("the GPU of rank 3 (x=3) has not started it",)),
    ),
    CataloguedHang(
        "a chain of receives",
        "pp=4",
        Job([[receives("pp", 1)], [receives("pp", 2)], [receives("pp", 3)], [STOPS]], _LINE),
        _partner("a recv without its send: rank 3 (pp=3) has not called it"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "a ring in which all receive first",
        "pp=4",
        Job(
            [[receives("pp", (rank - 1) % 4), sends("pp", (rank + 1) % 4)] for rank in range(4)],
            _LINE,
        ),
        _deadlock("One of these ranks must begin", "batch_isend_irecv"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "two ranks that both send first",
        "pp=2",
        Job([[sends("pp", 1 - r), receives("pp", 1 - r)] for r in (0, 1)], {"pp": [(0, 1)]}),
        _deadlock("One of these ranks must begin"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "a send to the wrong rank",
        "pp=4",
        Job([[sends("pp", 2)], [STOPS], [receives("pp", 1)], []], _LINE),
        _partner("a recv without its send: rank 1 (pp=1) has not called it"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "a pipeline of three stages with two ranks each",
        "pp=3 tp=2",
        Job(
            [
                [sends("pp", 1), receives("pp", 1)],
                [sends("pp", 1), receives("pp", 1)],
                [receives("pp", 0), TP, sends("pp", 2), receives("pp", 2)],
                [receives("pp", 0), TP, sends("pp", 2), receives("pp", 2)],
                [receives("pp", 1), STOPS],
                [receives("pp", 1), TP, sends("pp", 1)],
            ],
            {"pp": [(0, 2, 4), (1, 3, 5)], "tp": [(0, 1), (2, 3), (4, 5)]},
        ),
        _missing("rank 4 (pp=2, tp=0) has not called it"),
        gloo=_missing("rank 4 (pp=2, tp=0) has not called it"),
    ),
    CataloguedHang(
        "a pipeline's middle stage sleeps",
        "pp=3",
        Job(
            [
                [sends("pp", 1), receives("pp", 1)],
                [receives("pp", 0), STOPS],
                [receives("pp", 1)],
            ],
            {"pp": [(0, 1, 2)]},
        ),
        _partner("rank 1 (pp=1) has not called it"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "a batch of sends and receives without its partner",
        "pp=3",
        Job(
            [
                [batch(sends("pp", 1), receives("pp", 2))],
                [batch(receives("pp", 0), sends("pp", 2))],
                [STOPS],
            ],
            {"pp": [(0, 1, 2)]},
        ),
        _partner("rank 2 (pp=2) has not called it"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "batches of sends and receives that ended, before a call that a rank lacks",
        "pp=2",
        Job(
            [
                [batch(sends("pp", 1), receives("pp", 1)), WORLD, WORLD],
                [batch(receives("pp", 0), sends("pp", 0)), WORLD, STOPS],
            ],
            {"pp": [(0, 1)]},
        ),
        Verdict("missing", ("rank 1 (pp=1) has not called it",), ("send", "recv")),
    ),
    CataloguedHang(
        "a pending receive before a send that has ended",
        "pp=3",
        Job(
            [
                [receives("pp", 1, is_async=True), sends("pp", 2, is_async=True), SYNCS],
                [STOPS],
                [receives("pp", 0)],
            ],
            {"pp": [(0, 1, 2)]},
        ),
        _partner("a recv without its send: rank 1 (pp=1) has not called it"),
        gloo=_NO_P2P,
    ),
    CataloguedHang(
        "coalesced operations, of which a rank has another set",
        "x=3",
        Job(
            [[batch(WORLD, reduces("world", shape=(8,)))]] * 2
            + [[batch(reduces("world", "_all_gather_base"), WORLD)]]
        ),
        _mismatch("rank 2"),
    ),
    CataloguedHang(
        "coalesced operations that a rank has not called",
        "x=4",
        Job([[batch(WORLD, WORLD)]] * 3 + [[STOPS]]),
        _LATE,
    ),
    CataloguedHang(
        "nested waits",
        "",
        Job(
            [[DP, WORLD], [TP, DP, WORLD], [CP, TP, WORLD], [STOPS]],
            {"dp": [(0, 1)], "tp": [(1, 2)], "cp": [(2, 3)]},
        ),
        _missing("axis cp", "rank 3 has not called it"),
    ),
    CataloguedHang(
        "an all_to_all with unequal splits",
        "ep=2",
        Job(
            [
                [reduces("world", "all_to_all", shape=(6,), out=(6,))],
                [reduces("world", "all_to_all", shape=(6,), out=(4,))],
            ]
        ),
        _mismatch("split sizes (6,) to (6,) on rank 0; (6,) to (4,) on rank 1"),
        gloo=_mismatch("split sizes"),
    ),
    CataloguedHang(
        "an all_to_all that a rank without tokens leaves out",
        "x=4",
        Job([[reduces("world", "all_to_all"), WORLD]] * 3 + [[WORLD]]),
        _mismatch("all_to_all on ranks 0-2; all_reduce on rank 3"),
        gloo=_mismatch("all_to_all on ranks 0-2; all_reduce on rank 3"),
    ),
    CataloguedHang(
        "FSDP2's prefetch in another order",
        "x=2",
        Job(
            [
                [
                    reduces("world", "_all_gather_base", shape=(size,), is_async=True)
                    for size in sizes
                ]
                for sizes in ((16, 64), (64, 16))
            ]
        ),
        _mismatch("shape (16,) on rank 0; (64,) on rank 1"),
        gloo=_mismatch("shape (16,) on rank 0; (64,) on rank 1"),
    ),
    CataloguedHang(
        "FSDP2's gather crossed with a reduction of another group",
        "dp=2 tp=2",
        Job(
            [
                [steps[i] for i in (order, 1 - order)]
                for steps in [(TP, reduces("dp", "_all_gather_base"))]
                for order in (0, 1, 1, 0)
            ],
            _SQUARE,
        ),
        _deadlock("_all_gather_base on axis dp", "all_reduce on axis tp"),
        gloo=_deadlock("_all_gather_base on axis dp", "all_reduce on axis tp"),
    ),
    CataloguedHang(
        "one of two sub-groups",
        "dp=2 tp=2",
        Job([[TP, WORLD]] * 2 + [[TP, WORLD], [STOPS]], _SQUARE),
        _missing("axis tp, ranks 2, 3", "rank 3 (dp=1, tp=1) has not called it"),
        gloo=_missing("axis tp, ranks 2, 3", "rank 3 (dp=1, tp=1) has not called it"),
    ),
    CataloguedHang(
        "two hangs at once",
        "dp=2 tp=2",
        Job([[TP], [STOPS], [TP], [STOPS]], _SQUARE),
        _missing("rank 1 (dp=0, tp=1) has not called it", "rank 3 (dp=1, tp=1) has not called it"),
        gloo=_missing(
            "rank 1 (dp=0, tp=1) has not called it", "rank 3 (dp=1, tp=1) has not called it"
        ),
    ),
    CataloguedHang(
        "the watchdog has retired what timed out",
        "x=4",
        Job(
            [[WORLD]] * 3 + [[STOPS]],
            changed={rank: {"retired": True} for rank in range(3)},
        ),
        _LATE,
    ),
    CataloguedHang(
        "a dump of another day",
        "x=4",
        Job([[WORLD, WORLD]] * 3 + [[WORLD, STOPS]], later=dict.fromkeys(range(3), 86400)),
        _missing("no dump of rank 3 (x=3) (nccl_trace_rank_3: its last call is 24 hours older"),
    ),
    CataloguedHang(
        "two roots of a reduce",
        "x=4",
        Job([[WORLD, reduces("world", "reduce", root=r)] for r in (0, 0, 1, 1)]),
        _ENQUEUED,
    ),
]
