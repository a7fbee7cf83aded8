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
LOW_BITS = 0xFFFF
_ALL_BUT_SIGN = 0x7FFFFFFF
TYPES = (torch.bfloat16, torch.float16)
LONGEST_PAUSE = 64  # turns between two looks at numbers that do not fit
_NONE = np.empty(0, dtype=np.int64)
_NOTHING = torch.empty(0, dtype=torch.int16)


@dataclass
class PairMemory:
    """Knowledge about one slice that its sender and its receiver share; both change it alike with every message."""

    known: np.ndarray = field(default_factory=lambda: _NONE)  # (k,), int64: blocks that did not fit last time
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

    def learn(self, misfits: np.ndarray, num_blocks: int) -> None:
        """Remember the blocks, (k,), that did not fit this time."""
        self.known = misfits
        if 2 * len(misfits) > num_blocks:
            self.known, self.pause = _NONE, self.next_pause
            self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)
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
    # In numpy, where a call on little data takes a fifth of torch's time; but torch casts faster.
    fields = _Fields.of(message, values.numel(), len(memory.known))
    bits = values.numpy().view(np.int32)
    flags = _misfits(values, memory.narrow, fields.as_numbers(memory.narrow))
    if 2 * np.count_nonzero(flags) > len(flags):
        other = TYPES[1 - TYPES.index(memory.narrow)]
        others = _misfits(values, other, torch.empty(values.numel(), dtype=other))
        if np.count_nonzero(others) < np.count_nonzero(flags):
            memory.narrow, flags = other, others
            fields.as_numbers(other).copy_(values)
    fields.flags[:] = flags
    fields.kind[:] = TYPES.index(memory.narrow)
    whole = len(flags) * BLOCK
    fields.rest_low[:] = bits[whole:]
    fields.high[whole:] = bits[whole:] >> 16
    misfits, known = flags.nonzero()[0], memory.known
    memory.learn(misfits, len(flags))
    if not len(known) and not len(misfits):
        return _NOTHING
    late = np.setdiff1d(misfits, known, assume_unique=True)
    blocks, high = bits[:whole].reshape(-1, BLOCK), fields.high[:whole].reshape(-1, BLOCK)
    for chosen in (known, late):
        high[chosen] = blocks[chosen] >> 16
    fields.low[:] = blocks[known]
    return torch.from_numpy(blocks[late].astype(np.int16).reshape(-1))


@dataclass
class Arrived:
    """First message of a slice, received, and what is still to come."""

    fields: _Fields
    known: np.ndarray  # blocks whose low bits the message has
    late: np.ndarray  # blocks whose low bits come in the second message
    low_of_late: Tensor  # (late * BLOCK,), int16: to receive it in

    @staticmethod
    def of(message: Tensor, numel: int, memory: PairMemory) -> Arrived:
        """Read what the message announces, and remember it."""
        fields, known = _Fields.of(message, numel, len(memory.known)), memory.known
        misfits = fields.flags.nonzero()[0]
        late = np.setdiff1d(misfits, known, assume_unique=True) if len(known) else misfits
        memory.learn(misfits, len(fields.flags))
        return Arrived(fields, known, late, torch.empty(len(late) * BLOCK, dtype=torch.int16))

    def decode(self, values: Tensor) -> None:
        """Write the numbers, bit for bit, to ``values``, (n,), float32; the second message must have arrived."""
        fields, whole = self.fields, len(self.fields.flags) * BLOCK
        values.copy_(fields.as_numbers(TYPES[fields.kind[0]]))
        bits = values.numpy().view(np.int32)
        bits[whole:] = _joined(fields.high[whole:], fields.rest_low)
        blocks, high = bits[:whole].reshape(-1, BLOCK), fields.high[:whole].reshape(-1, BLOCK)
        for chosen, low in ((self.known, fields.low), (self.late, self.low_of_late.numpy().reshape(-1, BLOCK))):
            if len(chosen):
                blocks[chosen] = _joined(high[chosen], low)


@dataclass
class _Fields:
    """Views of a message's parts."""

    message: Tensor
    high: np.ndarray  # (n,), int16
    low: np.ndarray  # (k, BLOCK), int16
    rest_low: np.ndarray  # (n % BLOCK,), int16
    flags: np.ndarray  # (n // BLOCK,), uint8
    kind: np.ndarray  # (1,), uint8

    @staticmethod
    def of(message: Tensor, numel: int, num_known: int) -> _Fields:
        array = message.numpy()
        shorts = array[: 2 * (numel + BLOCK * num_known + numel % BLOCK)].view(np.int16)
        low_end = numel + BLOCK * num_known
        low = shorts[numel:low_end].reshape(-1, BLOCK)
        return _Fields(message, shorts[:numel], low, shorts[low_end:], array[shorts.nbytes : -1], array[-1:])

    def as_numbers(self, dtype: torch.dtype) -> Tensor:
        """Return ``high`` as numbers of 16 bits, (n,)."""
        return self.message[: self.high.nbytes].view(dtype)


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
    mask = LOW_BITS
    if narrow == torch.float16:  # the exponent may not fit either
        lost, mask = written[: num_blocks * BLOCK].float().sub_(lost), _ALL_BUT_SIGN
    bits = lost.view(torch.int32).numpy().reshape(num_blocks, BLOCK)
    misfits: np.ndarray = (np.bitwise_or.reduce(bits, axis=1) & mask) != 0
    return misfits


def _joined(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    joined: np.ndarray = (high.astype(np.int32) << 16) | low.view(np.uint16)
    return joined
