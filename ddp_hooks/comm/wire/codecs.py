"""Codecs of numbers in fewer bits: bfloat16, and int8 or int4 with one scale per block.

A codec writes floating-point values, (numel,), to a payload, uint8, (nbytes(numel),), and reads them. ZeRO++ gathers
parameters in such blocks of int8 (Wang et al., 2023, section 3.1).

Error feedback, of values g and a residual r with the codec C and its ``feedback`` b, 0 < b <= 1::

    payload = C(g + b * r)        r <- r + g - decoded(payload)

So what was sent and the residual always add up to what was given, for any b. With b = 1 all that rounding took is in
the next payload. With b < 1 a payload has a moving average of errors, e = b * r, as in LoCo (Xie et al., 2024):
``e <- (1 - b) * e + b * (error of this step)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

CodecName: TypeAlias = Literal["exact", "bf16", "int8", "int4"]
_SCALE_BYTES = 4  # float32
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # below it a reciprocal may be infinite
# Magnitudes of codes end here, rounded. At 4 bits 7.499 and not 7, so that the largest number is rounded by as much as
# others may be. Relative error of a small transformer's gradients, in blocks of 128: 0.098, with 7 0.105, with the best
# scale of each block by search 0.095. Blocks with outliers clipped at 3 times their root mean square: 0.104; half the
# largest number: 0.257.
_LARGEST_CODE = {8: 127, 4: 7.499}
_DEFAULT_BLOCK = {8: 256, 4: 128}  # relative error of int4 as above: 0.094 with 64 elements, 0.098, 0.111 with 256
# AdamW, 4 workers, int4 gradients, a transformer with 2 layers on bytes, 500 steps: loss on other text above that of
# exact gradients, for two seeds: 0.005 and 0.006 with 1.0, 0.002 and 0.003 with 0.1, 0.004 and 0.005 without feedback.
_FEEDBACK = {8: 1.0, 4: 0.1}
_SHIFT = 16  # of the second of two int4 codes in a byte
# Elements worked on at a time: enough, so that calls cost little, and on CPUs so few that all stays in a core's cache.
_PIECE_NUMEL = 1 << 18
_PIECE_NUMEL_ON_ACCELERATORS = 1 << 24


@dataclass(frozen=True)
class Bf16:
    """Half of float32's bytes. Relative error at most 2^-8; infinity and NaN stay as they are."""

    block: ClassVar[int] = 1  # every number is rounded by itself

    def nbytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, payload: Tensor) -> None:
        payload.view(torch.bfloat16).copy_(values)

    def decode(self, payload: Tensor, values: Tensor) -> None:
        values.copy_(payload.view(torch.bfloat16))

    def add(self, payload: Tensor, values: Tensor) -> None:
        # In pieces, because the sum of two types takes memory for one of them converted.
        sent, step = payload.view(torch.bfloat16), _piece_numel(values.device)
        for first in range(0, len(values), step):
            values[first : first + step].add_(sent[first : first + step])

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        """Write ``values + residual`` to ``payload``, and the loss to ``residual``.

        Infinity and NaN travel, but do not stay: a scaler skips the step, and goes on.
        """
        step = _piece_numel(values.device)
        for piece in zip(residual.split(step), values.split(step), payload.split(2 * step), strict=True):
            kept, added, part = piece
            self.encode(kept.add_(added), part)
            kept.sub_(part.view(torch.bfloat16)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@dataclass(frozen=True)
class IntBlocks:
    """Integers of 8 or 4 bits, and one float32 scale per block.

    Error at most 1/254 or 1/14.99 of the block's largest magnitude. With infinity or NaN in a block, no number of the
    block is finite. Blocks of numbers below 1.5e-36 or 9e-38 become 0. A byte has two codes of 4 bits, one of the
    block's first half and one of its second: ``first + 16 * second``.
    """

    bits: Literal[8, 4]
    block: int  # elements that share a scale; a multiple of 32 / bits
    feedback: float = 1.0  # share of the residual that is added to values, in (0, 1]

    def __post_init__(self) -> None:
        if self.block < 1 or self.block % (32 // self.bits):
            raise ValueError(f"block must be a multiple of {32 // self.bits} with int{self.bits}, got {self.block}")

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.block) * (_SCALE_BYTES + self._code_bytes)

    def encode(self, values: Tensor, payload: Tensor) -> None:
        scratch = self._scratch(values)
        for where, scale, code in self._pieces(values, payload):
            self._encode(self._rows(values[where]), scale, code, scratch[: len(scale)])

    def decode(self, payload: Tensor, values: Tensor) -> None:
        scratch = self._scratch(values)
        for where, scale, code in self._pieces(values, payload):
            values[where].copy_(self._decode(scale, code, scratch[: len(scale)], values[where].numel()))

    def add(self, payload: Tensor, values: Tensor) -> None:
        scratch = self._scratch(values)
        for where, scale, code in self._pieces(values, payload):
            values[where].add_(self._decode(scale, code, scratch[: len(scale)], values[where].numel()))

    def encode_with_residual(self, values: Tensor, residual: Tensor, payload: Tensor) -> None:
        """Write ``values + feedback * residual`` to ``payload``; add to ``residual`` what is missing of ``values``.

        Infinity and NaN travel, but do not stay, nor does the residual of their block.
        """
        scratch = self._scratch(values)
        for where, scale, code in self._pieces(values, payload):
            kept, added, rows = residual[where], values[where], scratch[: len(scale)]
            total = kept if self.feedback == 1 else torch.add(added, kept, alpha=self.feedback)
            kept.add_(added)
            self._encode(self._rows(total), scale, code, rows)
            kept.sub_(self._decode(scale, code, rows, kept.numel()))
            if scale.device.type != "cpu" or not isfinite(scale.sum()):  # to ask an accelerator is to wait for it
                kept.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def _code_bytes(self) -> int:
        """Of a block."""
        return self.block * self.bits // 8

    def _encode(self, rows: Tensor, scale: Tensor, code: Tensor, scratch: Tensor) -> None:
        """Write ``rows``, (blocks, block), float32; ``scratch``, of the same shape, is overwritten."""
        torch.amax(torch.abs(rows, out=scratch), dim=1, out=scale)
        scale.div_(_LARGEST_CODE[self.bits])
        scale.masked_fill_(scale < _LEAST_SCALE, 0.0)
        inverse = scale.clamp(min=_LEAST_SCALE).reciprocal_()
        # At most 127 or 7 by magnitude, and anything at all where the scale says that it is not finite.
        torch.mul(rows, inverse[:, None], out=scratch).round_()
        if self.bits == 4:
            first, second = scratch.chunk(2, dim=1)
            scratch = first.add_(second, alpha=_SHIFT)
        code.copy_(scratch)

    def _decode(self, scale: Tensor, code: Tensor, scratch: Tensor, numel: int) -> Tensor:
        """Return the numbers, (numel,), float32, in ``scratch``, (blocks, block)."""
        if self.bits == 4:
            first, second = scratch.chunk(2, dim=1)
            first.copy_(code)
            torch.mul(first, 1 / _SHIFT, out=second).round_()  # no tie, as codes are from -7 to 7
            first.sub_(second, alpha=_SHIFT)
        else:
            scratch.copy_(code)
        return scratch.mul_(scale[:, None]).view(-1)[:numel]

    def _rows(self, values: Tensor) -> Tensor:
        """Return ``values``, (n,), as (blocks, block), float32, the last block filled up with zeros."""
        missing = -values.numel() % self.block
        return (F.pad(values.float(), (0, missing)) if missing else values.float()).view(-1, self.block)

    def _scratch(self, values: Tensor) -> Tensor:
        """Return memory for the longest piece, (blocks, block), float32."""
        num_blocks = min(self._step(values.device), -(-values.numel() // self.block))
        return torch.empty(num_blocks, self.block, device=values.device)

    def _step(self, device: torch.device) -> int:
        """Blocks in a piece."""
        return max(1, _piece_numel(device) // self.block)

    def _pieces(self, values: Tensor, payload: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield which values, and views of their scales, (blocks,), float32, and codes, (blocks, bytes), int8."""
        num_blocks, step = -(-values.numel() // self.block), self._step(values.device)
        packed_scales, packed_codes = payload.split([num_blocks * _SCALE_BYTES, num_blocks * self._code_bytes])
        scales = packed_scales.view(torch.float32)
        codes = packed_codes.view(torch.int8).view(num_blocks, self._code_bytes)
        for start in range(0, num_blocks, step):
            blocks = slice(start, start + step)
            yield slice(start * self.block, (start + step) * self.block), scales[blocks], codes[blocks]


Codec: TypeAlias = Bf16 | IntBlocks


def codec_of(name: CodecName, block: int | None, dtype: torch.dtype) -> Codec | None:
    """Return the codec of tensors of a type; None: they travel as they are, since a code would save nothing.

    ``block``: elements that share a scale, a multiple of 4 for int8, of 8 for int4; None: 256 and 128.
    """
    if name == "exact" or not dtype.is_floating_point:
        return None
    if name == "bf16":
        return Bf16() if dtype.itemsize > 2 else None
    if dtype.itemsize == 1:
        return None
    bits: Literal[8, 4] = 8 if name == "int8" else 4
    return IntBlocks(bits, block or _DEFAULT_BLOCK[bits], _FEEDBACK[bits])


def relative_error(codec: Codec, values: Tensor) -> float:
    """Return the norm of what ``codec`` takes from ``values``, (numel,), by the norm of ``values``.

    0 if that norm is 0, NaN if a value is not finite.
    """
    payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    codec.encode(values, payload)
    decoded = torch.empty_like(values)
    codec.decode(payload, decoded)
    norm = float(values.double().norm())
    return float(decoded.sub_(values).double().norm()) / norm if norm else 0.0


def _piece_numel(device: torch.device) -> int:
    return _PIECE_NUMEL if device.type == "cpu" else _PIECE_NUMEL_ON_ACCELERATORS
