"""Ranges of parameters, which rank holds which (under a layout, evenly, or everything), and the shards of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ddp_hooks.intercept import GradientGuard, clipping_of_frameworks
from ddp_hooks.planning.atoms import Atom, Member

GRADIENT_KEY = "ddp_hooks.gradient"  # a gradient kept from an earlier backward travels like optimizer state
MASTER_KEY = "ddp_hooks.master"  # in a saved state: the parameter as the optimizer has it, before rounding
SHOWN_KEY = "ddp_hooks.shown"  # the parameter that the master belongs to, where it is not the master's rounding


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


@dataclass
class Shard:
    """One range of one parameter, owned by this rank."""

    range: ParameterRange
    atom: int
    offset: int  # of the range in its atom
    memory: Tensor  # (numel of the range,), the view of the parameter's memory
    tensor: torch.nn.Parameter  # for the optimizer: the same memory, or a more precise master of it
    shown: Tensor | None  # (numel,), memory as gathers of differences left it; None: gathers copy
    guard: GradientGuard  # stands for its reduced gradient where nobody may read it
    hidden: Tensor | None = None  # its gradient, while the guard stands for it
    base: Tensor | None = None  # gradient of earlier backward passes, while a newer one is being reduced

    @property
    def is_master(self) -> bool:
        return self.shown is not None or self.tensor.dtype != self.memory.dtype


class Shards:
    """All shards of this rank under the layout in force; none before the first step."""

    def __init__(self) -> None:
        self.of_atom: list[list[Shard]] = []

    def __iter__(self) -> Iterator[Shard]:
        return itertools.chain.from_iterable(self.of_atom)


def held_in_shards(function: str) -> str:
    """Return what to do instead of calling ``function`` for a gradient, and why."""
    if "non_finite_check" in function:
        return (
            "Use ddp_hooks.GradScaler in the place of torch.amp.GradScaler, or bfloat16 autocast, which needs none: "
            "DearState holds gradients in shards, and torch's scaler looks for overflows on one rank alone"
        )
    frameworks = "".join(f"; {name} clips by {how}" for name, how in clipping_of_frameworks.items())
    return (
        f"To clip: state.clip_grad_norm_(max_norm), state.clip_grad_value_(clip_value), or "
        f"DearConfig(max_grad_norm=...){frameworks}. To read or change: `with state.reduced_gradients() as shards:` "
        f"before the step. DearState holds gradients in shards: from backward until they are None again, what is here "
        f"is neither local nor reduced"
    )
