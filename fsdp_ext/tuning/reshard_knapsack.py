"""Modules to keep whole after forward: a knapsack of bytes, filled with the seconds that backwards wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_UNITS = 4096  # of a budget


@dataclass(frozen=True)
class ReshardedModule:
    """Module that is resharded after forward.

    Args:
        name: of the module.
        nbytes: of its whole parameters.
        wait_s: seconds that a backward waits for them.
    """

    name: str
    nbytes: int
    wait_s: float


def choose_kept(modules: Sequence[ReshardedModule], budget_bytes: int) -> tuple[str, ...]:
    """Return the modules that save most time within a budget: the optimum of the 0/1 knapsack, but for rounding.

    Sizes are rounded up to 1/4096 of the budget, so that it is never exceeded. Modules without waits are not kept. Of
    equal modules the first ones are.
    """
    candidates = [module for module in modules if module.wait_s > 0 and module.nbytes <= budget_bytes]
    if not candidates:
        return ()
    units = [-(-module.nbytes * _UNITS // budget_bytes) for module in candidates]
    saved_s = np.zeros(_UNITS + 1)  # by capacity
    takes = np.zeros((len(candidates), _UNITS + 1), dtype=bool)
    for index in reversed(range(len(candidates))):
        size, with_it = units[index], np.full(_UNITS + 1, -np.inf)
        with_it[size:] = saved_s[: _UNITS + 1 - size] + candidates[index].wait_s
        takes[index] = with_it >= saved_s
        saved_s = np.maximum(saved_s, with_it)
    chosen, capacity = [], _UNITS
    for index, module in enumerate(candidates):
        if takes[index, capacity]:
            chosen.append(module.name)
            capacity -= units[index]
    return tuple(chosen)
