"""Reductions that are still pending when backward has ended."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_hooks.comm import Recorder, Stall
from fsdp_ext.deferred import Delivery, PendingReductions


class Reduction:
    """A reduce-scatter of four elements, all of which become ``value``."""

    def __init__(self, value: float) -> None:
        self.label = f"reduction {value:g}"
        self.value = value
        self.done = False
        self.source, self.output = torch.zeros(4), torch.full((4,), torch.nan)

    def wait(self) -> None:
        self.source.fill_(self.value)
        self.done = True

    @property
    def delivery(self) -> Delivery:
        return Delivery(self, self.source, self.output, 16)

    @property
    def delivered(self) -> bool:
        return bool((self.output == self.value).all())

    @property
    def missing(self) -> bool:
        return bool(self.output.isnan().all())


def pending(limit_bytes: int | None = None) -> PendingReductions:
    return PendingReductions(limit_bytes, Stall(), Recorder())


def _run(step: Callable[[], object]) -> None:
    step()


def backward(*steps: Callable[[], object]) -> None:
    """A backward that runs these functions, the first one first."""
    with torch.enable_grad():
        y = torch.ones(2, requires_grad=True) * 1
        for step in reversed(steps):
            y = y * 1
            y.register_hook(lambda _, step=step: _run(step))
        y.sum().backward()
