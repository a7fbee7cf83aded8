"""Memory that an optimizer gives a parameter in its step (``p.data = ...``), and that nobody else knows of."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def take_back(assigned: Tensor, memory: Tensor, state: MutableMapping[str, Any] | None) -> None:
    """Write the values of a tensor into the memory that it had before, if the optimizer has assigned ``.data``.

    Args:
        assigned: as the optimizer has it.
        memory: of the same shape; where others look for its values.
        state: the optimizer's, of the tensor. An entry in ``memory`` keeps its values in memory of its own; one that
            shares the new memory shares ``memory`` afterwards.
    """
    if assigned.data_ptr() == memory.data_ptr():
        return
    entries = state if state is not None else {}
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.data_ptr() == memory.data_ptr():
            entries[key] = value.clone()
    memory.copy_(assigned)
    for key, value in entries.items():
        if isinstance(value, Tensor) and value.shape == memory.shape and value.data_ptr() == assigned.data_ptr():
            entries[key] = memory.detach()
