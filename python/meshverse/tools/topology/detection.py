"""Detection of a topology: ranks exchange their locations in the default group's store."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshverse.for_extras import Rendezvous, World, WorldState, check_timeout

from .environment import own_switches
from .files import levels_on_nodes, read_network_file
from .levels import Level, level_of

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED: registered with the fabric

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FAILED = "!"  # begins the string that a rank contributes if it cannot find its location

_BOOT = " boot"  # key of the boot ID, by which machines of the same name are distinguished

Location = dict[str, str]
"""Location of one rank: by level, the name of its part."""


class Detections(WorldState):
    """Number of detections in a world so far; it gives each one a rendezvous name of its own."""

    def __init__(self) -> None:
        self.count = 0


def levels_detected(
    node: str | None,
    domain: str | None,
    switches: Mapping[str, str] | None,
    network_file: str | os.PathLike[str] | None,
    world: World,
    timeout: timedelta | None,
) -> list[Level]:
    """Find the levels together with the other ranks; the arguments are those of `detect`."""
    locations = _with_unique_nodes(_gather(node, domain, switches, world, timeout))
    # After the rendezvous: a rank that cannot read the file does not keep others waiting.
    network = None if network_file is None else read_network_file(network_file)
    nodes = [location["node"] for location in locations]
    levels = levels_on_nodes(nodes, network)
    known = {level.name for level in levels}
    own = dict.fromkeys(name for location in locations for name in location if name not in known)
    return levels + [level_of(name, _parts(name, locations, nodes)) for name in own]


def _parts(name: str, locations: Sequence[Location], nodes: Sequence[str]) -> list[str]:
    """Return the part of each rank at a level that at least one rank has reported."""
    parts = [location.get(name, "") for location in locations]
    if name == "domain":
        return [part or f"node {node}" for part, node in zip(parts, nodes, strict=True)]
    if "" in parts:
        rank = parts.index("")
        other = next(rank for rank, part in enumerate(parts) if part)
        raise ValueError(
            f"Rank {rank} on node {nodes[rank]!r} gives no {name}, but rank {other} gives "
            f"{parts[other]!r}: either all ranks or none must give it (switches=, "
            "SLURM_TOPOLOGY_ADDR)."
        )
    return parts


def _gather(
    node: str | None,
    domain: str | None,
    switches: Mapping[str, str] | None,
    world: World,
    timeout: timedelta | None,
) -> list[Location]:
    """Exchange the locations of all ranks. All ranks must call this together.

    Raises:
        RuntimeError: some ranks did not join in time, another rank could not find its location, or
            the default group has no store.
    """
    if world.run_keys is None:
        raise RuntimeError(
            "Topology.detect() needs a store that all ranks can read, and the default process "
            "group has none. Use Topology.from_environment() or from_file()."
        )
    detections = world.state(Detections)
    name = f"topology/{detections.count}"
    detections.count += 1  # before anything can fail: the count is then equal on all ranks
    failure: Exception | None = None
    limit = world.default_options.timeout or dist.default_pg_timeout
    try:
        if timeout is not None:
            check_timeout(timeout)
            limit = timeout
        text = json.dumps(_own_location(node, domain, switches))
    except (OSError, TypeError, ValueError) as error:  # join anyway, to inform the others
        failure, text = error, f"{_FAILED}{error}"
    rendezvous, ranks = world.state(Rendezvous), range(world.size)
    try:
        texts = rendezvous.join(world, name, "the topology", ranks, limit, text=text).texts
    except RuntimeError as error:
        raise failure or RuntimeError(f"Topology.detect(): {error}") from None
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text.startswith(_FAILED):
            why = text.removeprefix(_FAILED)
            raise RuntimeError(f"Topology.detect() failed on rank {rank}: {why}")
    return [json.loads(text) for text in texts]


def _own_location(
    node: str | None, domain: str | None, switches: Mapping[str, str] | None
) -> Location:
    """Return where this process is; arguments that are not None replace what is detected.

    Raises:
        TypeError: a name is not a string.
        ValueError: Slurm's variables contradict each other, or `switches` has another level.
        OSError: the boot ID cannot be read.
    """
    if switches is not None and not isinstance(switches, Mapping):
        raise TypeError(
            f"switches={switches!r}: give the switches of this rank by level, such as "
            '{"switch": "leaf3"}.'
        )
    for name in ("node", "domain"):
        if name in (switches or ()):
            raise ValueError(f"switches={switches!r} names a {name}: pass it as {name}=.")
    location = own_switches(os.environ) if switches is None else dict(switches)
    if node is None:
        location["node"] = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        location[_BOOT] = _BOOT_ID.read_text().strip()[:8] if _BOOT_ID.exists() else ""
    else:
        location["node"] = node
    if domain is None:
        domain = nvlink_domain() or location.get("domain", "")
    if domain:
        location["domain"] = domain
    given: dict[Any, Any] = dict(location)  # untyped: users give the switches
    for name, part in given.items():
        is_level = isinstance(name, str) and (name.strip() == name != "" or name == _BOOT)
        if not (is_level and isinstance(part, str) and (part.strip() or not part)):
            raise TypeError(
                f"{{{name!r}: {part!r}}} is not a location of this rank: give strings, the name "
                'of the part by the name of its level, such as switches={"switch": "leaf3"}.'
            )
    return location


def _with_unique_nodes(locations: list[Location]) -> list[Location]:
    """Return the locations, with the boot ID appended to node names that several machines have."""
    boots: dict[str, set[str]] = {}
    for location in locations:
        boots.setdefault(location["node"], set()).add(location.get(_BOOT, ""))
    named = []
    for location in locations:
        node, boot = location.pop("node"), location.pop(_BOOT, "")
        named.append({"node": node if len(boots[node]) == 1 else f"{node} ({boot})", **location})
    return named


# --- NVIDIA's driver -----------------------------------------------------------------------------


class _FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_t` of nvml.h."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def nvlink_domain(library: str = _LIBRARY) -> str:
    """Return the clique that all GPUs of this machine are in, such as "1c64...-32766".

    If NVLink spans several nodes, a fabric manager assigns each GPU to a cluster and to a clique in
    it: GPUs of one clique reach each other by NVLink. This asks NVML, the driver's library
    (`nvmlDeviceGetGpuFabricInfo`); `nvidia-smi -q` shows the same under "Fabric".

    Args:
        library: file name of NVML.

    Returns:
        The clique. "" if there is no driver, the driver is too old to report it, NVLink does not
        span several nodes, or the GPUs are in several cliques.
    """
    try:
        nvml = ctypes.CDLL(library)
        ask = nvml.nvmlDeviceGetGpuFabricInfo
        if nvml.nvmlInit_v2() != _SUCCESS:
            return ""
    except (OSError, AttributeError):  # no driver, or one without this function
        return ""
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS:
            return ""
        cliques = {_clique(nvml, ask, index) for index in range(count.value)}
    finally:
        nvml.nvmlShutdown()
    return cliques.pop() if len(cliques) == 1 else ""


def _clique(nvml: ctypes.CDLL, ask: ctypes._NamedFuncPointer, index: int) -> str:
    device, info = ctypes.c_void_p(), _FabricInfo()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != _SUCCESS:
        return ""
    if ask(device, ctypes.byref(info)) != _SUCCESS:
        return ""
    cluster = bytes(info.cluster_uuid)
    if info.state != _COMPLETED or info.status != _SUCCESS or not any(cluster):
        return ""  # without NVLink between nodes, the cluster's UUID is zero
    return f"{uuid.UUID(bytes=cluster)}-{info.clique_id}"
