"""Gathers of rounded differences: owners step on precise masters, and replicas follow them in fewer bits.

The owner of a range sends the rounded difference between its master and the parameter, and every rank, the owner too,
adds it to the parameter. So replicas have the same bits, and the next difference contains what rounding left out: no
residual is needed. SDP4Bit quantises differences of weights, too (Jia et al., 2024, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm import CodecName, DifferenceWire, codec_of
from ddp_hooks.dear.layout.placement import Layout


class ParameterDifferences:
    """Masters of this rank's ranges, and the parameters as the latest gather has left them."""

    def __init__(self, wire: CodecName, master_dtype: torch.dtype | None, rank: int) -> None:
        self.wires: list[DifferenceWire | None] = []  # per atom of the layout in force; None: a code saves nothing
        self._wire: CodecName = wire
        self._master_dtype = master_dtype or torch.float32
        self._rank = rank
        self._starts: list[int] = []  # per atom, of this rank's range

    def install(self, layout: Layout, flats: Sequence[Tensor]) -> None:
        self._starts = [atom.bounds[self._rank] for atom in layout.atoms]
        self.wires = [
            self._wire_of(flat[start : atom.bounds[self._rank + 1]])
            for atom, flat, start in zip(layout.atoms, flats, self._starts, strict=True)
        ]

    def of_range(self, atom: int, offset: int, numel: int) -> tuple[Tensor, Tensor] | None:
        """Return the master of a range of this rank, and the parameter as it is shown, (numel,) each."""
        wire, start = self.wires[atom], offset - self._starts[atom]
        return None if wire is None else (wire.precise[start : start + numel], wire.shown[start : start + numel])

    def _wire_of(self, own: Tensor) -> DifferenceWire | None:
        codec = codec_of(self._wire, None, own.dtype)
        if codec is None:
            return None
        precise = own.to(torch.promote_types(own.dtype, self._master_dtype), copy=True)
        return DifferenceWire(codec, precise, own.clone())
