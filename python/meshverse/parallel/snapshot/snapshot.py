"""The state of each step in the memory of its hosts."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.stateful import Stateful

from meshverse.parallel.collectives.steps import gathered, together

from .file import Contents, FileName, Header, Record, SnapshotFile, names_in
from .hosts import Hosts, meet
from .plan import Place, Plan, part_of

__all__ = ["Snapshot"]

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_NAMED = 8  # values that a message lists


class Snapshot:
    """State of the last steps in files in memory, which outlive the processes that wrote them.

    Ranks that see the same folder are one host. All ranks of the group construct it, and call its
    methods, in the same order.

    Each step must communicate between all ranks (as an all-reduce of gradients does): `save` itself
    waits for nobody, and overwrites a step's file when all ranks must have saved a later step.

    Args:
        folder: folder on a file system in memory, such as `/dev/shm/job`, of this job only and for
            its user only, as files are unpickled. The host's ranks share it.
        keep: number of steps in memory, at least 2. While a step is written, one fewer is whole.
        copies: 1 to also write each rank's files on another host, or 0. A state that is replicated
            over hosts, as by HSDP, needs none.
        failure_domain: name of what this rank's host may be lost with, such as its rack or switch:
            copies go to a host of another one. By default, each host is a failure domain of its
            own.
        process_group: group that can send CPU tensors; the default group by default.

    Raises:
        ValueError: an argument is out of range, or the group cannot send CPU tensors.
        TypeError: `keep` is not an int.
        PermissionError: others than this process's user may write into the folder.

    Example:
        >>> snapshot = Snapshot("/dev/shm/job")  # doctest: +SKIP
        >>> first = snapshot.load(state) or load_checkpoint(state)  # doctest: +SKIP
        >>> for step in range(first, steps):  # doctest: +SKIP
        ...     train(step)
        ...     snapshot.save(step + 1, state)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int = 2,
        *,
        copies: int = 0,
        failure_domain: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int):
            raise TypeError(f"keep={keep!r} of type {type(keep).__name__}: pass an int from 2")
        if keep < 2:
            raise ValueError(f"keep={keep} steps are too few: keep 2 or more, so that one is whole")
        if copies not in (0, 1):
            raise ValueError(f"copies={copies} is not possible: pass 0 or 1")
        if failure_domain == "":
            raise ValueError("failure_domain='' is no name: pass None if you do not know it")
        backends = str(dist.get_backend_config(process_group))
        if "cpu:" not in backends:
            raise ValueError(
                f"the process group cannot send CPU tensors (its backends are {backends}): pass "
                "process_group=dist.new_group(backend='gloo')"
            )
        self.folder, self.keep, self.copies = Path(folder).absolute(), keep, copies
        self.failure_domain, self._group = failure_domain, process_group
        self._rank = dist.get_rank(process_group)
        self._world_size = dist.get_world_size(process_group)
        self._attempt = ""
        self._hosts = Hosts([], [], [], 0, 0)
        self._last = -1
        self._n_saved = 0
        self._pickles: dict[tuple[type, str], bytes] = {}
        # Files by owner (this rank, and the ranks whose copies it keeps), oldest first.
        self._kept: dict[int, list[SnapshotFile]] = defaultdict(list)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(self.folder)

    # --- Save ------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Copy this rank's part of the state into memory.

        Afterwards, the state may change. GPU tensors are copied synchronously, as a copy beside the
        next step must end before your program changes the state: pass what
        `torch.distributed.checkpoint.staging.DefaultStager` copied then. With `copies=1`, it also
        waits for the copy, which the ranks send each other; what fails on one rank raises on all
        then, and nothing of the step is kept.

        Args:
            step: number of the state, from 0; larger than the last one.
            state: what `torch.distributed.checkpoint.save` takes. A plain value that differs
                between ranks, such as a random number generator's, needs a key of its own on each.

        Raises:
            ValueError: the step is negative, or not larger than the last one; a tensor has no
                memory, is partial, or is split into parts that are no blocks; another snapshot of
                this process saves into the folder; or see `load`.
            TypeError: the step is not an integer; or a value is of a kind that cannot be loaded
                again: a sparse or quantized tensor, a tensor subclass, a shard of FSDP1, a DTensor
                in a tuple, set or dataclass, or an object with a `state_dict()` that is not at the
                top level.
            OSError: the folder's file system is full.
        """
        if not self._attempt:
            together(lambda: _check_step(step, -1), self._group)
            self._begin()
        begun: dict[FileName, SnapshotFile] = {}
        try:
            contents = self._agreed(lambda: self._write(step, state, begun))
            if self.copies:
                self._exchange_copies(begun)
            for name, file in begun.items():
                self._finish_file(name, file)
        finally:
            for file in begun.values():
                file.remove_if_begun()
        self._last, self._n_saved, self._pickles = step, self._n_saved + 1, contents.pickles

    def _agreed(self, take: Callable[[], _Result]) -> _Result:
        """Take a step of a save, and return its result. If copies are exchanged, all raise or none.

        Raises:
            Exception: see `together`.
        """
        if not self.copies:
            return take()
        failure: Exception | None = None
        try:
            result = take()
        except Exception as error:  # noqa: BLE001  (raised below, on all ranks)
            failure = error

        def outcome() -> _Result:
            if failure:
                raise failure
            return result

        return together(outcome, self._group) if self._is_any(failure is not None) else outcome()

    def _is_any(self, flag: bool) -> bool:
        """Whether a flag is set on some rank, which each asks of log2(number of ranks) others."""
        seen, distance = torch.tensor([flag], dtype=torch.uint8, device="cpu"), 1
        while distance < self._world_size:
            other = torch.empty_like(seen)
            before, behind = self._rank - distance, self._rank + distance
            self._exchange({behind % self._world_size: seen}, {before % self._world_size: other})
            seen, distance = seen | other, 2 * distance
        return bool(seen)

    def _write(
        self, step: int, state: dict[str, Any], begun: dict[FileName, SnapshotFile]
    ) -> Contents:
        """Write this rank's file, and add it to those that are begun."""
        _check_step(step, self._last)
        self._claim_folder()
        if self._n_saved == self.keep:
            self._remove_older_attempts()
        hosts = list(zip(self._hosts.names, self._hosts.ranks, strict=True))
        contents = Contents(_without_objects(state), self._pickles, self._world_size, hosts)
        name = FileName(self._attempt, step, self._rank)
        begun[name] = self._begin_file(name, contents.n_bytes)
        begun[name].write(contents)
        return contents

    def _begin_file(self, name: FileName, n_bytes: int) -> SnapshotFile:
        """Return a file to write, under a name that no load reads: the oldest, or a new one."""
        begun = self.folder / f".{name}"
        kept = self._kept[name.owner]
        while len(kept) >= self.keep:
            oldest = kept.pop(0)
            oldest.rename(begun)
            if len(kept) < self.keep and oldest.n_bytes >= n_bytes:
                return oldest
            begun.unlink()
        try:
            return SnapshotFile(begun, n_bytes)
        except OSError:
            begun.unlink(missing_ok=True)
            raise

    def _finish_file(self, name: FileName, file: SnapshotFile) -> None:
        file.rename(self.folder / str(name))
        self._kept[name.owner].append(file)

    def _exchange_copies(self, begun: dict[FileName, SnapshotFile]) -> None:
        """Send this rank's file to its partner, and add the copies of others' files to it."""
        ((name, file),) = begun.items()
        used, partner = file.used(), self._hosts.partner()
        # On the CPU, whatever torch's default device is.
        sizes = {
            one: torch.zeros(1, dtype=torch.int64, device="cpu") for one in self._hosts.senders()
        }
        self._exchange({partner: torch.tensor([used.numel()], device="cpu")}, sizes)
        received: dict[int, torch.Tensor] = {}

        def begin() -> None:
            for sender, size in sizes.items():
                own = name._replace(owner=sender)
                begun[own] = self._begin_file(own, int(size))
                received[sender] = begun[own].bytes[: int(size)]

        self._agreed(begin)
        self._exchange({partner: used}, received)

    def _exchange(self, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        group = self._group
        works = [dist.irecv(into, group=group, group_src=rank) for rank, into in received.items()]
        works += [dist.isend(data, group=group, group_dst=rank) for rank, data in sent.items()]
        for work in works:
            assert work is not None
            work.wait()

    def _remove_older_attempts(self) -> None:
        """Remove what earlier runs saved: this run has saved `keep` steps on all ranks."""
        for name in names_in(self.folder):
            if name.attempt < self._attempt:
                (self.folder / str(name)).unlink(missing_ok=True)

    # --- Load ------------------------------------------------------------------------------------

    def load(self, state: dict[str, Any]) -> int | None:
        """Load the newest step whose every part is in the memory of some host.

        It may have been saved by another number of ranks, on another mesh. Each rank's own values
        are loaded where they are still there. Files with wrong checksums do not count. A step is
        whole if it has all values of the state, in the same dtypes, and the state has all of its.

        Args:
            state: as for `save`. Tensors are loaded in place, other values replaced.

        Returns:
            Number of the step, or None on all ranks, if there is none; nothing is loaded then. If a
            step is there in part, a warning says what is missing and on which hosts it was. The
            objects' `state_dict()` is called in any case.

        Raises:
            ValueError: `copies=1`, and all ranks share a host or a failure domain; ranks of one
                host have different failure domains; only some ranks have one; or ranks have
                different `keep` or `copies`. As for `save`, if the state cannot be loaded into.
            TypeError: as for `save`.
            RuntimeError: a value cannot be unpickled; or an object's `load_state_dict()` raised,
                and the state may be loaded in part.

        All ranks raise what fails on one of them. But for the last case, nothing was loaded.
        """
        self._begin()
        mine = together(self._clean_up, self._group)
        every: list[list[tuple[str, int]]] = gathered([name[:2] for name in mine], self._group)
        reasons = []
        # Even if there is no file: torch's `get_state_dict` makes a step of a new optimizer, and a
        # job that begins anew must compute the same whether it finds files or not.
        target = together(lambda: _without_objects(state), self._group)
        for attempt, step in sorted({key for keys in every for key in keys}, reverse=True):
            part = [name for name in mine if name[:2] == (attempt, step)]
            if reason := self._load_step(attempt, step, part, state, target):
                reasons.append(f"step {step} lacks {reason}")
                continue
            together(partial(self._adopt, attempt, step), self._group)
            return step
        if reasons and self._rank == 0:
            _log.warning("No snapshot is whole: %s. Load a checkpoint.", "; ".join(reasons))
        together(lambda: self._adopt("", 0), self._group)
        return None

    def _clean_up(self) -> list[FileName]:
        """Remove what earlier runs have begun only, and return the files that this rank reads."""
        for begun in self.folder.glob(".*.snapshot"):
            if begun.name[1:] < self._attempt:
                begun.unlink(missing_ok=True)
        return [name for name in names_in(self.folder) if self._reads(name.owner)]

    def _load_step(
        self,
        attempt: str,
        step: int,
        names: list[FileName],
        state: dict[str, Any],
        target: dict[str, Any],
    ) -> str:
        """Load one step, and return what is missing of it; then, nothing has been loaded.

        Args:
            attempt: run of the job that saved it.
            step: its number.
            names: files of it that this rank reads.
            state: state to load.
            target: the same, without Stateful objects.
        """
        files, headers = together(lambda: self._sound(names), self._group)
        own = headers.get(self._rank)
        near = {Place(self._rank, self._rank): own} if own is not None else {}
        plan = together(lambda: self._plan(target, near), self._group)
        alone = (
            own is not None
            and own.world_size == self._world_size
            and own.names <= plan.names
            and not plan.missing
        )
        everyone: list[dict[int, Header]] = []
        if not all(gathered(alone, self._group)):
            everyone = gathered(headers, self._group)
            far = {Place(r, o): h for r, held in enumerate(everyone) for o, h in held.items()}
            plan = together(lambda: plan if alone else self._plan(target, far), self._group)
            every_plan: list[tuple[list[str], frozenset[str]]]
            every_plan = gathered((plan.missing, plan.names), self._group)
            missing = {text for texts, _ in every_plan for text in texts}
            missing |= self._without_place(
                everyone, frozenset().union(*(names for _, names in every_plan))
            )
            if missing:
                return _in_words(sorted(missing), everyone)
        sources = self._sources(plan, files)
        values = together(lambda: plan.values(sources, attempt, step), self._group)
        together(lambda: _put(plan, values, state, target), self._group)
        return ""

    def _sound(self, names: list[FileName]) -> tuple[dict[int, SnapshotFile], dict[int, Header]]:
        """Return the files without damage and their headers, by owner."""
        files, headers = {}, {}
        for name in names:
            try:
                file = SnapshotFile(self.folder / str(name))
            except (OSError, ValueError):  # it is empty, or gone
                continue
            header = file.header()
            if header is not None and file.is_sound(header):
                files[name.owner], headers[name.owner] = file, header
        return files, headers

    def _without_place(self, everyone: list[dict[int, Header]], names: frozenset[str]) -> set[str]:
        """Return what was saved and is in no rank's state, in words.

        What only ranks saved that are not there any more may be lost, such as their generators.
        """
        saved: set[str] = set()
        for held in everyone:
            for owner, header in held.items():
                saved |= header.names if owner < self._world_size else set()
        return {f"a place in the state for {name!r}, which was saved" for name in saved - names}

    def _plan(self, target: dict[str, Any], headers: dict[Place, Header]) -> Plan:
        near = set(self._hosts.ranks[self._hosts.mine])

        def distance(holder: int) -> int:
            return 0 if holder == self._rank else 1 if holder in near else 2

        return Plan(target, headers, self._rank, self._world_size, distance)

    def _sources(self, plan: Plan, files: dict[int, SnapshotFile]) -> list[torch.Tensor]:
        """Return what each read needs, from this rank's files or sent by their holders."""
        wanted = defaultdict(list)
        for item, (place, record) in plan.reads:
            if place.holder != self._rank:
                wanted[place.holder].append((place.owner, record, item))
        every = gathered(dict(wanted), self._group)
        sent, received = {}, {}

        def make_room() -> None:
            for rank, asked in enumerate(every):
                if self._rank in asked:
                    parts = [part_of(files[owner], *what) for owner, *what in asked[self._rank]]
                    sent[rank] = torch.cat([_as_bytes(part) for part in parts])
            for holder, asked in wanted.items():
                n_bytes = sum(_n_bytes(record, item) for _, record, item in asked)
                received[holder] = torch.empty(n_bytes, dtype=torch.uint8, device="cpu")

        together(make_room, self._group)
        self._exchange(sent, received)
        sources, read = [], dict.fromkeys(received, 0)
        for item, (place, record) in plan.reads:
            if place.holder == self._rank:
                sources.append(part_of(files[place.owner], record, item))
                continue
            start = read[place.holder]
            read[place.holder] += _n_bytes(record, item)
            flat = received[place.holder][start : read[place.holder]]
            data = record.item.tensor_data
            if data is not None:  # a copy, as the message has no gaps that align its parts
                flat = flat.clone().view(data.properties.dtype).view(item.lengths)
            sources.append(flat)
        return sources

    def parts_to_revive(self) -> tuple[object, ...]:
        """Return what `meshverse.revive` looks at for process groups, besides this object."""
        return ()

    # --- Runs and hosts --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin an attempt: agree on its name, and see which ranks share a folder."""
        names = together(lambda: names_in(self.folder), self._group)
        newest = max((int(name.attempt[:6]) for name in names), default=0)
        settings = (self.keep, self.copies)
        every = gathered((newest, secrets.token_hex(4), settings), self._group)
        if len({each for *_, each in every}) > 1:
            listed = ", ".join(f"{pair} on rank {r}" for r, (*_, pair) in enumerate(every[:_NAMED]))
            raise ValueError(
                f"(keep, copies) must be the same on all ranks, but is {listed}"
                f"{', ...' if len(every) > _NAMED else ''}. Pass the same everywhere"
            )
        attempt = f"{1 + max(number for number, *_ in every):06d}-{every[0][1]}"
        hosts = meet(self.folder, attempt, self.failure_domain, self._group)
        if self.copies and not hosts.partners:
            one_host = f"host: all {self._world_size} ranks share {hosts.names[0]}"
            one_domain = f"failure domain: all hosts are in {self.failure_domain!r}"
            alone = one_host if len(hosts.ranks) == 1 else one_domain
            raise ValueError(f"copies=1 needs a second {alone}. Pass copies=0")
        self._last, self._n_saved = -1, 0
        self._kept.clear()
        self._hosts, self._attempt = hosts, attempt  # last: a refused save begins anew

    def _claim_folder(self) -> None:
        """Raise ValueError if another snapshot of this process saves into the folder.

        Each would remove the files of the other one, or load them.
        """
        if self._n_saved:
            return
        folder = os.path.realpath(self.folder)
        other = _saving.get(folder)
        if other is not None and other is not self:
            raise ValueError(
                f"another Snapshot of this process saves into {folder}. Save all state in one, or "
                "give each a folder of its own"
            )
        _saving[folder] = self

    def _reads(self, owner: int) -> bool:
        """Whether this rank reads an owner's files, for its host."""
        ranks = self._hosts.ranks[self._hosts.mine]
        return self._rank == (owner if owner in ranks else ranks[owner % len(ranks)])

    def _adopt(self, attempt: str, step: int) -> None:
        """Let the files that are there be overwritten, those of the loaded step last."""
        owners = [self._rank, *(self._hosts.senders() if self.copies else [])]
        names = [name for name in names_in(self.folder) if name.owner in owners]
        for name in sorted(names, key=lambda name: (name[:2] == (attempt, step), name)):
            self._kept[name.owner].append(SnapshotFile(self.folder / str(name), 1))


def _check_owner(folder: Path) -> None:
    """Check that only this process's user can write into a folder: its files are unpickled."""
    if not hasattr(os, "geteuid"):
        return
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} is owned by user {found.st_uid} and has mode "
            f"{stat.filemode(found.st_mode)}, so others than user {os.geteuid()} could write "
            "files, which load() unpickles. Choose another folder, or make it yours: chmod 700"
        )


