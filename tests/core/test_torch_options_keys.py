"""Options keys of torch's own options, gloo's and NCCL's."""

from __future__ import annotations

import datetime

import torch.distributed as dist

from helpers.nccl_options import C10D_FIELDS, changed_nccl_options, needs_nccl, shown_fields
from meshverse._core import OptionsKey


def test_gloo_options():
    new, create = dist.ProcessGroupGloo._Options, dist.ProcessGroupGloo.create_device
    assert OptionsKey.of("gloo", new(), ignored=C10D_FIELDS) == OptionsKey.of("gloo")
    device = create(hostname="127.0.0.1")
    one, same, other = new(), new(), new()
    one._devices = same._devices = [device]
    other._devices = [create(hostname="127.0.0.1")]
    keys = [OptionsKey.of("gloo", options, ignored=C10D_FIELDS) for options in (one, same, other)]
    assert keys[0] == keys[1] != keys[2]
    assert shown_fields(keys[0]) == ["_devices[0]"]
    one._threads = 7
    assert "_threads=7" in repr(OptionsKey.of("gloo", one, ignored=C10D_FIELDS))
    one._timeout = datetime.timedelta(seconds=63)
    assert OptionsKey.of("gloo", one, ignored=C10D_FIELDS) != keys[0]
    assert "_timeout" in shown_fields(OptionsKey.of("gloo", one))


@needs_nccl
def test_every_field_of_nccl_options_counts():
    default = OptionsKey.of("nccl", dist.ProcessGroupNCCL.Options(), ignored=C10D_FIELDS)
    assert default == OptionsKey.of("nccl")
    seen = {default}
    for name, options in changed_nccl_options():
        changed_key = OptionsKey.of("nccl", options, ignored=C10D_FIELDS)
        assert shown_fields(changed_key) == [name]
        seen.add(changed_key)
    assert len(seen) > 8


@needs_nccl
def test_an_nccl_key_outlives_the_change_of_its_options():
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.net_name = "eth0"
    before = OptionsKey.of("nccl", options, ignored=C10D_FIELDS)
    options.config.net_name = "eth1"
    options.group_name, options._timeout = "17", datetime.timedelta(seconds=61)
    assert repr(before) == (
        "OptionsKey('nccl', config.net_name='eth0', is_high_priority_stream=True)"
    )
    options.config.net_name = "eth0"
    assert OptionsKey.of("nccl", options, ignored=C10D_FIELDS) == before
