"""Requests for collectives, and their form in messages between ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

Operation: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "exchange", "any"
]

_UNEVEN = ("all_gather", "all_to_all")  # numbers of rows may differ by rank


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]  # -1 for numbers of rows that may differ by rank
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return dtype


@dataclass(frozen=True)
class Request:
    """Request for a collective of one tensor, or of a group that travels together; equal on all ranks."""

    name: str
    operation: Operation
    tensors: tuple[TensorSpec, ...]  # in the order in which they travel
    mean: bool = False  # divide sums by the number of ranks
    root: int = -1  # of a broadcast, a rank within the group
    priority: int = 0  # larger ones go first
    grouped: bool = False  # requested as a group, also of one tensor

    @property
    def works_without_data(self) -> bool:
        """True if zeros can stand in for a rank that has run out of data."""
        return self.operation in ("all_reduce", "any")

    @cached_property
    def nbytes(self) -> int:
        """Size of the tensors whose shapes are the same on all ranks."""
        return sum(max(0, math.prod(spec.shape)) * spec.torch_dtype.itemsize for spec in self.tensors)

    @cached_property
    def known_nbytes(self) -> float:
        """Size of the tensors; infinite for an exchange, and if numbers of rows may differ by rank."""
        return math.inf if self.operation in (*_UNEVEN, "exchange") else self.nbytes

    @cached_property
    def dtypes(self) -> frozenset[str]:
        return frozenset(spec.dtype for spec in self.tensors)

    def entries(self) -> dict[str, str]:
        """Return everything that must be the same on all ranks, by name, for messages."""
        settings = {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name != "tensors"}
        names = {"tensors": str([spec.name for spec in self.tensors])}
        shapes = {spec.name: f"{list(spec.shape)} of {spec.dtype}" for spec in self.tensors}
        return {**settings, **names, **shapes}


def spec_of(name: str, tensor: Tensor, operation: Operation) -> TensorSpec:
    shape = tuple(tensor.shape)
    return TensorSpec(name, (-1, *shape[1:]) if operation in _UNEVEN else shape, str(tensor.dtype))


def pack(requests: Sequence[Request]) -> list[Any]:
    """Return requests in a form for JSON."""
    return [astuple(request) for request in requests]


def unpack(items: Sequence[Any]) -> list[Request]:
    return [
        Request(name, operation, tuple(TensorSpec(n, tuple(shape), dtype) for n, shape, dtype in specs), *rest)
        for name, operation, specs, *rest in items
    ]
