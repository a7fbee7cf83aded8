"""Exact 16 bits for native collectives, where a look at numbers would stop the host until the device has them.

Lengths of messages must be known before they are posted, so ranks agree on them beforehand. In every turn the device
makes flags, which are the same on all ranks once their maximum is formed; the host reads them one turn later, when they
have long been there. A partition is

* looked at while it travels as it is, until :data:`_LOOKS` looks in a row have shown the same blocks to fit 16 bits on
  all ranks. Zeros and numbers that are not finite show nothing: rows of a table that no token asks for are zeros. Where
  most blocks do not fit, the next look comes after a number of turns that grows;
* then sent in 16 bits. *Wide* blocks, which did not fit once, send their low bits, too. So do a few *spare* blocks,
  those that the device finds to fit no longer: they are wide from the next turn on. If there are more of them, bits are
  lost, and all ranks raise when they read the flags: an optimizer has then stepped once on rounded gradients.

Message to an owner, int16: 16 bits of all whole blocks, low bits of spare blocks, their numbers (int32), and the
numbers after the last whole block as they are. Low bits of wide blocks are a message of their own. The 16 bits of wide
and spare blocks are the high ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddp_hooks.comm.validation import see
from ddp_hooks.comm.wire.exact import BLOCK, LONGEST_PAUSE, LOW_BITS, TYPES

_LOOKS = 3
_SPARE_PART = 32  # one block of so many is spare
_LEAST_SPARE = 2
_LEAST_BLOCKS = 8  # of a range: below, spare blocks cost more than half of what 16 bits save


@dataclass(frozen=True)
class _Flags:
    """Flags of a turn, on their way to the host."""

    host: Tensor  # uint8
    copied: torch.cuda.Event | None
    label: str

    def read(self) -> np.ndarray:
        if self.copied is not None:
            self.copied.synchronize()  # of the turn before: hosts are at most one turn ahead of devices
        flags: np.ndarray = self.host.numpy() != 0
        return flags


class ExactNativeWire:
    """Memory of a float32 partition that a native lane reduce-scatters; equal on all ranks, but for flags of a turn.

    All ranges but the last are equal, and the last is not shorter, as :func:`~..algorithms.collectives.aligned_bounds`
    cuts them.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.narrow: torch.dtype | None = None  #: type of the 16 bits in this turn; None: numbers travel as they are
        self.looks = False  #: numbers are looked at in this turn, while they travel as they are
        self._num_owners, self._share = len(bounds) - 1, bounds[1] - bounds[0]
        self._tail = bounds[-1] - self._share * self._num_owners  # numbers that the last range has more than others
        self._num_blocks = self._share // BLOCK  # of a range
        self._spare = max(_LEAST_SPARE, self._num_blocks // _SPARE_PART)
        self._misfits = self._none()  # by type: blocks that have not fit since looking began
        self._num_looks = 0  # in a row
        self._pause = 0
        self._next_pause = 1
        self._wide = np.zeros(self._num_owners * self._num_blocks, dtype=bool)
        self._wide_on_device: tuple[tuple[Tensor, Tensor], Tensor] | None = None
        self._flags: _Flags | None = None

    # -- on the host -----------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """Decide, by the flags of the turn before, how numbers travel in this one; all ranks decide alike.

        Raises as :meth:`read_flags` does.
        """
        self.read_flags()
        self.looks = self.narrow is None and not self._pause and self._num_blocks >= _LEAST_BLOCKS
        self._pause = max(0, self._pause - 1)

    def read_flags(self) -> None:
        """Read the flags of the last turn, if they have not been read.

        Raises:
            RuntimeError: bits were lost, on every rank that reads.
        """
        if self._flags is None:
            return
        label, flags, self._flags = self._flags.label, self._flags.read(), None
        if self.narrow is None:
            self._learn_from_look(flags.reshape(len(TYPES), -1))
            return
        if flags[-1]:
            raise RuntimeError(
                f"gradients lost bits in the last step, in the {label}: before they were {self.narrow} numbers on all "
                f"ranks, and there they were not, so they were rounded, and parameters are not exact. Go on from a "
                f'checkpoint before that step, with DearConfig(wire="float32"){see("gradients-lost-bits")}'
            )
        if (flags[:-1] & ~self._wide).any():
            self._widen(self._wide | flags[:-1])

    def keep(self, flags: Tensor, copied: torch.cuda.Event | None, label: str) -> None:
        """Keep the flags of this turn, reduced over the ranks and copied to the host, for the next one."""
        self._flags = _Flags(flags, copied, label)

    def _learn_from_look(self, misfits: np.ndarray) -> None:
        self._misfits |= misfits
        self._num_looks += 1
        best = int(self._misfits.sum(1).argmin())
        if self._is_worthless(self._misfits[best]):
            self._rest()
        elif self._num_looks == _LOOKS:
            self.narrow = TYPES[best]
            self._widen(self._misfits[best])

    def _widen(self, wide: np.ndarray) -> None:
        self._wide, self._wide_on_device = wide, None
        if self._is_worthless(wide):
            self._rest()

    def _is_worthless(self, wide: np.ndarray) -> bool:
        return 2 * int(np.count_nonzero(wide)) > len(wide)

    def _rest(self) -> None:
        self.narrow, self._misfits, self._num_looks = None, self._none(), 0
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)

    def _none(self) -> np.ndarray:
        return np.zeros((len(TYPES), self._num_owners * self._num_blocks), dtype=bool)

    # -- on the device ---------------------------------------------------------------------------------------------

    def look(self, flat: Tensor) -> Tensor:
        """Return flags, uint8, of blocks that are not shown to fit, for each type; ``flat`` is the partition's."""
        blocks = self._blocks(flat)
        shown = 2 * ((blocks != 0) & blocks.isfinite()).sum(-1) >= BLOCK
        flags = torch.stack([~((blocks.to(narrow) == blocks).all(-1) & shown) for narrow in TYPES])
        return flags.view(torch.uint8).flatten()

    def encode(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return messages to all owners, low bits of wide blocks for all owners, both int16, and flags, uint8."""
        assert self.narrow is not None
        blocks, bits = self._blocks(flat), self._blocks(flat.view(torch.int32))
        numbers = blocks.to(self.narrow)
        wide, is_wide = self._wide_blocks(flat.device)
        misfits = ((numbers != blocks) & (blocks == blocks)).any(-1)  # NaN stays NaN
        new = misfits & ~is_wide
        chosen = new.int().topk(self._spare, dim=-1).indices
        spare = torch.arange(self._num_owners, device=flat.device)[:, None], chosen
        message = flat.new_empty(sum(self.message_numels), dtype=torch.int16)
        rows = message[: self._num_owners * self._row].view(self._num_owners, self._row)
        high, low, places, rest = self._fields(rows)
        high.copy_(numbers.view(torch.int16))
        for where in (wide, spare):
            high[where] = (bits[where] >> 16).to(torch.int16)
        low.copy_(bits[spare])
        places.copy_(chosen)
        rest.copy_(self._ranges(flat)[:, self._num_blocks * BLOCK :])
        message[rows.numel() :].view(torch.float32).copy_(flat[self._share * self._num_owners :])
        lost = (new.sum(-1) > self._spare).any()
        flags = torch.cat([misfits.flatten(), lost.view(1)]).view(torch.uint8)
        return message, bits[wide].to(torch.int16).flatten(), flags

    def add(self, messages: Tensor, low_of_wide: Tensor, rank: int, own: Tensor) -> None:
        """Make ``own`` the sum of what all ranks sent to ``rank``, ``((g0 + g1) + g2) + ...``."""
        assert self.narrow is not None
        high, low, places, rest = self._fields(messages.view(self._num_owners, -1))
        values = own.new_empty(self._num_owners, own.numel())
        blocks = values[:, : self._num_blocks * BLOCK].unflatten(1, (self._num_blocks, BLOCK))
        blocks.copy_(high.view(self.narrow))
        values[:, self._num_blocks * BLOCK :] = rest
        bits = blocks.view(torch.int32)
        senders = torch.arange(self._num_owners, device=own.device)[:, None]
        first = sum(self.num_wide[:rank])
        wide = self._wide_blocks(own.device)[0][1][first : first + self.num_wide[rank]]
        low_of_wide = low_of_wide.view(self._num_owners, len(wide), BLOCK)
        for where, part in (((senders, places.long()), low), ((senders, wide[None]), low_of_wide)):
            bits[where] = (high[where].int() << 16) | (part.int() & LOW_BITS)
        own.copy_(values[0])
        for each in values[1:]:  # one pass over a range per rank, over the whole partition together
            own.add_(each)

    @property
    def message_numels(self) -> list[int]:
        """Lengths of the messages to all owners, in int16."""
        return [self._row] * (self._num_owners - 1) + [self._row + 2 * self._tail]

    @property
    def num_wide(self) -> list[int]:
        """Wide blocks of every owner's range."""
        return np.count_nonzero(self._wide.reshape(self._num_owners, -1), axis=1).tolist()

    @property
    def _row(self) -> int:
        return self._num_blocks * BLOCK + self._spare * (BLOCK + 2) + 2 * (self._share - self._num_blocks * BLOCK)

    def _fields(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return 16 bits, low bits and places of spare blocks, and the numbers behind, of messages, (ranks, length)."""
        lengths = [self._num_blocks * BLOCK, self._spare * BLOCK, 2 * self._spare]
        high, low, places, rest = rows.split([*lengths, rows.shape[1] - sum(lengths)], dim=1)
        high, low = high.unflatten(1, (-1, BLOCK)), low.unflatten(1, (-1, BLOCK))
        return high, low, places.view(torch.int32), rest.view(torch.float32)

    def _ranges(self, flat: Tensor) -> Tensor:
        return flat[: self._share * self._num_owners].view(self._num_owners, self._share)

    def _blocks(self, flat: Tensor) -> Tensor:
        """Return a view of the whole blocks, (owners, blocks, BLOCK)."""
        return self._ranges(flat)[:, : self._num_blocks * BLOCK].unflatten(1, (self._num_blocks, BLOCK))

    def _wide_blocks(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Return the owner and the place of every wide block, (wide,), by owner, and a mask, (owners, blocks).

        Lanes share them from turn to turn: a lane's turn begins after the training stream, which waits for all lanes.
        """
        if self._wide_on_device is None:
            mask = self._wide.reshape(self._num_owners, -1)
            tensors = [torch.from_numpy(each.copy()) for each in (*mask.nonzero(), mask)]
            if device.type == "cuda":  # from pinned memory, which the host need not wait for
                tensors = [each.pin_memory().to(device, non_blocking=True) for each in tensors]
            owners, places, is_wide = tensors
            self._wide_on_device = (owners, places), is_wide
        return self._wide_on_device
