"""Numbers in fewer bits, as bytes for messages: bfloat16, and int8 with one scale per block.

Blocks of int8 with scales of their own are ZeRO++'s (Wang et al., 2023, section 3.1), which gathers parameters so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

CodecName: TypeAlias = Literal["exact", "bf16", "int8"]
_SCALE_BYTES = 4  # float32
_LARGEST = 127
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # below it a reciprocal may be infinite
# Elements worked on at a time, so that what is computed on the way is not much, and calls cost little.
_PIECE_NUMEL = 1 << 20
_PIECE_NUMEL_ON_ACCELERATORS = 1 << 24


class Codec(Protocol):
    """Encodes floating-point tensors, (numel,), as uint8 tensors, (nbytes(numel),), and back."""

    def nbytes(self, numel: int) -> int:
        """Bytes of so many elements."""

    def encode(self, values: Tensor, payload: Tensor) -> None:
        """Write ``values`` to ``payload``."""

    def decode(self, payload: Tensor, values: Tensor) -> None:
        """Write what ``payload`` says to ``values``."""

    def add(self, payload: Tensor, values: Tensor) -> None:
        """Add what ``payload`` says to ``values``."""

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        """Write ``values`` and ``residual`` to ``payload``, and what that loses to ``residual``.

        What is not finite has been said, and must not stay: a scaler skips the step, and goes on.
        """


class Bf16:
    """Half of float32's bytes. Relative error at most 2^-8; what is not finite stays so."""

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))

    def add(self, payload: Tensor, values: Tensor) -> None:
        values.add_(payload.view(torch.bfloat16))

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        self.encode(residual.add_(values), payload)
        residual.sub_(payload.view(torch.bfloat16)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class Int8Blocks:
    """A quarter of float32's bytes, and four for every block. Error at most 1/254 of the block's largest magnitude.

    If anything in a block is not finite, nothing in it is. Blocks without anything of at least 1.5e-36 are zero.

    Args:
        block: elements that share a scale; a multiple of 4.
    """

    block: int

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * (_SCALE_BYTES + self.block)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scales, codes = self._parts(payload)
        for where, blocks in self._pieces(values):
            self._encode(values[where], scales[blocks], codes[blocks])

    def decode(self, payload: Tensor, values: Tensor) -> None:
        scales, codes = self._parts(payload)
        for where, blocks in self._pieces(values):
            piece = values[where]
            piece.copy_(self._decode(scales[blocks], codes[blocks], piece.numel()))

    def add(self, payload: Tensor, values: Tensor) -> None:
        scales, codes = self._parts(payload)
        for where, blocks in self._pieces(values):
            piece = values[where]
            piece.add_(self._decode(scales[blocks], codes[blocks], piece.numel()))

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        scales, codes = self._parts(payload)
        for where, blocks in self._pieces(values):
            piece, scale, code = residual[where].add_(values[where]), scales[blocks], codes[blocks]
            self._encode(piece, scale, code)
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

    def _pieces(self, values: Tensor) -> Iterator[tuple[slice, slice]]:
        """Where elements are, and their blocks; only the last piece may end inside of a block."""
        numel = values.numel()
        piece_numel = _PIECE_NUMEL if values.device.type == "cpu" else _PIECE_NUMEL_ON_ACCELERATORS
        step = max(1, piece_numel // self.block)
        for first in range(0, -(-numel // self.block), step):
            begin = first * self.block
            yield slice(begin, min(begin + step * self.block, numel)), slice(first, first + step)

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
    return Int8Blocks(block) if dtype.itemsize > 1 else None
