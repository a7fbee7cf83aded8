"""Where every element lives: atoms inside DDP's buckets, and the ranges that ranks own.

DDP's buckets decide when gradients are ready. Atoms and fusion groups are formed by
:mod:`ddp_hooks.planning.atoms`, which the simulation of DeAR uses, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ddp_hooks.planning.atoms import Atom, FusionRule, Member, ParameterShape, cut_bucket, fuse

__all__ = ["Atom", "FusionRule", "Interval", "Layout", "Member", "ParameterShape", "cut_bucket", "fuse"]


class Interval(NamedTuple):
    """Elements ``[start, end)`` of a parameter, in storage order."""

    parameter: int
    start: int
    end: int


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
