"""Who makes the groups of a backend, and who waits: by what c10d and the backend can do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers.versions import AT_LEAST_2_14, AT_LEAST_2_15
from meshverse import init_device_mesh
from meshverse._torch_compat.backends import HowCreated, all_ranks_reason, creation_blocks
from meshverse.world import World


def _never_made(*arguments: object) -> None:
    raise AssertionError("no group of this backend is made here")


@pytest.fixture
def unknown() -> str:
    """A registered backend of which nothing is known."""
    if "unheard_of" not in dist.Backend.backend_list:
        dist.Backend.register_backend("unheard_of", _never_made, devices=["cpu"])
    return "unheard_of"


def test_of_an_unknown_backend_the_members_meet_before_they_make_a_group(
    world, unknown: str
) -> None:
    current = World.current()
    assert current is not None
    assert current.how_created(unknown) == HowCreated(
        splits=False, all_ranks_reason=None, blocks=True
    )


def test_a_backend_that_waits_makes_a_group_of_several_wait(world, unknown: str) -> None:
    assert creation_blocks(f"cpu:fake,cuda:{unknown}")
    assert creation_blocks(f"cpu:{unknown},cuda:fake")
    assert not creation_blocks("cpu:fake,cuda:fake")


def test_nccl_waits_where_it_connects_when_it_is_made(world) -> None:
    # From 2.15 on, "nccl" is an NCCL that does, unless TORCH_DIST_USE_NCCL2=0.
    assert creation_blocks("nccl") is AT_LEAST_2_15
    assert creation_blocks("nccl2")
    assert creation_blocks("nccl-lazy")
    assert creation_blocks("nccl-legacy") is not AT_LEAST_2_14  # the name that older ones lack


def test_under_torchcomms_members_suffice_where_torch_lets_them(world) -> None:
    with torch.distributed.config.patch(use_torchcomms=True):
        reason = all_ranks_reason(dist.group.WORLD, "nccl")
    # From 2.14 on, torchcomms is asked whether it is there, and here it is not.
    assert reason == (None if AT_LEAST_2_14 else "torchcomms")


def test_a_default_group_that_is_bound_to_nothing_is_not_split(world) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    hows = {group["how"] for group in mesh.universe.explain().to_dict()["groups"]}
    assert hows == {"created by its members"}
    current = World.current()
    assert current is not None
    assert not current.how_created("fake").splits
