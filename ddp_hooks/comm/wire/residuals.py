"""Residuals of gradients: numbers that rounding has left out, to be added to the next gradient (error feedback).

They belong to parameters. Their memory follows the buckets in which gradients travel, which change: DDP forms other
ones after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Residuals:
    """Residuals of a model's parameters, 0 at first, float32, or float64 for parameters in float64.

    ``parameters``, in a fixed order, give sizes, types and devices. Residuals are in the order of a gradient's memory.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        # 16 bits lose small summands. Not the parameters: they may get other memory.
        self._kinds = [(p.numel(), torch.promote_types(p.dtype, torch.float32), p.device) for p in parameters]
        self._buckets: dict[tuple[int, ...], Tensor] = {}  # parameters -> (numel of all of them,)
        self._views: dict[int, Tensor] = {}  # parameter -> (numel,), in its bucket's memory, or by itself

    def of_bucket(self, indices: Sequence[int]) -> Tensor:
        """Return the residuals of these parameters, one after the other, (numel,): memory to change in place.

        It is the same memory from call to call. A call with other ``indices`` moves the values of theirs into new
        memory; what was returned before for any of them is void then. All of them have one type and device.
        """
        key = tuple(indices)
        flat = self._buckets.get(key)
        if flat is None:
            self._buckets = {other: each for other, each in self._buckets.items() if set(other).isdisjoint(key)}
            sizes, (_, dtype, device) = [self._kinds[index][0] for index in key], self._kinds[key[0]]
            flat = self._buckets[key] = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for index, view in zip(key, flat.split(sizes), strict=True):
                if index in self._views:
                    view.copy_(self._views[index])
                self._views[index] = view
        return flat

    def by_parameter(self) -> dict[int, Tensor]:
        """Return the residuals by parameter, (numel,) each, without those that nobody has asked for yet: views."""
        return dict(self._views)

    def scale(self, factor: float) -> None:
        """Multiply all residuals, in place, where gradients have another scale; exact for powers of two."""
        for residual in self._views.values():
            residual.mul_(factor)

    def load(self, values: Mapping[int, Tensor]) -> None:
        """Replace all residuals by copies of ``values``, (numel,) each, by parameter; missing ones become 0."""
        self._buckets, self._views = {}, {}
        for index, each in values.items():
            numel, dtype, device = self._kinds[index]
            self._views[index] = torch.empty(numel, dtype=dtype, device=device).copy_(each)
