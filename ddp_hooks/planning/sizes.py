"""How large DeAR's atoms and groups are where settings do not say, for the hook and for its simulation."""

from __future__ import annotations

TAIL_CUTS = 4
"""Pieces of DDP's last bucket where another has one: they may travel before it is complete."""

_SMALL_ATOM_BYTES = 8 << 20
_LARGE_ATOM_BYTES = 16 << 20
_MIN_ATOMS = 8  # of a model, where atoms are larger than that
_MIN_ATOMS_OF_GRADIENTS = 4  # likewise, where the processor limits and has whole updates to do, too
_SMALL_GROUP_BYTES = 4 << 20
_MIN_GROUPS = 16  # of a model, where groups are larger than that
_MOST_ATOMS = 64  # of a model, where a tuner is to have a choice
_LEAST_MESSAGE_BYTES = 512 << 10  # of theirs: smaller ones cost a processor more than they gain


def atom_and_fusion_bytes(message_bytes: int, model_bytes: int, busy: bool, native: bool) -> tuple[int, int]:
    """The size at which parameters are cut, and that of groups, in bytes.

    Args:
        message_bytes: the largest message.
        model_bytes: of all parameters.
        busy: the processor limits, and has whole updates to do.
        native: on an accelerator.
    """
    # Where messages are large, still enough atoms for something to overlap with.
    num_atoms = _MIN_ATOMS_OF_GRADIENTS if busy else _MIN_ATOMS
    four_messages = max(4 * message_bytes, _SMALL_ATOM_BYTES)  # so that buckets of 5 MB are not cut
    atom_bytes = min(four_messages, max(_LARGE_ATOM_BYTES, model_bytes // num_atoms))
    if native or atom_bytes == _SMALL_ATOM_BYTES or message_bytes > _SMALL_GROUP_BYTES:
        return atom_bytes, atom_bytes  # smaller groups would cost more than they hide
    return atom_bytes, min(atom_bytes, max(_SMALL_GROUP_BYTES, model_bytes // _MIN_GROUPS))


def tuned_atom_bytes(atom_bytes: int, model_bytes: int, world_size: int, low_bytes: int) -> int:
    """The size at which parameters are cut where a tuner is to have a choice of groups, in bytes.

    Args:
        atom_bytes: where it is not.
        model_bytes: of all parameters.
        world_size: ranks.
        low_bytes: the smallest group that the tuner may try.
    """
    least = max(low_bytes, _LEAST_MESSAGE_BYTES * world_size)
    return min(atom_bytes, max(least, model_bytes // _MOST_ATOMS))
