"""How the gradients of every atom travel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import ExactNativeWire, ExactWire, Lanes, Residuals, RoundedWire, codec_of
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.planning.atoms import Atom


class ReductionWires:
    """Wires of atoms, with their memory of earlier steps: the same on every rank, but for the residuals."""

    def __init__(self, config: DearConfig, lanes: Lanes, parameters: Sequence[Tensor]) -> None:
        # On native lanes 16 bits are asked for: there gradients that fit no longer are an error.
        is_wanted = config.wire == "exact" or (config.wire == "auto" and not lanes.native)
        # Sums of a node's ranks do not fit 16 bits.
        self._is_exact = is_wanted and lanes.node_size == 1 and lanes.world_size > 1
        self._is_native = lanes.native
        self._rounds_to = config.rounds_to if lanes.world_size > 1 else None
        self._residuals = Residuals(parameters)
        self._layout: Layout | None = None
        self._of_atom: dict[int, ExactWire | ExactNativeWire | RoundedWire] = {}

    def scale_residuals(self, factor: float) -> None:
        """Multiply residuals, where the loss will have another scale."""
        self._residuals.scale(factor)

    def refuse_lost_bits(self) -> None:
        """Raise RuntimeError if exact gradients lost bits, and no backward has found out yet; communicate nothing."""
        for wire in self._of_atom.values():
            if isinstance(wire, ExactNativeWire):
                wire.read_flags()

    def of(
        self, layout: Layout | None, index: int, atom: Atom, bucket: tuple[int, ...], gradient: Tensor
    ) -> ExactWire | ExactNativeWire | RoundedWire | None:
        """Return the wire of an atom of a bucket of parameters; ``layout`` is None where DDP is about to change it."""
        if self._rounds_to is not None:
            codec = codec_of(self._rounds_to, None, gradient.dtype)
            if codec is None:
                return None
            residual = self._residuals.of_bucket(bucket)[atom.start : atom.start + atom.numel]
            if layout is not self._layout:
                self._layout, self._of_atom = layout, {}
            rounded = RoundedWire(codec, residual, is_new=index not in self._of_atom)
            self._of_atom[index] = rounded
            return rounded
        if not self._is_exact or gradient.dtype != torch.float32:
            return None
        if layout is None:
            return None if self._is_native else ExactWire()
        if layout is not self._layout:
            self.refuse_lost_bits()
            self._layout, self._of_atom = layout, {}
        if index not in self._of_atom:
            self._of_atom[index] = ExactNativeWire(atom.bounds) if self._is_native else ExactWire()
        return self._of_atom[index]
