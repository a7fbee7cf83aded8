"""Numbers of lanes and levels, sizes of slices, atoms and groups: as configured, or to suit link and model."""

from __future__ import annotations

import logging
import socket

import torch
import torch.distributed as dist

from ddp_hooks.comm import Lanes, LaneSettings, LinkProfile, Recorder, mebibytes, profile_link, ranks_per_node, see
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.intercept.ddp_checks import about_uneven_nodes
from ddp_hooks.planning.atoms import atom_and_fusion_bytes, tuned_atom_bytes

logger = logging.getLogger("ddp_hooks")

_CALL = "the set-up of DearState, which looks for nodes"
_ALIKE = 2  # ranks for which one level and two are the same


def open_lanes(
    config: DearConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    recorder: Recorder,
    model_bytes: int,
    replicates: bool,
) -> tuple[Lanes, int, int, LinkProfile | None]:
    """Return lanes, sizes of atoms and groups in bytes, and the link, None if it was not measured."""
    settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
    lanes = Lanes(group, config.lanes or 1, device, settings, recorder)
    try:
        link = _choose_lanes_and_messages(lanes, settings, config)
        settings.node_size = choose_node_size(config, lanes)
    except ValueError:  # on every rank
        lanes.close()
        raise
    except BaseException as error:  # on this one: the others are not to wait
        lanes.abandon(error)
        raise
    if config.atom_mb is not None:
        return lanes, mebibytes(config.atom_mb), mebibytes(config.atom_mb), link
    busy = replicates and link is not None and link.outruns_processor
    atom_bytes, fusion_bytes = atom_and_fusion_bytes(settings.slice_bytes, model_bytes, busy, lanes.native)
    if config.tuner is not None:
        low_bytes = mebibytes(config.tuner.low_mb)
        atom_bytes = tuned_atom_bytes(atom_bytes, model_bytes, lanes.world_size, low_bytes)
    return lanes, atom_bytes, fusion_bytes, link


def _choose_lanes_and_messages(lanes: Lanes, settings: LaneSettings, config: DearConfig) -> LinkProfile | None:
    """Measure the link if settings leave something open; return None if nothing was measured."""
    if config.slice_mb is not None:
        settings.slice_bytes = mebibytes(config.slice_mb)
    if config.lanes is not None and config.slice_mb is not None:
        return None
    link = profile_link(lanes)
    if config.lanes is None:
        lanes.grow(link.num_lanes)
    if config.slice_mb is None:
        settings.slice_bytes = link.message_bytes
    logger.info("%s: %d lanes, messages of up to %d bytes", link, len(lanes), settings.slice_bytes)
    return link


def choose_node_size(config: DearConfig, lanes: Lanes) -> int:
    """Return the ranks per node for collectives on two levels, 1 for those on one; collective."""
    if lanes.native or lanes.world_size <= _ALIKE or config.collective not in ("two-level", "auto"):
        return 1
    size = config.node_size
    if size is None:
        size = ranks_per_node(lanes.gather_objects(socket.gethostname(), _CALL))
    elif lanes.world_size % size:
        one_level = "leave it out" + (' and take collective="direct"' if config.collective == "two-level" else "")
        raise ValueError(about_uneven_nodes(size, lanes.world_size, one_level) + see("set-up-is-refused"))
    if size is not None and 1 < size < lanes.world_size:
        if config.wire == "exact":
            raise ValueError(
                f"wire='exact' has no effect with two levels, {size} ranks per node, whose sums do not fit 16 bits: "
                f'leave it out, or take collective="direct"'
            )
        return size
    if config.collective == "auto":
        return 1
    if config.node_size is not None:
        raise ValueError(
            f'collective="two-level" needs several nodes of several ranks: node_size must be above 1 and below '
            f"{lanes.world_size}, got {config.node_size}{see('set-up-is-refused')}"
        )
    raise ValueError(
        'collective="two-level" needs several nodes with equal numbers of neighbouring ranks, more than one in '
        'each; found no such nodes by the names of hosts: give node_size, or take collective="auto"'
        f"{see('set-up-is-refused')}"
    )
