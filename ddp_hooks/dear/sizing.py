"""How many lanes, and how large messages, atoms and groups: what suits link and model, where settings do not say."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ddp_hooks.comm import Lanes, LaneSettings, LinkProfile, Recorder, mebibytes, profile_link
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.planning.sizes import atom_and_fusion_bytes

logger = logging.getLogger("ddp_hooks")

_MOST_ATOMS = 64  # of a model, where a tuner is to have a choice
_LEAST_MESSAGE_BYTES = 512 << 10  # of theirs: smaller ones cost a processor more than they gain


def open_lanes(
    config: DearConfig,
    group: dist.ProcessGroup,
    device: torch.device,
    recorder: Recorder,
    model_bytes: int,
    replicates: bool,
) -> tuple[Lanes, int, int, LinkProfile | None]:
    """The lanes, the sizes of atoms and groups in bytes: as configured, or as link and model suggest; and the link."""
    link = None
    settings = LaneSettings(timeout_s=config.timeout_s, stall_warning_s=config.stall_warning_s)
    lanes = Lanes(group, config.lanes or 1, device, settings, recorder)
    if config.slice_mb is not None:
        settings.slice_bytes = mebibytes(config.slice_mb)
    if config.lanes is None or config.slice_mb is None:
        link = profile_link(lanes)
        if config.lanes is None:
            lanes.grow(link.num_lanes)
        if config.slice_mb is None:
            settings.slice_bytes = link.message_bytes
        logger.info("%s: %d lanes, messages of up to %d bytes", link, len(lanes), settings.slice_bytes)
    if config.atom_mb is not None:
        return lanes, mebibytes(config.atom_mb), mebibytes(config.atom_mb), link
    busy = replicates and link is not None and link.outruns_processor
    atom_bytes, fusion_bytes = atom_and_fusion_bytes(settings.slice_bytes, model_bytes, busy, lanes.native)
    if config.tuner is not None:
        least = max(mebibytes(config.tuner.low_mb), _LEAST_MESSAGE_BYTES * lanes.world_size)
        atom_bytes = min(atom_bytes, max(least, model_bytes // _MOST_ATOMS))
    return lanes, atom_bytes, fusion_bytes, link
