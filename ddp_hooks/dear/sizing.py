"""How many lanes, and how large messages, atoms and groups: what suits link and model, where settings do not say."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ddp_hooks.comm import Lanes, LaneSettings, LinkProfile, Recorder, mebibytes, profile_link
from ddp_hooks.dear.config import DearConfig

logger = logging.getLogger("ddp_hooks")

_SMALL_ATOM_BYTES = 8 << 20
_LARGE_ATOM_BYTES = 16 << 20
_MIN_ATOMS = 8  # of a model, where atoms are larger than that
_MIN_ATOMS_OF_GRADIENTS = 4  # likewise, where the processor limits and has whole updates to do, too
_MOST_ATOMS = 64  # of a model, where a tuner is to have a choice
_LEAST_MESSAGE_BYTES = 512 << 10  # of theirs: smaller ones cost a processor more than they gain
_SMALL_GROUP_BYTES = 4 << 20
_MIN_GROUPS = 16  # of a model, where groups are larger than that


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
    # Where messages are large, still enough atoms for something to overlap with.
    busy = replicates and link is not None and link.outruns_processor
    num_atoms = _MIN_ATOMS_OF_GRADIENTS if busy else _MIN_ATOMS
    four_messages = max(4 * settings.slice_bytes, _SMALL_ATOM_BYTES)  # so that buckets of 5 MB are not cut
    atom_bytes = min(four_messages, max(_LARGE_ATOM_BYTES, model_bytes // num_atoms))
    fusion_bytes = atom_bytes
    if not (lanes.native or atom_bytes == _SMALL_ATOM_BYTES or settings.slice_bytes > _SMALL_GROUP_BYTES):
        # Where that is not so, smaller groups would cost more than they hide.
        fusion_bytes = min(atom_bytes, max(_SMALL_GROUP_BYTES, model_bytes // _MIN_GROUPS))
    if config.tuner is not None:
        least = max(mebibytes(config.tuner.low_mb), _LEAST_MESSAGE_BYTES * lanes.world_size)
        atom_bytes = min(atom_bytes, max(least, model_bytes // _MOST_ATOMS))
    return lanes, atom_bytes, fusion_bytes, link
