"""How many ranks share a node, and so whether collectives run on one level or two; the same on every rank."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ddp_hooks.comm import Lanes
from ddp_hooks.dear.config import DearConfig

_CALL = "the set-up of DearState, which looks for nodes"
_ALIKE = 2  # ranks for which one level and two are the same


def choose_node_size(config: DearConfig, lanes: Lanes) -> int:
    """Return the ranks per node for collectives on two levels, 1 for those on one; collective.

    Raises:
        ValueError: on every rank: nodes are not as collectives on two levels need them.
    """
    if lanes.native or lanes.world_size <= _ALIKE or config.collective not in ("two-level", "auto"):
        return 1
    size = config.node_size
    if size is None:
        size = ranks_per_node(lanes.gather_objects(socket.gethostname(), _CALL))
    elif lanes.world_size % size:
        raise ValueError(f"node_size must divide {lanes.world_size} ranks, got {size}")
    if size is not None and 1 < size < lanes.world_size:
        return size
    if config.collective == "auto":
        return 1
    if config.node_size is not None:
        raise ValueError(
            f'collective="two-level" needs several nodes of several ranks: node_size must be above 1 and below '
            f"{lanes.world_size}, got {config.node_size}"
        )
    raise ValueError(
        'collective="two-level" needs several nodes with equal numbers of neighbouring ranks, more than one in '
        'each; found no such nodes by the names of hosts: give node_size, or take collective="auto"'
    )


def ranks_per_node(hosts: Sequence[str]) -> int | None:
    """Return how many neighbouring ranks share each host; None if hosts have different numbers, or ranks are mixed.

    >>> ranks_per_node(["a", "a", "b", "b"])
    2
    """
    size = hosts.count(hosts[0])
    nodes = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    equal = all(len(node) == size and len(set(node)) == 1 for node in nodes)
    return size if equal and len({node[0] for node in nodes}) == len(nodes) else None
