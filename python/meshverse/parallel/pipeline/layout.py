"""Which layers each stage has, and which stages a rank has: arithmetic.

Example:
    >>> [list(layers) for layers in layers_of_stages(5, 2)]
    [[0, 1, 2], [3, 4]]
    >>> [list(layers) for layers in layers_of_stages(5, 2, (2, 3))]
    [[0, 1], [2, 3, 4]]
    >>> stages_of_rank(1, 4, virtual=2)
    [1, 5]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from meshverse.parallel.meshes.degrees import is_degree

__all__ = ["layers_of_stages", "stages_of_rank"]


def layers_of_stages(
    n_layers: int, n_stages: int, layers_per_stage: Sequence[int] | None = None
) -> list[range]:
    """The layers of every stage, in order.

    Args:
        n_layers: of the model.
        n_stages: of the pipeline.
        layers_per_stage: one number a stage; by default as even as can be, earlier stages having
            one more where the layers do not divide.

    Raises:
        ValueError: there are more stages than layers, or the numbers do not add up to the layers.
    """
    if not is_degree(n_stages):
        raise ValueError(f"n_stages={n_stages!r}: expected an int above 0.")
    if layers_per_stage is None:
        if n_stages > n_layers:
            raise ValueError(
                f"{n_stages} stages for {n_layers} layers: every stage needs one layer or more. "
                "Use fewer pipeline stages, or fewer virtual ones a rank."
            )
        share, more = divmod(n_layers, n_stages)
        layers_per_stage = [share + (stage < more) for stage in range(n_stages)]
    counts = list(layers_per_stage)
    if (
        len(counts) != n_stages
        or not all(is_degree(count) for count in counts)
        or sum(counts) != n_layers
    ):
        raise ValueError(
            f"layers_per_stage={tuple(counts)} for {n_stages} stages and {n_layers} layers: give "
            "one int above 0 for each stage, that add up to the layers."
        )
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def stages_of_rank(rank: int, pp_size: int, *, virtual: int) -> list[int]:
    """The stages that a rank of the pipeline has: every pp_size-th, as interleaved schedules ask.

    Raises:
        ValueError: virtual is no int above 0, or above 1 where there is one rank.
    """
    if not is_degree(virtual) or (virtual > 1 and pp_size == 1):
        raise ValueError(
            f"virtual={virtual!r} stages a rank for {pp_size} ranks of pp: expected an int above "
            "0, and 1 where pp has one rank."
        )
    return [rank + pp_size * each for each in range(virtual)]
