"""Codecs of numbers in fewer bits: bfloat16, and int8 with one scale per block.

A codec writes floating-point values, (numel,), to a payload, uint8, (nbytes(numel),), and reads them. ZeRO++ gathers
parameters in such blocks of int8 (Wang et al., 2023, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

CodecName: TypeAlias = Literal["exact", "bf16", "int8"]
_SCALE_BYTES = 4  # float32
_LARGEST = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # below it a reciprocal may be infinite
# Elements worked on at a time: few, so that scratch memory is small, and enough, so that calls cost little.
_PIECE_NUMEL = 1 << 20
_PIECE_NUMEL_ON_ACCELERATORS = 1 << 24


class Bf16:
    """Half of float32's bytes. Relative error at most 2^-8; infinity and NaN stay as they are."""

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))

    def add(self, payload: Tensor, values: Tensor) -> None:
        values.add_(payload.view(torch.bfloat16))

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        """Write ``values + residual`` to ``payload``, and the loss to ``residual``.

        Infinity and NaN travel, but do not stay: a scaler skips the step, and goes on.
        """
        self.encode(residual.add_(values), payload)
        residual.sub_(payload.view(torch.bfloat16)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Int8Blocks:
    """A quarter of float32's bytes, and four for every block. Error at most 1/254 of the block's largest magnitude.

    With infinity or NaN in a block, no number of the block is finite. Blocks of numbers below 1.5e-36 become 0.
    """

    block: int  # elements that share a scale; a multiple of 4

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * (_SCALE_BYTES + self.block)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        for piece, scale, code in self._pieces(values, payload):
            self._encode(piece, scale, code)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        for piece, scale, code in self._pieces(values, payload):
            piece.copy_(self._decode(scale, code, piece.numel()))

    def add(self, payload: Tensor, values: Tensor) -> None:
        for piece, scale, code in self._pieces(values, payload):
            piece.add_(self._decode(scale, code, piece.numel()))

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        pieces = zip(self._pieces(residual, payload), self._pieces(values, payload), strict=True)
        for (piece, scale, code), (added, _, _) in pieces:
            self._encode(piece.add_(added), scale, code)
            piece.sub_(self._decode(scale, code, piece.numel()))
            if scale.device.type != "cpu" or not scale.isfinite().all():  # to ask an accelerator is to wait for it
                piece.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _encode(self, piece: Tensor, scale: Tensor, code: Tensor) -> None:
        piece = piece.float()
        if piece.numel() % self.block:
            piece = F.pad(piece, (0, -piece.numel() % self.block))
        piece = piece.view(-1, self.block)
        scratch = piece.abs()
        torch.div(scratch.amax(dim=1), _LARGEST, out=scale)
        scale.masked_fill_(scale < _LEAST_SCALE, 0.0)
        inverse = torch.where(scale > 0, scale, 1).reciprocal_()
        # At most 127 by magnitude, and anything at all where the scale says that it is not finite.
        code.copy_(torch.mul(piece, inverse[:, None], out=scratch).round_())

    def _decode(self, scale: Tensor, code: Tensor, numel: int) -> Tensor:
        return code.float().mul_(scale[:, None]).view(-1)[:numel]

    def _pieces(self, values: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield values, (n,), their scales, (blocks,), float32, and their codes, (blocks, block), int8, all views."""
        num_blocks = payload.numel() // (_SCALE_BYTES + self.block)
        packed_scales, packed_codes = payload.split([num_blocks * _SCALE_BYTES, num_blocks * self.block])
        scales, codes = packed_scales.view(torch.float32), packed_codes.view(torch.int8).view(num_blocks, self.block)
        piece_numel = _PIECE_NUMEL if values.device.type == "cpu" else _PIECE_NUMEL_ON_ACCELERATORS
        step = max(1, piece_numel // self.block)
        for first in range(0, -(-values.numel() // self.block), step):
            blocks = slice(first, first + step)
            yield values[first * self.block : (first + step) * self.block], scales[blocks], codes[blocks]


Codec: TypeAlias = Bf16 | Int8Blocks


def codec_of(name: CodecName, block: int, dtype: torch.dtype) -> Codec | None:
    """Return the codec of tensors of a type; None: they travel as they are, since a code would save nothing."""
    if name == "exact" or not dtype.is_floating_point:
        return None
    if name == "bf16":
        return Bf16() if dtype.itemsize > 2 else None
    return Int8Blocks(block) if dtype.itemsize > 1 else None
