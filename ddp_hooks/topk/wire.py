"""How the kept entries of a block travel: as bytes whose number both sides know beforehand.

``exact``: four bytes of index and the value as it is, eight bytes per float32 entry. ``compact``: two bytes of index
within runs of 65,536 elements, the number of entries of each run, and the value in bfloat16: four bytes per entry and
four per run. What rounding takes from a value is not lost: :meth:`Wire.round` returns it, for the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ddp_hooks.topk.sparse import SparseVector

Format = Literal["exact", "compact"]
_RUN = 1 << 16


@dataclass(frozen=True)
class Wire:
    """A wire format.

    Args:
        format: see the module.
        dtype: of the values that come out.
    """

    format: Format
    dtype: torch.dtype

    def nbytes(self, numel: int, capacity: int) -> int:
        """Length of a message for up to ``capacity`` entries of a block of ``numel`` elements."""
        if self.format == "exact":
            return capacity * (4 + self.dtype.itemsize)
        return 4 * _num_runs(numel) + 4 * capacity

    def round(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """The values as they will arrive, and what that takes from them; None if nothing."""
        if self.format == "exact":
            return values, None
        arriving = values.to(torch.bfloat16).to(self.dtype)
        return arriving, values - arriving

    def encode(self, vector: SparseVector, numel: int, capacity: int) -> Tensor:
        """A message, uint8, with the entries of a block.

        Args:
            vector: indices within the block; values as :meth:`round` has them; no more entries than ``capacity``.
            numel: elements of the block.
            capacity: entries that the message has room for.
        """
        missing = capacity - len(vector)
        if self.format == "exact":
            indices = torch.nn.functional.pad(vector.indices.to(torch.int32), (0, missing), value=numel)
            values = torch.nn.functional.pad(vector.values, (0, missing))
            return torch.cat([_bytes_of(values), _bytes_of(indices)])
        edges = torch.arange(_num_runs(numel) + 1, device=vector.indices.device) * _RUN
        counts = torch.searchsorted(vector.indices, edges, out_int32=True).diff()
        places = torch.nn.functional.pad(vector.indices.to(torch.uint16), (0, missing))  # modulo 65,536
        values = torch.nn.functional.pad(vector.values.to(torch.bfloat16), (0, missing))
        return torch.cat([_bytes_of(counts), _bytes_of(places), _bytes_of(values)])

    def decode(self, message: Tensor, numel: int, capacity: int) -> SparseVector:
        """The reverse of :meth:`encode`."""
        if self.format == "exact":
            size = self.dtype.itemsize * capacity
            values, indices = _as(message[:size], self.dtype), _as(message[size:], torch.int32).long()
            num_entries = int((indices < numel).sum())
            return SparseVector(indices[:num_entries], values[:num_entries])
        num_runs = _num_runs(numel)
        counts, places, values = message.split([4 * num_runs, 2 * capacity, 2 * capacity])
        starts = torch.arange(num_runs, device=message.device) * _RUN
        indices = torch.repeat_interleave(starts, _as(counts, torch.int32))
        num_entries = indices.numel()
        indices += _as(places, torch.uint16)[:num_entries].long()
        return SparseVector(indices, _as(values, torch.bfloat16)[:num_entries].to(self.dtype))

    def dense_nbytes(self, numel: int) -> int:
        """Length of a message with all elements of a block."""
        return numel * (self.dtype.itemsize if self.format == "exact" else 2)

    def encode_dense(self, values: Tensor) -> Tensor:
        """All elements of a block, as :meth:`round` has them."""
        return _bytes_of(values if self.format == "exact" else values.to(torch.bfloat16))

    def decode_dense(self, message: Tensor) -> Tensor:
        """The reverse of :meth:`encode_dense`."""
        return _as(message, self.dtype if self.format == "exact" else torch.bfloat16).to(self.dtype)


def _num_runs(numel: int) -> int:
    return -(-numel // _RUN)


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _as(message: Tensor, dtype: torch.dtype) -> Tensor:
    return message.clone().view(dtype)  # a copy, because a part of a message may begin at any byte
