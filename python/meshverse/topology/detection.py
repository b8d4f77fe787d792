"""Detection of a topology: the ranks exchange where they are, through the default group's store."""

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

from meshverse.agreement import Rendezvous
from meshverse.world.world import World, WorldState

from .environment import own_switches
from .files import levels_on_nodes, read_network_file
from .levels import Level, level_of

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED: registered with the fabric

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FAILED = "!"  # begins the text of a rank that failed

_BOOT = "boot"  # when a machine was started: machines of one name differ in it

Location = dict[str, str]
"""Location of one rank: the name of its part of each level."""


class Detections(WorldState):
    """Number of detections in a world, of which each has a rendezvous of its own."""

    def __init__(self) -> None:
        self.count = 0


def levels_detected(
    node: str | None,
    domain: str | None,
    switches: Mapping[str, str] | None,
    network_file: str | os.PathLike[str] | None,
    world: World,
    timeout: timedelta,
) -> list[Level]:
    """Find the levels together with the other ranks; arguments as of `Topology.detect`."""
    locations = _with_unique_nodes(_gather(node, domain, switches, world, timeout))
    # A rank that cannot read it fails now, and keeps no other rank waiting.
    network = None if network_file is None else read_network_file(network_file)
    nodes = [location["node"] for location in locations]
    levels = levels_on_nodes(nodes, network)
    known = {level.name for level in levels}
    own = dict.fromkeys(name for location in locations for name in location if name not in known)
    return levels + [level_of(name, _parts(name, locations, nodes)) for name in own]


def _parts(name: str, locations: Sequence[Location], nodes: Sequence[str]) -> list[str]:
    """Return the part of each rank at a level that some ranks have given."""
    parts = [location.get(name, "") for location in locations]
    if name == "domain":
        return [part or f"node {node}" for part, node in zip(parts, nodes, strict=True)]
    if "" in parts:
        rank = parts.index("")
        other = next(rank for rank, part in enumerate(parts) if part)
        raise ValueError(
            f"Rank {rank} on node {nodes[rank]!r} gives no {name}, but rank {other} gives "
            f"{parts[other]!r}: have all ranks give it (switches=, SLURM_TOPOLOGY_ADDR), or none."
        )
    return parts


def _gather(
    node: str | None,
    domain: str | None,
    switches: Mapping[str, str] | None,
    world: World,
    timeout: timedelta,
) -> list[Location]:
    """Find out where each rank is. All ranks call this together.

    Raises:
        RuntimeError: ranks did not come in time, or failed; the default group has no store that
            ranks could have a rendezvous in.
    """
    if world.run_store is None:
        raise RuntimeError(
            "Topology.detect() needs a store that all ranks read, and the default process group "
            "has none. Use Topology.from_environment() or from_file()."
        )
    detections = world.state(Detections)
    if not detections.count:
        # For good: the answer stays, and a later run on this store must not find it as its own.
        world.run.add_user(detections)
    name = f"topology/{detections.count}"
    detections.count += 1  # first: whatever fails here, all ranks count the same
    failure: Exception | None = None
    try:
        text = json.dumps(_own_location(node, domain, switches))
    except (OSError, TypeError, ValueError) as error:  # which the other ranks must know
        failure, text = error, f"{_FAILED}{error}"
    rendezvous, ranks = world.state(Rendezvous), range(world.size)
    try:
        texts = rendezvous.join(world, name, "the topology", ranks, timeout, text=text).texts
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
    """Find out where this process is, but for what is given.

    Raises:
        TypeError: names that are no strings.
        ValueError, OSError: the environment or the system cannot be read.
    """
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
    given: dict[Any, Any] = dict(location)  # users name the switches
    for name, part in given.items():
        if not (isinstance(name, str) and name.strip() and isinstance(part, str)):
            raise TypeError(
                f"{{{name!r}: {part!r}}}, given as where this rank is: give strings, the name of "
                'the part by that of its level, such as switches={"switch": "leaf3"}.'
            )
    return location


def _with_unique_nodes(locations: list[Location]) -> list[Location]:
    """Return the locations with unique names of nodes: the boot is added where it is needed."""
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

    Machines whose NVLink reaches over several nodes have a fabric manager, which gives each GPU a
    cluster and a clique in it: GPUs of one clique reach each other by NVLink. NVML, the driver's
    own library, is asked (`nvmlDeviceGetGpuFabricInfo`); `nvidia-smi -q` shows the same under
    "Fabric".

    Args:
        library: NVML's file.

    Returns:
        "" if there is no driver, none that knows, no fabric over several nodes, or GPUs in several
        cliques.
    """
    try:
        nvml = ctypes.CDLL(library)
        ask = nvml.nvmlDeviceGetGpuFabricInfo
        if nvml.nvmlInit_v2() != _SUCCESS:
            return ""
    except (OSError, AttributeError):  # no driver; one that is older than the question
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
        return ""  # a machine of its own has no cluster
    return f"{uuid.UUID(bytes=cluster)}-{info.clique_id}"
