"""Which collectives move what: as configured, or as ranks, hosts and a measurement suggest; the same on every rank.

DeAR allows any all-reduce that splits in two (zhang2023dear, sections III-A and VII-A).
"""

from __future__ import annotations

import logging
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from ddp_hooks.comm import CollectiveRule, Lanes, Partition, aligned_bounds
from ddp_hooks.comm.lanes import WINDOW
from ddp_hooks.dear.config import DearConfig

logger = logging.getLogger("ddp_hooks")

_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes of what is moved in the measurement
_ENOUGH_S = 1.0  # of measuring
_REPEATS = 3
_GAIN = 1.05  # how much faster few rounds must be
_CALL = "the set-up of DearState, which chooses collectives"
_ALIKE = 2  # ranks for which all collectives are the same

_RING = CollectiveRule()
_LOG = CollectiveRule(log_numel=sys.maxsize)


def choose_collectives(config: DearConfig, lanes: Lanes) -> CollectiveRule:
    """The rule for these lanes; collective.

    Raises:
        ValueError: on every rank: nodes are not as collectives on two levels need them.
    """
    if lanes.native or lanes.world_size <= _ALIKE or config.collective == "ring":
        return _RING
    if config.collective == "log":
        return _LOG
    node_size = config.node_size
    if node_size is None:
        node_size = ranks_per_node(lanes.gather_objects(socket.gethostname(), _CALL))
    elif lanes.world_size % node_size:
        raise ValueError(f"node_size must divide {lanes.world_size} ranks, got {node_size}")
    two_level = CollectiveRule(node_size=node_size) if node_size and 1 < node_size < lanes.world_size else None
    if config.collective == "two-level":
        if two_level is None and config.node_size is not None:
            raise ValueError(
                f'collective="two-level" needs several nodes of several ranks: node_size must be above 1 and below '
                f"{lanes.world_size}, got {config.node_size}"
            )
        if two_level is None:
            raise ValueError(
                'collective="two-level" needs several nodes with equal numbers of neighbouring ranks, more than one in '
                'each; found no such nodes by the names of hosts: give node_size, or take collective="auto"'
            )
        return two_level
    rule = two_level or _RING
    rule = CollectiveRule(_log_numel(lanes, rule), rule.node_size)
    if lanes.rank == 0:
        logger.info("collectives: %s", rule)
    return rule


def ranks_per_node(hosts: Sequence[str]) -> int | None:
    """How many neighbouring ranks share each host; None if hosts have different numbers, or ranks are mixed.

    >>> ranks_per_node(["a", "a", "b", "b"])
    2
    """
    size = hosts.count(hosts[0])
    nodes = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    equal = all(len(node) == size and len(set(node)) == 1 for node in nodes)
    return size if equal and len({node[0] for node in nodes}) == len(nodes) else None


def _log_numel(lanes: Lanes, other: CollectiveRule) -> int:
    """Up to how many elements of float32 ceil(log2 P) rounds are faster than what is used otherwise."""
    largest, spent_s = 0, 0.0
    for size in _SIZES:
        numel = size // 4
        bounds = aligned_bounds(numel, lanes.world_size, 4)
        loads = [[Partition(torch.zeros(numel), bounds) for _ in range(WINDOW)] for _ in range(len(lanes))]
        few_s, many_s = (_seconds(lanes, loads, rule) for rule in (_LOG, other))
        if few_s * _GAIN > many_s:
            break
        largest = numel
        spent_s += (few_s + many_s) * (1 + _REPEATS)
        if spent_s > _ENOUGH_S:  # the same on every rank
            break
    return largest


def _seconds(lanes: Lanes, loads: Sequence[Sequence[Partition]], rule: CollectiveRule) -> float:
    """Of reduce-scatters and the all-gathers behind them, of the slowest rank.

    All lanes are full, as in training: what travels meanwhile hides the latency of many rounds.
    """
    lanes.choose(rule)

    def move() -> None:
        for work in [lanes.reduce_scatter(load, "a measurement") for load in loads]:
            work.wait()
        for work in [lanes.all_gather(load, "a measurement") for load in loads]:
            work.wait()

    move()  # connects
    mine = statistics.median(_timed(move) for _ in range(_REPEATS))
    return max(lanes.gather_objects(mine, _CALL))


def _timed(action: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s
