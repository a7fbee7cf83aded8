"""Numbers in fewer bits, as bytes for messages: bfloat16, and int8 with one scale per block.

Blocks of int8 with scales of their own are ZeRO++'s (Wang et al., 2023, section 3.1), which gathers parameters so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

CodecName: TypeAlias = Literal["exact", "bf16", "int8"]
_SCALE_BYTES = 4  # float32
_LARGEST = 127


class Codec(Protocol):
    """Encodes floating-point tensors, (numel,), as uint8 tensors, (nbytes(numel),), and back."""

    def nbytes(self, numel: int) -> int:
        """Bytes of so many elements."""

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Write ``values`` to ``payload``."""

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Write what ``payload`` says to ``values``."""


class Bf16:
    """Half of float32's bytes. Relative error at most 2^-8; what is not finite stays so."""

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))


@dataclass(frozen=True)
class Int8Blocks:
    """A quarter of float32's bytes, and four for every block. Error at most 1/254 of the block's largest magnitude.

    If anything in a block is not finite, nothing in it is.

    Args:
        block: elements that share a scale; a multiple of 4.
    """

    block: int

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * (_SCALE_BYTES + self.block)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scales, codes = self._parts(payload)
        blocks = F.pad(values.float(), (0, codes.numel() - values.numel())).view(codes.shape)
        torch.div(blocks.abs().amax(dim=1), _LARGEST, out=scales)
        inverse = torch.where(scales > 0, scales, 1).reciprocal_()
        codes.copy_((blocks * inverse[:, None]).round_().nan_to_num_(0.0).clamp_(-_LARGEST, _LARGEST))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        scales, codes = self._parts(payload)
        values.copy_((codes * scales[:, None]).view(-1)[: values.numel()])

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        """Views of scales, (blocks,), float32, and codes, (blocks, block), int8."""
        num_blocks = payload.numel() // (_SCALE_BYTES + self.block)
        scales, codes = payload.split([num_blocks * _SCALE_BYTES, num_blocks * self.block])
        return scales.view(torch.float32), codes.view(torch.int8).view(num_blocks, self.block)


def codec_of(name: CodecName, block: int, dtype: torch.dtype) -> Codec | None:
    """What to encode tensors of a type with; None: they travel as they are, since it would save nothing."""
    if name == "exact" or not dtype.is_floating_point:
        return None
    if name == "bf16":
        return Bf16() if dtype.itemsize > 2 else None
    return Int8Blocks(block)
