"""Settings of the all-reduce in fewer bits, one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ddp_hooks.comm import check_node_size, check_waits, check_whole, refuse_unused, whole
from ddp_hooks.comm.wire.codecs import Codec, CodecName, codec_of

_NAMES: dict[int, CodecName] = {16: "bf16", 8: "int8", 4: "int4"}


@dataclass(frozen=True)
class QuantizedConfig:
    """Settings of the all-reduce in fewer bits: how gradients are rounded, and between which ranks.

    Args:
        bits: of an element on its way: 16 (bfloat16), 8 or 4 (integers, and a float32 scale for every block). 16 leaves
            16-bit gradients as they are: they are summed in float32 and rounded once.
        block_numel: elements that share a scale, a multiple of 8, for 8 and 4 bits. Fewer round less, and cost more:
            ``bits / 8 + 4 / block_numel`` bytes per element. None: 256 or 128.
        node_size: ranks per node, for two levels: exact sums within nodes, whose links are fast, fewer bits between
            them. Neighbouring ranks share a node; their number is a divisor of the number of ranks, >= 2, and there are
            several nodes. ``"auto"``: as the names of hosts tell; one level if they tell no such size. None: one level.
        lanes: streams of communication side by side.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with its reason.

    Raises:
        ValueError: a setting is out of range, or has no effect beside the others.
    """

    bits: int = 8
    block_numel: int | None = None
    node_size: int | Literal["auto"] | None = None
    lanes: int = 2
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    def __post_init__(self) -> None:
        if not whole(self.bits, 1) or self.bits not in _NAMES:
            raise ValueError(f"bits must be one of {tuple(_NAMES)}, got {self.bits!r}")
        check_whole(self, block_numel=8, lanes=1)
        check_node_size(self.node_size)
        if self.block_numel is not None and self.block_numel % 8:
            raise ValueError(f"block_numel must be None, or a multiple of 8, got {self.block_numel!r}")
        if self.bits == 16:
            refuse_unused(self, ("block_numel",), "with bits=16, which has no scales")
        check_waits(self.timeout_s, self.stall_warning_s)

    def codec_for(self, dtype: torch.dtype) -> Codec | None:
        """Return the codec of gradients of a type; None: they travel as they are."""
        return codec_of(_NAMES[self.bits], self.block_numel, dtype)
