"""How the gradients of every atom travel."""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_hooks.comm import ExactWire, Lanes
from ddp_hooks.dear.layout.placement import Layout


class ReductionWires:
    """Wires of atoms, with their memory of earlier steps: the same on every rank."""

    def __init__(self, wire: str, lanes: Lanes) -> None:
        # Sums of a node's ranks do not fit, and NCCL has its own collectives.
        self._is_exact = wire == "exact" and lanes.node_size == 1 and lanes.world_size > 1 and not lanes.native
        self._layout: Layout | None = None
        self._of_atom: dict[int, ExactWire] = {}

    def of(self, layout: Layout | None, atom: int, gradient: Tensor) -> ExactWire | None:
        """Return the wire of an atom of ``layout``; None: of one that DDP is about to change."""
        if not self._is_exact or gradient.dtype != torch.float32:
            return None
        if layout is None:
            return ExactWire()
        if layout is not self._layout:
            self._layout, self._of_atom = layout, {}
        return self._of_atom.setdefault(atom, ExactWire())
