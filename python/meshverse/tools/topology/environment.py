"""The node of each rank, read from the environment variables of torchrun and Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from meshverse.wording import counted

from .files import levels_on_nodes, read_network_file
from .levels import Level, level_of
from .slurm import expand_hosts, expand_tasks, switches_of_address

_CURE = "Call Topology.detect() after init_process_group() instead: it asks the ranks."


def levels_of_environment(
    environment: Mapping[str, str], network_file: str | os.PathLike[str] | None
) -> list[Level]:
    """Read the levels from the environment; see `Topology.from_environment`."""
    nodes, are_named = _nodes(environment)
    if network_file is not None:
        if not are_named:
            raise ValueError(
                f"{os.fspath(network_file)} needs the names of the nodes, but torchrun gives only "
                "their numbers. Use Topology.detect(network_file=...)."
            )
        return levels_on_nodes(nodes, read_network_file(network_file))
    switches = own_switches(environment) if len(set(nodes)) == 1 else {}
    upper = [level_of(name, [part] * len(nodes)) for name, part in switches.items()]
    return [level_of("node", nodes), *upper]


def _nodes(environment: Mapping[str, str]) -> tuple[list[str], bool]:
    """Return the node of each rank, and whether these are Slurm's names of nodes.

    torchrun's variables take precedence: under Slurm, torchrun is one task per node.

    Raises:
        ValueError: variables are missing, contradict each other, or are not sufficient.
    """
    if "LOCAL_WORLD_SIZE" in environment and "GROUP_RANK" in environment:
        return _of_torchrun(environment), False
    if _slurm(environment, "NODELIST"):
        return _of_slurm(environment), True
    raise ValueError(
        "The environment does not say where ranks are: neither torchrun's LOCAL_WORLD_SIZE and "
        f"GROUP_RANK nor Slurm's SLURM_JOB_NODELIST are set. {_CURE}"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not re.fullmatch("[0-9]{1,12}", value):
        raise ValueError(f"{name}={value[:40]!r} in the environment is not a number. {_CURE}")
    return int(value)


def _of_torchrun(environment: Mapping[str, str]) -> list[str]:
    world, here, node, rank = (
        _number(environment, name)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "RANK")
    )
    local = _number(environment, "LOCAL_RANK")
    count = (
        _number(environment, "GROUP_WORLD_SIZE")
        if "GROUP_WORLD_SIZE" in environment
        else world // max(here, 1)
    )
    fits = count * here == world and node < count and local < here
    if not fits or node * here + local != rank:
        raise ValueError(
            f"torchrun says WORLD_SIZE={world}, LOCAL_WORLD_SIZE={here} on node {node} of {count}, "
            f"RANK={rank}, LOCAL_RANK={local}: the nodes have different numbers of ranks, or are "
            "not numbered in the order of the ranks. The variables describe only this rank's node. "
            f"{_CURE}"
        )
    return [f"node{index}" for index in range(count) for _ in range(here)]


def _slurm(environment: Mapping[str, str], name: str) -> str:
    """Return Slurm's variable for the step, else that for the job; "" if neither is set."""
    names = (f"SLURM_STEP_{name}", f"SLURM_{name}", f"SLURM_JOB_{name}")
    return next((environment[each] for each in names if environment.get(each)), "")


def _of_slurm(environment: Mapping[str, str]) -> list[str]:
    hosts = expand_hosts(_slurm(environment, "NODELIST"))
    given = _slurm(environment, "TASKS_PER_NODE")
    if not given:
        raise ValueError(
            f"Slurm names {counted(len(hosts), 'node')}, but SLURM_TASKS_PER_NODE is not set: "
            f"start the ranks with srun. {_CURE}"
        )
    if len(set(hosts)) < len(hosts):
        raise ValueError(
            f"Slurm names a node twice: {_slurm(environment, 'NODELIST')}. Which ranks run on it "
            f"is not known. {_CURE}"
        )
    tasks = expand_tasks(given)
    if len(tasks) != len(hosts):
        raise ValueError(
            f"Slurm names {counted(len(hosts), 'node')}, but tasks for {len(tasks)}: "
            f"{_slurm(environment, 'NODELIST')} and SLURM_TASKS_PER_NODE={given}. {_CURE}"
        )
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if environment.get(name):
            if _number(environment, name) != sum(tasks):
                raise ValueError(
                    f"Slurm runs {counted(sum(tasks), 'task')} (SLURM_TASKS_PER_NODE={given}), but "
                    f"{name}={environment[name]}: the ranks of the job are not Slurm's tasks. "
                    f"{_CURE}"
                )
            break
    return _distributed(hosts, tasks, environment.get("SLURM_DISTRIBUTION", "block"))


def _distributed(hosts: list[str], tasks: list[int], how: str) -> list[str]:
    """Return the host of each task, as `srun --distribution` assigns tasks."""
    across_nodes = how.replace(",", ":").split(":")[0].lower()
    if across_nodes in ("", "*", "block", "pack", "nopack"):
        return [host for host, count in zip(hosts, tasks, strict=True) for _ in range(count)]
    if across_nodes == "cyclic":
        rounds = range(max(tasks))
        pairs = list(zip(hosts, tasks, strict=True))
        return [host for turn in rounds for host, count in pairs if turn < count]
    raise ValueError(
        f"SLURM_DISTRIBUTION={how} is not supported: only block and cyclic are. {_CURE}"
    )


def own_switches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return, by level, the switches of this process's node in `SLURM_TOPOLOGY_ADDR`."""
    address = environment.get("SLURM_TOPOLOGY_ADDR", "")
    pattern = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    return switches_of_address(address, pattern) if address and pattern else {}
