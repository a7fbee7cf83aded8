"""Ranges of parameters, and which rank holds which: under a layout, evenly, or everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ddp_hooks.planning.atoms import Atom, Member


class ParameterRange(NamedTuple):
    """Elements ``[start, end)`` of a parameter, in storage order."""

    parameter: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


class Placement(Protocol):
    """Ranges of all parameters by rank."""

    def ranges(self, rank: int) -> list[ParameterRange]:
        """Return the ranges that ``rank`` holds."""


@dataclass(frozen=True)
class Layout:
    """Placement by atoms: rank r holds the r-th range of each; all atoms, bucket after bucket."""

    buckets: tuple[tuple[int, ...], ...]  # parameter indices of each bucket, in bucket order
    atoms: tuple[Atom, ...]

    def owned(self, rank: int) -> Iterator[tuple[int, Member]]:
        """Yield ``(atom index, member)`` for everything that ``rank`` owns."""
        for index, atom in enumerate(self.atoms):
            for member in atom.owned(rank):
                yield index, member

    def ranges(self, rank: int) -> list[ParameterRange]:
        return [ParameterRange(*member[:3]) for _, member in self.owned(rank)]


@dataclass(frozen=True)
class Replicated:
    """Placement of every parameter, whole, on some ranks."""

    ranks: tuple[int, ...]
    numels: tuple[int, ...]

    def ranges(self, rank: int) -> list[ParameterRange]:
        return [ParameterRange(i, 0, n) for i, n in enumerate(self.numels)] if rank in self.ranks else []


@dataclass(frozen=True)
class EvenSplit:
    """Placement in equal ranges of every parameter, for state that is loaded before there is a layout."""

    numels: tuple[int, ...]
    world_size: int

    def ranges(self, rank: int) -> list[ParameterRange]:
        cuts = [(n * rank // self.world_size, n * (rank + 1) // self.world_size) for n in self.numels]
        return [ParameterRange(i, start, end) for i, (start, end) in enumerate(cuts) if start < end]


def is_elementwise(value: Any, elements: ParameterRange) -> bool:
    """Return True if an entry of an optimizer's state has one value per element of the range."""
    return isinstance(value, Tensor) and value.shape == (elements.numel,)
