"""What is asked for, and how it is written down for other ranks."""

from __future__ import annotations

import json
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

_UNEVEN = ("all_gather", "all_to_all")  # whose tensors may have another number of rows on every rank


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a request.

    Args:
        name: of the tensor.
        shape: of the tensor; -1 for rows of which ranks may have different numbers.
        dtype: as text.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Elements; negative if ranks may have different numbers."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that is written down as text."""
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Request:
    """A collective that is wanted, of one tensor or of a group that travels together.

    Equal on all ranks, or the collective cannot be done: that is what ranks compare.

    Args:
        name: under which ranks find each other's.
        operation: what is to be done.
        tensors: in the order in which they travel.
        mean: whether sums are divided by the number of ranks.
        root: of a broadcast, a rank within the group; else -1.
        priority: larger ones go first.
        grouped: whether it was asked for as a group, also if that has one tensor.
    """

    name: str
    operation: Operation
    tensors: tuple[TensorSpec, ...]
    mean: bool = False
    root: int = -1
    priority: int = 0
    grouped: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Of its tensors, as far as all ranks have the same."""
        return sum(max(0, spec.numel) * spec.torch_dtype.itemsize for spec in self.tensors)

    @cached_property
    def known_nbytes(self) -> float:
        """Likewise; infinite where ranks may have different numbers, or an algorithm of one's own moves them."""
        is_known = self.tensors and all(spec.numel >= 0 for spec in self.tensors)
        return self.nbytes if is_known else float("inf")

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Of its tensors."""
        return frozenset(spec.dtype for spec in self.tensors)

    def entries(self) -> dict[str, object]:
        """Everything that must be the same, by name, for messages."""
        settings = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "tensors"}
        names = {"tensors": [spec.name for spec in self.tensors]}
        shapes = {spec.name: f"{list(spec.shape)} of {spec.dtype}" for spec in self.tensors}
        return {**settings, **names, **shapes}


def spec_of(name: str, tensor: Tensor, operation: Operation) -> TensorSpec:
    """What other ranks are told of a tensor."""
    shape = tuple(tensor.shape)
    return TensorSpec(name, (-1, *shape[1:]) if operation in _UNEVEN else shape, str(tensor.dtype))


def packed(requests: Sequence[Request]) -> list[Any]:
    """Requests as JSON takes them."""
    return [astuple(request) for request in requests]


def unpacked(items: Sequence[Any]) -> list[Request]:
    """The reverse of :func:`packed`."""
    return [
        Request(name, operation, tuple(TensorSpec(n, tuple(shape), dtype) for n, shape, dtype in specs), *rest)
        for name, operation, specs, *rest in items
    ]


def encode(message: object) -> bytes:
    """A message between ranks."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The reverse of :func:`encode`."""
    return json.loads(data)
