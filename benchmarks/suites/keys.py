"""Options keys and the group cache: what it costs to see that a group is known."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from harness import OURS, Action, Check, Outcome, Run, Scenario, is_cold, play
from meshverse import _core

__all__ = ["METHOD", "SCALE", "TITLE", "run"]

TITLE = "Options keys and the group cache"
METHOD = (
    "no world, processor time; cold: after 64 MB of other data went through the processor's "
    "caches; the floor of a key is Python reading every public field of the "
    "options, that of a look-up a Python dictionary with a tuple as key"
)
SCALE = "entries"
_FLOOR = "floor"
_ENTRIES = 64  # groups of a large trainer
_IGNORED = ("group_name", "global_ranks_in_group", "split_from", "split_color")


def run(run: Run) -> Outcome:
    """Measure keys of the options this torch has, and look-ups."""
    outcome = Outcome()
    repetitions = run.choose(25, 5)
    kinds: dict[str, Callable[[], Any]] = {"gloo": _gloo_options}
    if dist.is_nccl_available():
        kinds["NCCL"] = _nccl_options
    else:
        outcome.notes.append("NCCL options are not measured: this torch is built without NCCL.")
    for repetition in range(repetitions):
        run.tell(repetition, repetitions, "keys and look-ups")
        for side, scenario in ((OURS, _with_ours(kinds)), (_FLOOR, _floor(kinds))):
            played = play(scenario, with_answers=True, with_cold=True)
            for operation, elapsed in played.times_ns.items():
                measurement = outcome.of(operation, _ENTRIES)
                measurement.figure = "" if is_cold(operation) else "keys and look-ups"
                measurement.add(side, elapsed)
    outcome.checks = [
        Check.within(f"{name}: of a Python dictionary's", 10, samples[_FLOOR], samples[OURS])
        for name in ("look up a group", "look up no group")
        for samples in [outcome.of(name, _ENTRIES).samples]
    ]
    return outcome


def _gloo_options() -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(minutes=5)
    return options


def _nccl_options() -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 8
    return options


def _key(backend: str, options: Any) -> _core.OptionsKey:
    return _core.OptionsKey.of(backend, options, timeout=timedelta(minutes=5), ignored=_IGNORED)


def _with_ours(kinds: dict[str, Callable[[], Any]]) -> Scenario:
    for kind, make_options in kinds.items():
        options = make_options()
        one, equal = _key(kind, options), _key(kind, make_options())
        other = _key("other", options)
        assert one == equal
        assert hash(one) == hash(equal)
        assert one != other
        names = {"key": _key, "kind": kind, "options": options, "one": one, "equal": equal}
        yield Action(f"key of {kind} options", "key(kind, options)", names, repeatable=True)
        yield Action(f"compare {kind} keys", "one == equal", names, repeatable=True)
        yield Action(f"hash a {kind} key", "hash(one)", names, repeatable=True)
    cache, key = _core.GroupCache(), _key("gloo", _gloo_options())
    axes = [_core.AxisLayout(8, stride) for stride in range(1, _ENTRIES + 1)]
    for index, axis in enumerate(axes):
        assert cache.get_or_create(axis, key, lambda index=index: index) == index
    names = {"cache": cache, "axis": axes[17], "key": key, "unknown": _core.AxisLayout(9, 1)}
    yield Action("look up a group", "cache.get(axis, key)", names, repeatable=True)
    yield Action("look up no group", "cache.get(unknown, key)", names, repeatable=True)
    assert cache.get(axes[17], key) == 17
    assert cache.get(names["unknown"], key) is None


def _floor(kinds: dict[str, Callable[[], Any]]) -> Scenario:
    for kind, make_options in kinds.items():
        options = make_options()
        fields = [name for name in dir(options) if not name.startswith("__")]
        fields = [name for name in fields if not callable(getattr(options, name))]
        nested = getattr(options, "config", None)
        of_config = [name for name in dir(nested) if not name.startswith("_")] if nested else []
        names = {"options": options, "fields": fields, "nested": nested, "of_config": of_config}
        reading = (
            "[getattr(options, name) for name in fields]"
            " + [getattr(nested, name) for name in of_config]"
        )
        yield Action(f"key of {kind} options", reading, names, repeatable=True)
        numbers = {"one": (1 << 60, 1), "equal": (1 << 60, 1)}
        yield Action(f"compare {kind} keys", "one == equal", numbers, repeatable=True)
        yield Action(f"hash a {kind} key", "hash(one)", numbers, repeatable=True)
    known = {(((8,), (stride,)), "gloo"): stride for stride in range(1, _ENTRIES + 1)}
    names = {"known": known, "asked": (((8,), (18,)), "gloo"), "unknown": (((9,), (1,)), "gloo")}
    assert known.get(names["asked"]) == 18
    yield Action("look up a group", "known.get(asked)", names, repeatable=True)
    yield Action("look up no group", "known.get(unknown)", names, repeatable=True)
