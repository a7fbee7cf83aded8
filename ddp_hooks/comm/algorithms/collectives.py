"""Dense collectives as generators: direct reduce-scatter, ring all-gather, pairwise exchange.

A reduce-scatter sends every range straight to its owner, which adds in the order of ranks. So a sum depends neither on
where memory is cut into ranges nor on who owns them. It takes one round; the ring of DeAR, section III-A (Eq. 3) moves
as many bytes in P - 1. An all-gather goes around that ring (Eq. 4): a direct one takes 3 to 12 % longer, because some
links wait for others where all ranks send to all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Send, round_of
from ddp_hooks.comm.wire.exact import ExactWire
from ddp_hooks.comm.wire.exact_native import ExactNativeWire
from ddp_hooks.comm.wire.narrow import NarrowGather
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire

Wire: TypeAlias = ExactWire | ExactNativeWire | RoundedWire | DifferenceWire | NarrowGather

_WIDE_BYTES = 4  # of an element; sums of narrower floating-point types are formed in float32


def direct_reduce_scatter(chunks: Sequence[Tensor], rank: int, scratch: Tensor, divisor: int = 1) -> Algorithm:
    """Sum ``chunks[rank]`` over all ranks, ``((g0 + g1) + g2) + ...``, and divide the sum, in place.

    The 1-D ``chunks[c]`` has the same length on every rank. ``chunks[rank]`` ends as the sum, the others stay as they
    are. float16 and bfloat16 are summed in float32, and rounded once. ``scratch`` has the same type, and at least
    ``(P - 1) * chunks[rank].numel()`` elements; it is overwritten.
    """
    return reduce_scatter_among(range(len(chunks)), rank, [[chunk] for chunk in chunks], scratch, divisor)


def ring_all_gather(chunks: Sequence[Tensor], rank: int) -> Algorithm:
    """Copy ``chunks[r]`` of every rank r to all ranks, in place (DeAR, Eq. 4).

    ``chunks`` are as in :func:`direct_reduce_scatter`; those of other ranks are overwritten.
    """
    return all_gather_among(range(len(chunks)), rank, [[chunk] for chunk in chunks])


def reduce_scatter_among(
    members: Sequence[int], position: int, parts: Sequence[Sequence[Tensor]], scratch: Tensor, divisor: int = 1
) -> Algorithm:
    """Sum the tensors of ``parts[position]`` over the ranks ``members``, in their order, and divide, in place.

    ``members[position]`` runs this generator. ``parts`` are by the member that forms their sums, in scratch memory of
    ``(len(members) - 1) * numel of parts[position]`` elements.
    """
    size, own = len(members), parts[position]
    lengths = [part.numel() for part in own]
    received = {}
    receives: list[Recv] = []
    sends: list[Send] = []
    for step in range(1, size):
        source, to = (position - step) % size, (position + step) % size
        first = (step - 1) * sum(lengths)
        received[source] = scratch[first : first + sum(lengths)].split(lengths)
        receives += [Recv(members[source], part) for part in received[source]]
        sends += [Send(members[to], part) for part in parts[to]]
    if size > 1:
        yield round_of(*receives, *sends)
    for index, part in enumerate(own):
        if part.numel():
            _add_received(part, position, {source: values[index] for source, values in received.items()}, divisor)


def all_gather_among(members: Sequence[int], position: int, parts: Sequence[Sequence[Tensor]]) -> Algorithm:
    """Copy the tensors of ``parts[m]`` from ``members[m]`` to all members, around a ring; arguments as above."""
    size = len(members)
    right, left = members[(position + 1) % size], members[(position - 1) % size]
    for step in range(size - 1):
        outgoing, incoming = parts[(position - step) % size], parts[(position - step - 1) % size]
        yield round_of(*(Recv(left, part) for part in incoming), *(Send(right, part) for part in outgoing))


def sum_in_order(
    own: Tensor, position: int, size: int, get: Callable[[int], Tensor], add: Callable[[int, Tensor], Any], divisor: int
) -> None:
    """Make ``own`` the sum of ``size`` members' values in their order, its own at ``position``, divided.

    ``get(member)`` returns values in memory that may be changed; ``add(member, total)`` adds them to ``total``.
    """
    if position > 0:
        lower = get(0)
        for member in range(1, position):
            add(member, lower)
        own.add_(lower)  # a + b has the bits of b + a
    for member in range(position + 1, size):
        add(member, own)
    if divisor > 1:
        own.div_(divisor)


def pairwise_exchange(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], rank: int) -> Algorithm:
    """Send the 1-D ``outgoing[q]`` to every other rank q and receive ``incoming[q]`` from it, in one round.

    The length of ``outgoing[q]``, possibly 0, is that of ``incoming[rank]`` on q.
    """
    others = [(rank + step) % len(outgoing) for step in range(1, len(outgoing))]
    receives = [Recv(source, incoming[source]) for source in reversed(others)]
    yield round_of(*receives, *(Send(to, outgoing[to]) for to in others))


def _add_received(own: Tensor, position: int, received: Mapping[int, Tensor], divisor: int) -> None:
    """Make ``own`` the sum of all members' values; the memory of ``received``, by member, changes."""
    is_narrow = own.is_floating_point() and own.element_size() < _WIDE_BYTES
    total = own.float() if is_narrow else own

    def read(member: int) -> Tensor:
        return received[member].to(total.dtype)

    sum_in_order(total, position, len(received) + 1, read, lambda member, to: to.add_(received[member]), divisor)
    if is_narrow:
        own.copy_(total)


class Partition(NamedTuple):
    """A flat tensor cut into one range per rank: rank r owns ``flat[bounds[r] : bounds[r + 1]]``."""

    flat: Tensor  # (numel,), contiguous
    bounds: tuple[int, ...]  # world_size + 1 ascending offsets, in elements, from 0 to numel
    wire: Wire | None = None  # how its numbers travel; None: as they are

    @property
    def ranges(self) -> list[Tensor]:
        """Ranges by owner."""
        return [self.flat[start:end] for start, end in itertools.pairwise(self.bounds)]

    @property
    def nbytes(self) -> int:
        """Bytes that travel to each rank, before exact wires leave some out."""
        if isinstance(self.wire, NarrowGather):
            return self.wire.nbytes(0, self.flat.numel())
        return self.flat.numel() * self.flat.element_size()


def aligned_bounds(numel: int, world_size: int, element_size: int, alignment_bytes: int = 128) -> tuple[int, ...]:
    """Cut ``numel`` elements into ``world_size`` equal aligned ranges; what is left over belongs to the last rank.

    Equal ranges let a native collective run in place; the alignment keeps every range friendly to vector units.
    """
    step = max(1, alignment_bytes // element_size)
    share = numel // world_size // step * step
    return (*(rank * share for rank in range(world_size)), numel)
