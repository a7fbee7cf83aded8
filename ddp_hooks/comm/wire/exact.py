"""Exact 16 bits: float32 numbers that are 16-bit numbers travel as such, the others with all their bits.

Under ``torch.autocast`` the float32 gradient of a weight comes out of a cast, and so *is* a bfloat16 or float16 number:
its 16 bits say everything. A message has the 16 bits of all numbers, and for blocks with a number that does not fit the
low 16 bits of float32, too; there the 16 bits are the high ones. Nothing is ever rounded. Sender and receiver remember
which blocks did not fit last time, so both know how long the next message is; blocks that do not fit for the first time
send their low bits in a second message, which the first announces. Where most blocks do not fit, numbers travel as they
are, and the sender looks again after a number of turns that grows.

Message of n numbers with k remembered blocks: n * 2 bytes, k * BLOCK * 2 bytes of low bits, those of the numbers after
the last whole block, and one byte per block (1: it does not fit), then one byte for the type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1024  # numbers whose low bits travel together
_LOW_BITS = 0xFFFF
_ALL_BUT_SIGN = 0x7FFFFFFF
_TYPES = (torch.bfloat16, torch.float16)
_LONGEST_PAUSE = 64  # turns between two looks at numbers that do not fit
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass
class PairMemory:
    """Knowledge about one slice that its sender and its receiver share; both change it alike with every message."""

    known: Tensor = _NONE  # (k,), int64: blocks that did not fit last time
    pause: int = 0  # turns for which the slice still travels as it is
    next_pause: int = 1
    narrow: torch.dtype = torch.bfloat16  # of the 16 bits; the sender's choice, which every message tells

    def is_whole(self, numel: int) -> bool:
        """Return True if the slice travels as it is this time; call it once per turn."""
        if numel < BLOCK:
            return True
        if self.pause:
            self.pause -= 1
            return True
        return False

    def learn(self, misfits: Tensor, num_blocks: int) -> None:
        """Remember the blocks, (k,), that did not fit this time."""
        self.known = misfits
        if 2 * len(misfits) > num_blocks:
            self.known, self.pause = _NONE, self.next_pause
            self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)
        else:
            self.next_pause = 1


@dataclass
class ExactWire:
    """Memory of a partition that is reduce-scattered in exact 16 bits, by slice, peer and direction."""

    pairs: dict[tuple[int, int, bool], PairMemory] = field(default_factory=dict)

    def pair(self, index: int, peer: int, sends: bool) -> PairMemory:
        return self.pairs.setdefault((index, peer, sends), PairMemory())


def message_bytes(numel: int, memory: PairMemory) -> int:
    """Return the length of the first message of a slice that does not travel as it is."""
    num_blocks, rest = divmod(numel, BLOCK)
    return 2 * numel + 2 * BLOCK * len(memory.known) + 2 * rest + num_blocks + 1


def encode(values: Tensor, memory: PairMemory, message: Tensor) -> Tensor:
    """Write float32 ``values``, (n,), to ``message``, uint8; return the second message, int16, mostly empty."""
    fields = _Fields.of(message, values.numel(), len(memory.known))
    num_blocks = fields.flags.numel()
    flags = _misfits(values, memory.narrow, fields.narrow(memory.narrow))
    if 2 * np.count_nonzero(flags) > num_blocks:
        other = _TYPES[1 - _TYPES.index(memory.narrow)]
        others = _misfits(values, other, torch.empty(values.numel(), dtype=other))
        if np.count_nonzero(others) < np.count_nonzero(flags):
            memory.narrow, flags = other, others
            fields.narrow(other).copy_(values)
    fields.flags.copy_(torch.from_numpy(flags))
    fields.kind.fill_(_TYPES.index(memory.narrow))
    bits = values.view(torch.int32)
    if fields.rest_low.numel():
        rest = bits[num_blocks * BLOCK :]
        fields.rest_low.copy_(rest)
        fields.high[num_blocks * BLOCK :].copy_(rest >> 16)
    misfits = torch.from_numpy(flags.nonzero()[0])
    blocks, high = (each[: num_blocks * BLOCK].view(num_blocks, BLOCK) for each in (bits, fields.high))
    if len(memory.known):
        known = blocks.index_select(0, memory.known)
        fields.low.copy_(known.view(-1))
        high.index_copy_(0, memory.known, (known >> 16).short())
    new = misfits[~torch.isin(misfits, memory.known)] if len(memory.known) else misfits
    late = blocks.index_select(0, new)
    high.index_copy_(0, new, (late >> 16).short())
    memory.learn(misfits, num_blocks)
    return late.short().view(-1)


@dataclass
class Arrived:
    """First message of a slice, received, and what is still to come."""

    fields: _Fields
    known: Tensor  # blocks whose low bits the message has
    late: Tensor  # blocks whose low bits come in the second message
    low_of_late: Tensor  # (late * BLOCK,), int16: to receive it in

    @staticmethod
    def of(message: Tensor, numel: int, memory: PairMemory) -> Arrived:
        """Read what the message announces, and remember it."""
        fields, known = _Fields.of(message, numel, len(memory.known)), memory.known
        misfits = torch.from_numpy(fields.flags.numpy().nonzero()[0])
        late = misfits[~torch.isin(misfits, known)] if len(known) else misfits
        memory.learn(misfits, fields.flags.numel())
        return Arrived(fields, known, late, torch.empty(len(late) * BLOCK, dtype=torch.int16))

    def decode(self, values: Tensor) -> None:
        """Write the numbers, bit for bit, to ``values``, (n,), float32; the second message must have arrived."""
        fields, num_blocks = self.fields, self.fields.flags.numel()
        values.copy_(fields.narrow(_TYPES[int(fields.kind)]))
        bits = values.view(torch.int32)
        start = num_blocks * BLOCK
        if fields.rest_low.numel():
            bits[start:] = _joined(fields.high[start:], fields.rest_low)
        blocks, high = (each[:start].view(num_blocks, BLOCK) for each in (bits, fields.high))
        for misfits, low in ((self.known, fields.low), (self.late, self.low_of_late)):
            if len(misfits):
                blocks.index_copy_(0, misfits, _joined(high.index_select(0, misfits), low.view(-1, BLOCK)))


@dataclass
class _Fields:
    """Views of a message's parts."""

    high: Tensor  # (n,), int16
    low: Tensor  # (k * BLOCK,), int16
    rest_low: Tensor  # (n % BLOCK,), int16
    flags: Tensor  # (n // BLOCK,), uint8
    kind: Tensor  # (1,), uint8

    @staticmethod
    def of(message: Tensor, numel: int, num_known: int) -> _Fields:
        num_blocks, rest = divmod(numel, BLOCK)
        lengths = [2 * numel, 2 * BLOCK * num_known, 2 * rest, num_blocks, 1]
        high, low, rest_low, flags, kind = message.split(lengths)
        return _Fields(high.view(torch.int16), low.view(torch.int16), rest_low.view(torch.int16), flags, kind)

    def narrow(self, dtype: torch.dtype) -> Tensor:
        return self.high.view(dtype)


