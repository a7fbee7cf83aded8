"""Shards: the ranges of parameters that one rank owns, and the gradients that belong to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_hooks.dear.layout.placement import ParameterRange
from ddp_hooks.intercept import GradientGuard, clipping_of_frameworks

GRADIENT_KEY = "ddp_hooks.gradient"  # a gradient kept from an earlier backward travels like optimizer state
MASTER_KEY = "ddp_hooks.master"  # in a saved state: the parameter as the optimizer has it, before rounding


@dataclass
class Shard:
    """One range of one parameter, owned by this rank."""

    range: ParameterRange
    atom: int
    offset: int  # of the range in its atom
    memory: Tensor  # (numel of the range,), the view of the parameter's memory
    tensor: torch.nn.Parameter  # for the optimizer: the same memory, or a more precise master of it
    guard: GradientGuard  # stands for its reduced gradient where nobody may read it
    hidden: Tensor | None = None  # its gradient, while the guard stands for it
    base: Tensor | None = None  # gradient of earlier backward passes, while a newer one is being reduced

    @property
    def is_master(self) -> bool:
        return self.tensor.dtype != self.memory.dtype


class Shards:
    """All shards of this rank under the layout in force; none before the first step."""

    def __init__(self) -> None:
        self.of_atom: list[list[Shard]] = []

    def __iter__(self) -> Iterator[Shard]:
        return itertools.chain.from_iterable(self.of_atom)

    def clear(self) -> None:
        self.of_atom = []


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
