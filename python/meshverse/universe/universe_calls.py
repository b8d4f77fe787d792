"""The calls in which this rank requests process groups of one universe, compared between ranks."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Hashable, Sequence

import torch.distributed as dist

from meshverse._core import AxisLayout, Layout, RankGroups, RankMap
from meshverse.agreement import ComparedCalls, Description, RanksDifferError, check_by_default
from meshverse.groups.request import GroupRequest
from meshverse.locks import state_lock
from meshverse.world import World

from .world_universes import WorldUniverses


class UniverseCalls:
    """This rank's calls that request process groups of one universe; see `agreement.mismatch`.

    Args:
        rank_map: position -> global rank.
        position: this rank's position; None if this rank is not in the rank map.
        world: world of the groups; None for a universe without process groups.
        lazy: whether a group is created when it is first used.
        check_consistency: whether calls are compared; None for what `part_of` or else the
            environment says.
        part_of: calls of the universe that this one is a part of, if any.

    Attributes:
        is_compared: whether calls are compared: if that is wanted, this rank is in the rank map,
            and the world's store allows it.
        number: number of the universe, from 0, among those over its ranks that created groups. None
            until its first call that creates groups for all its ranks has succeeded.
        compared: fingerprint of the ranks that compared a call, by call, unless one of theirs has
            failed since. A call is its layout, the index of its first axis, and the name and digest
            of each axis; if all options are the defaults, also without the digests, which
            `UniverseGroups.request_known` looks up before it has them.
        fingerprint: fingerprint of the set of ranks of the universe, whatever their order.
        compared_fingerprints: fingerprints of the sets of ranks that compared a call.
    """

    def __init__(
        self,
        rank_map: RankMap,
        position: int | None,
        world: World | None,
        *,
        lazy: bool,
        check_consistency: bool | None,
        part_of: UniverseCalls | None,
    ) -> None:
        if check_consistency is None:
            check_consistency = check_by_default() if part_of is None else part_of._is_wanted
        self._is_wanted: bool = check_consistency
        self._rank_map, self._position, self._part_of = rank_map, position, part_of
        self._created = "lazy" if lazy else "eager"
        in_order = rank_map.sorted()
        self.fingerprint, self._first_rank = in_order.fingerprint, in_order.rank_at(0)
        self._world = world
        self._of_world = ComparedCalls() if world is None else world.state(ComparedCalls)
        has_store = world is not None and world.store is not None
        self.is_compared: bool = check_consistency and position is not None and has_store
        self.compared: dict[Hashable, str] = {}
        self._keys_written: list[str] = []
        self.compared_fingerprints: set[str] = set()
        self.number: int | None = None

    def compare(
        self,
        requests: Sequence[GroupRequest],
        call: str,
        layout: Layout,
        first: int,
        *,
        are_default: bool,
    ) -> str | None:
        """Compare a call with those of the other ranks, the first time that this rank makes it.

        Call it only if `is_compared`. The ranks of the mesh that the call creates compare it.
        Example: ranks 0 to 3 are one pipeline stage, and compare the call that flattens the mesh of
        this stage; ranks 4 to 7 may make other calls. If all ranks must create one of the groups
        together, all ranks of the universe compare the call.

        Args:
            requests: requests of the call, one per axis.
            call: name of the function that the user called.
            layout: layout of the mesh that the call creates.
            first: index of the first requested axis in the layout.
            are_default: whether all requests have the universe's default options.

        Returns:
            Fingerprint of the ranks that compared the call; None if compared before.

        Raises:
            RanksDifferError: the ranks disagree.
        """
        made = (layout, first, *((one.axis_name, one.options.key.digest) for one in requests))
        if made in self.compared:
            return None
        world, position = self._world, self._position
        assert world is not None
        assert position is not None
        store = world.run_keys
        assert store is not None
        fingerprint, first_rank, n_ranks = self.fingerprint, self._first_rank, self._rank_map.size
        if layout.size != n_ranks and not any(one.way.needs_all_ranks for one in requests):
            axis = layout.collapse().sorted()
            fingerprint = RankGroups(axis, self._rank_map).fingerprint_of(position)
            first_rank = self._rank_map.rank_at(layout.base(position))
            n_ranks = layout.size
        if not world.is_main_thread():  # threads of two ranks may call in different orders
            self._of_world.stop(
                fingerprint, "a thread other than the main one created process groups"
            )
        try:
            self._of_world.compare(
                store,
                fingerprint,
                self._describe(call, requests, world.rank),
                self._keys_written,
                n_ranks=n_ranks,
                warns=first_rank == world.rank,
            )
        except BaseException as error:
            if not isinstance(error, RanksDifferError):  # other ranks may count this call
                why = f"comparing one raised {type(error).__name__} on this rank"
                self._of_world.stop(fingerprint, why)
            raise
        self.compared[made] = fingerprint
        self.compared_fingerprints.add(fingerprint)
        if are_default:
            in_short = (layout, first, *(one.axis_name for one in requests))
            self.compared[in_short] = fingerprint
        return fingerprint

    def raise_known_mismatch(self) -> None:
        """Raise RanksDifferError if ranks that compared a call of this universe disagree."""
        self._of_world.raise_known(list(self.compared_fingerprints))  # threads may add some

    def _describe(self, call: str, requests: Sequence[GroupRequest], rank: int) -> Description:
        from meshverse.program_line import program_line

        axes: dict[str, list[str]] = {}  # by their options
        for one in requests:
            axes.setdefault(one.options.in_words(), []).append(one.axis_name)
        in_words = [
            words if len(axes) == 1 else f"{words} for {', '.join(names)}"
            for words, names in axes.items()
        ]
        facts = {
            "groups": self._created,
            "over": str(self._rank_map),
            "strides": f"({', '.join(_stride(request.axis) for request in requests)})",
            "options": "; ".join(in_words),
        }
        # 128 bits. A timeout that comes from the default group is left out: there, c10d allows each
        # rank its own.
        begin = f"{self._created} {self._rank_map.fingerprint}"
        if self._part_of is not None:
            whole = self._part_of._rank_map
            facts["part of"] = f"a universe of {whole}"
            begin += f" part of {whole.fingerprint}"
        digest = hashlib.blake2b(begin.encode(), digest_size=16)
        for request in requests:
            options = request.options
            what = (
                options.key.digest if options.explicit_timeout else options.digest_without_timeout
            )
            digest.update(f"{request.axis_name}={request.axis} {what}\n".encode())
        sizes = {request.axis_name: request.axis.size for request in requests}
        return Description(rank, digest.hexdigest(), call, sizes, facts, program_line())

    def take_number(self) -> None:
        """Number the universe, unless it has a number."""
        assert self._world is not None
        next_numbers = self._world.state(WorldUniverses).next_numbers
        with state_lock.held:
            if self.number is None:
                self.number = next_numbers[self.fingerprint]
            # Also after a call that was interrupted here.
            next_numbers[self.fingerprint] = max(next_numbers[self.fingerprint], self.number + 1)

    def note_failure(self, fingerprint: str | None, error: BaseException) -> None:
        """Note that a call failed on this rank. It may have succeeded on others.

        Args:
            fingerprint: what `compare` returned for it; None if it was not compared.
            error: the error of the call.
        """
        for call, by in list(self.compared.items()):
            if by == fingerprint:  # a repeated call raises what is known by then
                self.compared.pop(call, None)
        if fingerprint is not None and not isinstance(error, RanksDifferError):
            self._of_world.stop(
                fingerprint,
                f"one raised {type(error).__name__} on this rank, and may have succeeded on others",
            )
        # The caller may never get this universe, so `destroy()` would not remove its keys.
        if self.number is None:
            self.remove_from_store()

    def give_up(self) -> None:
        """Compare no more calls of these ranks: the call that creates the universe has failed."""
        for fingerprint in list(self.compared_fingerprints):
            self._of_world.stop(
                fingerprint, "one failed on this rank, and may have succeeded on others"
            )
        if self.number is not None:
            assert self._world is not None
            next_numbers = self._world.state(WorldUniverses).next_numbers
            with state_lock.held:
                if next_numbers[self.fingerprint] == self.number + 1:
                    next_numbers[self.fingerprint] = self.number
                self.number = None
        self.remove_from_store()

    def remove_from_store(self) -> None:
        """Remove the keys that this rank wrote, if the world is not over."""
        world = self._world
        if world is None or world.is_over or not self.is_compared:
            return
        store = world.run_keys
        if store is None:  # the keys were in the store of a world that was revived on this one
            return
        with contextlib.suppress(dist.DistError):  # the store is gone, and the keys with it
            while self._keys_written:
                store.remove(self._keys_written[-1])
                self._keys_written.pop()

    def on_revive(self) -> None:
        """Go on with the store of the new default group, which has none of this rank's keys."""
        self._keys_written.clear()
        has_store = self._world is not None and self._world.store is not None
        self.is_compared = self._is_wanted and self._position is not None and has_store


def _stride(axis: AxisLayout) -> str:
    # As torch prints a stride; an axis with several strides is shown with its sizes.
    if len(axis.strides) < 2:
        return str(axis.strides[0] if axis.strides else 0)
    return f"{axis.strides} of {axis.sizes}"
