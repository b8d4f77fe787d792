"""The NVLink domain of this machine's GPUs, where NVIDIA's driver tells it.

Machines whose NVLink reaches over several nodes have a fabric manager, which gives each GPU a
cluster and a clique in it: GPUs of one clique reach each other by NVLink. NVML, the driver's own
library, is asked (`nvmlDeviceGetGpuFabricInfo`); `nvidia-smi -q` shows the same under "Fabric".
"""

from __future__ import annotations

import ctypes
import uuid

__all__ = ["nvlink_domain"]

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED: registered with the fabric


class _FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_t` of nvml.h."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("clique_id", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def nvlink_domain(library: str = _LIBRARY) -> str:
    """The clique that all GPUs of this machine are in, such as "1c64...-32766".

    Args:
        library: NVML's file.

    Returns:
        "" if there is no driver, none that tells, no fabric over several nodes, or GPUs in several
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
