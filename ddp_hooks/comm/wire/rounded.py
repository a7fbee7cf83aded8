"""Wires that round: what a partition needs to travel in a codec's numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ddp_hooks.comm.wire.codecs import Codec


@dataclass
class RoundedWire:
    """Reduce-scatter or all-gather of numbers that the rank which sends them rounds once."""

    codec: Codec
    residual: Tensor | None = None  # of a reduce-scatter, (numel of the partition,), changed in place
    is_new: bool = False  # the residual may come from another partition


@dataclass
class DifferenceWire:
    """All-gather of the rounded differences between an owner's precise numbers and those that all ranks have."""

    codec: Codec
    precise: Tensor  # (numel of this rank's range,)
    shown: Tensor  # the same of the partition's type: becomes a copy of this rank's range

    def part(self, elements: slice) -> DifferenceWire:
        return DifferenceWire(self.codec, self.precise[elements], self.shown[elements])