def _check_step(step: object, last: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step={step!r} of type {type(step).__name__}: pass an int from 0.")
    if step < 0:
        raise ValueError(f"step={step}: steps are counted from 0.")
    if step <= last:
        raise ValueError(f"step {step} is not after step {last}, which is already saved")


def _put(
    plan: Plan,
    values: list[tuple[torch.Tensor | str, Any]],
    state: dict[str, Any],
    target: dict[str, Any],
) -> None:
    """Put values into a state and its objects.

    Raises:
        RuntimeError: an object's `load_state_dict()` raised, or a value cannot be copied.
    """
    what = "copying tensors"
    try:
        plan.write(values)
        for key, value in state.items():
            what = f"load_state_dict() of state[{key!r}] ({type(value).__name__})"
            if isinstance(value, Stateful):
                value.load_state_dict(target[key])
            else:
                state[key] = target[key]
    except Exception as error:
        raise RuntimeError(
            f"{what} raises {type(error).__name__}: {error}. Now the state may be loaded in part: "
            "create it anew before you load again"
        ) from error


def _without_objects(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with the states of its objects, as `torch.distributed.checkpoint` reads it."""
    return {
        key: state[key].state_dict() if isinstance(state[key], Stateful) else state[key]
        for key in sorted(state)
    }


def _as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def _n_bytes(record: Record, item: ReadItem) -> int:
    data = record.item.tensor_data
    if data is None:
        return record.n_bytes
    return item.lengths.numel() * data.properties.dtype.itemsize


def _in_words(missing: list[str], everyone: list[dict[int, Header]]) -> str:
    """Return what is missing, and the hosts of the ranks whose files are."""
    header = next((h for held in everyone for h in held.values()), None)
    there = {owner for held in everyone for owner in held}
    more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
    text = ", ".join(missing[:_NAMED]) + more
    if header is None:
        return text + " (no file of it is sound)"
    lost = {name: [r for r in ranks if r not in there] for name, ranks in header.hosts}
    hosts = [f"ranks {ranks} on {name}" for name, ranks in lost.items() if ranks]
    return text + (f" (the files of {', '.join(hosts)} are lost)" if hosts else "")


# By real path: the snapshot of this process that saves into a folder.
_saving: WeakValueDictionary[str, Snapshot] = WeakValueDictionary()
