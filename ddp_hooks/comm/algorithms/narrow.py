"""All-gather whose numbers are partly rounded; whatever moves the messages may be a ring, or two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.wire.narrow import NarrowGather

_ALIGNMENT_BYTES = 4  # of messages in scratch memory, for float32


def narrow_all_gather(
    flat: Tensor,
    cuts: Sequence[tuple[int, int]],
    rank: int,
    wire: NarrowGather,
    gather: Callable[[Sequence[Tensor]], Algorithm],
    scratch: Tensor,
) -> Algorithm:
    """Copy elements ``cuts[r]`` of ``flat`` from every rank r to all ranks, as ``wire`` says; those of ``rank`` stay.

    ``gather`` makes the all-gather of messages by rank. ``scratch``: uint8, of :func:`narrow_scratch_bytes`.
    """
    sizes = _sizes(cuts, wire)
    room = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
    messages = [each[:size] for each, size in zip(scratch[: sum(room)].split(room), sizes, strict=True)]
    wire.encode(flat, *cuts[rank], messages[rank])
    yield from gather(messages)
    for other, (start, end) in enumerate(cuts):
        if other != rank:
            wire.decode(messages[other], flat, start, end)


def narrow_scratch_bytes(cuts: Sequence[tuple[int, int]], wire: NarrowGather) -> int:
    return sum(-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in _sizes(cuts, wire))


def _sizes(cuts: Sequence[tuple[int, int]], wire: NarrowGather) -> list[int]:
    return [wire.nbytes(start, end) for start, end in cuts]
