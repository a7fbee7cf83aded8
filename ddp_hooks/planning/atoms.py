"""Atoms and fusion groups: the arithmetic of DeAR's layout, for the hook and for its simulation.

*Atoms* are DDP's buckets, cut at parameter boundaries; large parameters are cut into several. Rank r owns the r-th
range of every atom. A fusion group is a run of consecutive atoms, so changing the fusion size moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from ddp_hooks.comm import aligned_bounds, mebibytes

Fusion: TypeAlias = Literal["size", "layers", "none"]

_TAIL_CUTS = 4  # atoms of DDP's last bucket where another bucket has one: they may travel before it is complete
_SMALL_ATOM_BYTES = 8 << 20
_LARGE_ATOM_BYTES = 16 << 20
_MIN_ATOMS = 8  # of a model whose atoms exceed _LARGE_ATOM_BYTES
_MIN_ATOMS_OF_GRADIENTS = 4  # the same where the processor limits and also runs whole updates
_SMALL_GROUP_BYTES = 4 << 20
_MIN_GROUPS = 16  # of a model whose groups exceed _SMALL_GROUP_BYTES
_MAX_TUNED_ATOMS = 64  # of a model where a tuner chooses among groups
_MIN_TUNED_MESSAGE_BYTES = 512 << 10  # smaller messages cost a processor more than they gain


class ParameterShape(NamedTuple):
    numel: int
    element_size: int  # bytes
    layer: int  # index of the module that owns it; equal for the parameters of one layer


class Member(NamedTuple):
    """Elements ``[start, end)`` of a parameter, in storage order, at ``offset`` in their atom."""

    parameter: int
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Atom:
    """The smallest unit of communication: ``numel`` elements of one bucket, starting at ``start`` in it."""

    bucket: int
    start: int
    numel: int
    element_size: int
    members: tuple[Member, ...]
    bounds: tuple[int, ...]  # rank r owns [bounds[r], bounds[r + 1]) of the atom
    tail: bool = False  # in the last bucket: reduced by itself as soon as its own gradients are ready

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_size

    def owned(self, rank: int) -> Iterator[Member]:
        """Yield the ranges of the atom's parameters that ``rank`` owns."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        for parameter, start, end, offset in self.members:
            first, last = max(low, offset), min(high, offset + end - start)
            if first < last:
                yield Member(parameter, start + first - offset, start + last - offset, first)


def cut_bucket(
    bucket: int,
    parameters: Sequence[int],
    shapes: Sequence[ParameterShape],
    world_size: int,
    atom_bytes: int,
    tail: bool = False,
) -> list[Atom]:
    """Cut one bucket into atoms: runs of whole parameters up to ``atom_bytes``, larger parameters into equal parts."""
    run_bytes = atom_bytes // _TAIL_CUTS if tail else atom_bytes
    atoms: list[Atom] = []
    members: list[Member] = []
    atom_start = position = 0

    def close_atom() -> None:
        nonlocal members, atom_start
        if members:
            element_size = shapes[members[0].parameter].element_size
            numel = position - atom_start
            bounds = aligned_bounds(numel, world_size, element_size)
            atoms.append(Atom(bucket, atom_start, numel, element_size, tuple(members), bounds, tail))
        members, atom_start = [], position

    for parameter in parameters:
        numel, element_size, _ = shapes[parameter]
        pending_bytes = (position - atom_start) * element_size
        if pending_bytes + numel * element_size > run_bytes:
            close_atom()
        num_parts = max(1, -(-numel * element_size // atom_bytes))
        for part in range(num_parts):
            start, end = numel * part // num_parts, numel * (part + 1) // num_parts
            members.append(Member(parameter, start, end, position - atom_start))
            position += end - start
            if num_parts > 1:
                close_atom()
    close_atom()
    return atoms


@dataclass(frozen=True)
class FusionRule:
    """Limit on the runs of atoms that travel together (DeAR, sections IV-B and VI-G)."""

    fusion: Fusion
    mb: float
    layers: int

    def allows(self, nbytes: int, num_layers: int) -> bool:
        """Return True if several atoms of so many bytes and layers may be one group; a single atom always may."""
        if self.fusion == "size":
            return nbytes <= mebibytes(self.mb)
        return self.fusion == "layers" and num_layers <= self.layers


def fuse(
    order: Sequence[int], atoms: Sequence[Atom], shapes: Sequence[ParameterShape], rule: FusionRule
) -> list[tuple[int, ...]]:
    """Group the atoms, taken in ``order``, into runs that travel together."""
    groups: list[list[int]] = []
    nbytes, layers = 0, set[int]()  # of the last group
    for index in order:
        atom = atoms[index]
        own_layers = {shapes[member.parameter].layer for member in atom.members}
        nbytes, layers = nbytes + atom.nbytes, layers | own_layers
        if not groups or not rule.allows(nbytes, len(layers)):
            groups.append([])
            nbytes, layers = atom.nbytes, own_layers
        groups[-1].append(index)
    return [tuple(group) for group in groups]


def atom_and_fusion_bytes(message_bytes: int, model_bytes: int, busy: bool, native: bool) -> tuple[int, int]:
    """Return the largest size of an atom and of a fusion group where settings do not give them.

    The processor is ``busy`` if it limits communication and also runs whole updates; ``native``: on an accelerator.
    """
    # Where messages are large, still enough atoms for something to overlap with.
    num_atoms = _MIN_ATOMS_OF_GRADIENTS if busy else _MIN_ATOMS
    four_messages = max(4 * message_bytes, _SMALL_ATOM_BYTES)  # so that buckets of 5 MB are not cut
    atom_bytes = min(four_messages, max(_LARGE_ATOM_BYTES, model_bytes // num_atoms))
    if native or atom_bytes == _SMALL_ATOM_BYTES or message_bytes > _SMALL_GROUP_BYTES:
        return atom_bytes, atom_bytes  # smaller groups would cost more than they hide
    return atom_bytes, min(atom_bytes, max(_SMALL_GROUP_BYTES, model_bytes // _MIN_GROUPS))


def tuned_atom_bytes(atom_bytes: int, model_bytes: int, world_size: int, low_bytes: int) -> int:
    """Return the largest size of an atom where a tuner tries groups from ``low_bytes`` on; at most ``atom_bytes``."""
    least = max(low_bytes, _MIN_TUNED_MESSAGE_BYTES * world_size)
    return min(atom_bytes, max(least, model_bytes // _MAX_TUNED_ATOMS))