def fitting_part(values: Tensor, narrow: torch.dtype) -> float:
    """Return the part of blocks of ``values``, float32, not empty, that are ``narrow`` numbers throughout; any device.

    A block that is not full counts as one, and blocks with NaN as other numbers.
    """
    numbers = values.detach().flatten()
    blocks = F.pad(numbers, (0, -numbers.numel() % BLOCK)).view(-1, BLOCK)
    return float((blocks.to(narrow) == blocks).all(dim=1).float().mean())


def _misfits(values: Tensor, narrow: torch.dtype, written: Tensor) -> np.ndarray:
    """Write ``values`` to ``written``, rounded; return True per whole block if that loses a bit of it."""
    written.copy_(values)
    num_blocks = values.numel() // BLOCK
    lost = values[: num_blocks * BLOCK]
    mask = _LOW_BITS
    if narrow == torch.float16:  # the exponent may not fit either
        lost, mask = written[: num_blocks * BLOCK].float().sub_(lost), _ALL_BUT_SIGN
    bits = lost.view(torch.int32).numpy().reshape(num_blocks, BLOCK)
    misfits: np.ndarray = (np.bitwise_or.reduce(bits, axis=1) & mask) != 0
    return misfits


def _joined(high: Tensor, low: Tensor) -> Tensor:
    return (high.int() << 16) | (low.int() & 0xFFFF)
