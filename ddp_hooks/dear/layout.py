"""Where every element lives: atoms inside DDP's buckets, the ranges that ranks own, and fusion groups.

DDP's buckets decide when gradients are ready; we cut them into *atoms* at parameter boundaries, and large parameters
into several. Rank r owns the r-th range of every atom. Groups are runs of consecutive atoms, so changing the fusion
size moves no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddp_hooks.comm import aligned_bounds, mebibytes
from ddp_hooks.dear.config import Fusion
from ddp_hooks.planning.sizes import TAIL_CUTS


class ParameterShape(NamedTuple):
    """What the layout needs to know of a parameter."""

    numel: int
    element_size: int  # bytes
    layer: int  # index of the module that owns it; equal for the parameters of one layer


class Member(NamedTuple):
    """Elements ``[start, end)`` of a parameter, in storage order, at ``offset`` in their atom."""

    parameter: int
    start: int
    end: int
    offset: int


class Interval(NamedTuple):
    """Elements ``[start, end)`` of a parameter, in storage order."""

    parameter: int
    start: int
    end: int


@dataclass(frozen=True)
class Atom:
    """The smallest unit of communication: ``numel`` elements of one bucket, starting at ``start`` in it."""

    bucket: int
    start: int
    numel: int
    element_size: int
    members: tuple[Member, ...]
    bounds: tuple[int, ...]  # rank r owns [bounds[r], bounds[r + 1]) of the atom
    tail: bool = False  # of the last bucket: reduced by itself, as soon as its own gradients are there

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_size

    def owned(self, rank: int) -> Iterator[Member]:
        """The parts of the atom's members that ``rank`` owns."""
        low, high = self.bounds[rank], self.bounds[rank + 1]
        for parameter, start, end, offset in self.members:
            first, last = max(low, offset), min(high, offset + end - start)
            if first < last:
                yield Member(parameter, start + first - offset, start + last - offset, first)


@dataclass(frozen=True)
class Layout:
    """All atoms, bucket after bucket."""

    buckets: tuple[tuple[int, ...], ...]  # parameter indices of each bucket, in bucket order
    atoms: tuple[Atom, ...]

    def owned(self, rank: int) -> Iterator[tuple[int, Member]]:
        """``(atom index, member)`` for everything that ``rank`` owns."""
        for index, atom in enumerate(self.atoms):
            for member in atom.owned(rank):
                yield index, member

    def intervals(self, rank: int) -> list[Interval]:
        """The parameter elements that ``rank`` owns."""
        return [Interval(*member[:3]) for _, member in self.owned(rank)]


def cut_bucket(
    bucket: int,
    parameters: Sequence[int],
    shapes: Sequence[ParameterShape],
    world_size: int,
    atom_bytes: int,
    tail: bool = False,
) -> list[Atom]:
    """Cut one bucket into atoms: runs of whole parameters up to ``atom_bytes``, larger parameters into equal parts.

    Of the last bucket, the ``tail``, runs are a quarter as long.
    """
    run_bytes = atom_bytes // TAIL_CUTS if tail else atom_bytes
    atoms: list[Atom] = []
    members: list[Member] = []
    atom_start = position = 0

    def close_atom() -> None:
        """What has been put together so far is one atom."""
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


def fuse(
    order: Sequence[int], atoms: Sequence[Atom], shapes: Sequence[ParameterShape], rule: FusionRule
) -> list[tuple[int, ...]]:
    """Group the atoms, taken in ``order``, into runs that travel together."""
    groups: list[list[int]] = []
    nbytes, layers = 0, set[int]()  # of the last group
    for index in order:
        atom = atoms[index]
        of_atom = {shapes[member.parameter].layer for member in atom.members}
        nbytes, layers = nbytes + atom.nbytes, layers | of_atom
        if not groups or not rule.allows(nbytes, len(layers)):
            groups.append([])
            nbytes, layers = atom.nbytes, of_atom
        groups[-1].append(index)
    return [tuple(group) for group in groups]


@dataclass(frozen=True)
class FusionRule:
    """Which runs of atoms may travel together (DeAR, section IV-B and VI-G)."""

    fusion: Fusion
    mb: float
    layers: int

    def allows(self, nbytes: int, num_layers: int) -> bool:
        """Whether several atoms of so many bytes and layers may be one group; a single atom always may."""
        if self.fusion == "size":
            return nbytes <= mebibytes(self.mb)
        return self.fusion == "layers" and num_layers <= self.layers
