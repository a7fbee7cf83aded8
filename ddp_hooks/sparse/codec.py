"""Wire formats of the kept entries of a block: as many bytes as both sides know beforehand.

========= ============================================= ================= ==============================
format    index                                         value             bytes
========= ============================================= ================= ==============================
exact     4 bytes                                       as it is          8 per float32 entry
compact   2 bytes within runs of 65,536 elements        bfloat16          4 per entry and 4 per run
========= ============================================= ================= ==============================

:meth:`EntryCodec.round` returns the rounding error, for the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddp_hooks.sparse.sparse_vector import SparseVector, empty_like

Format = Literal["exact", "compact"]
_RUN = 1 << 16


@dataclass(frozen=True)
class EntryCodec:
    """A wire format, and the type of the decoded values."""

    format: Format
    dtype: torch.dtype
    may_be_dense: bool = False  # send all elements of a block, without indices, where that is not longer

    def nbytes(self, numel: int, capacity: int) -> int:
        """Return the length of a message for up to ``capacity`` entries of a block; 0 for no entries."""
        if self._is_dense(numel, capacity):
            return numel * self._wire.itemsize
        return self._entries_nbytes(numel, capacity)

    def round(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the values as they will arrive, and the rounding error; None if there is none."""
        if self._wire == self.dtype:
            return values, None
        arriving = values.to(self._wire).to(self.dtype)
        return arriving, values - arriving

    def encode(self, vector: SparseVector, numel: int, capacity: int) -> Tensor:
        """Return a message, (:meth:`nbytes`,) uint8, with at most ``capacity`` entries of a block.

        Indices of ``vector`` count in the block; its values are those that :meth:`round` has returned.
        """
        if not capacity:
            return vector.values.new_empty(0, dtype=torch.uint8)
        if self._is_dense(numel, capacity):
            dense = vector.values.new_zeros(numel).index_copy_(0, vector.indices, vector.values)
            return _bytes_of(dense.to(self._wire))
        missing = capacity - len(vector)
        values = _bytes_of(pad(vector.values.to(self._wire), (0, missing)))
        if self.format == "exact":
            return torch.cat([values, _bytes_of(pad(vector.indices.to(torch.int32), (0, missing), value=numel))])
        edges = torch.arange(_num_runs(numel) + 1, device=vector.indices.device) * _RUN
        counts = torch.searchsorted(vector.indices, edges, out_int32=True).diff()
        places = pad(vector.indices.to(torch.uint16), (0, missing))  # modulo 65,536
        return torch.cat([_bytes_of(counts), _bytes_of(places), values])

    def decode(self, message: Tensor, numel: int, capacity: int) -> SparseVector:
        """Return the entries of a message that :meth:`encode` has made; of a dense one without zeros."""
        if not capacity:
            return empty_like(message.new_empty(0, dtype=self.dtype))
        if self._is_dense(numel, capacity):
            dense = _as(message, self._wire).to(self.dtype)
            indices = torch.nonzero(dense).squeeze(1)
            return SparseVector(indices, dense[indices])
        if self.format == "exact":
            values, indices = message.split([self.dtype.itemsize * capacity, 4 * capacity])
            indices = _as(indices, torch.int32).long()
            num_entries = int((indices < numel).sum())
            return SparseVector(indices[:num_entries], _as(values, self.dtype)[:num_entries])
        num_runs = _num_runs(numel)
        counts, places, values = message.split([4 * num_runs, 2 * capacity, 2 * capacity])
        starts = torch.arange(num_runs, device=message.device) * _RUN
        indices = torch.repeat_interleave(starts, _as(counts, torch.int32))
        num_entries = indices.numel()
        indices += _as(places, torch.uint16)[:num_entries].long()
        return SparseVector(indices, _as(values, self._wire)[:num_entries].to(self.dtype))

    @property
    def _wire(self) -> torch.dtype:
        return self.dtype if self.format == "exact" else torch.bfloat16

    def _entries_nbytes(self, numel: int, capacity: int) -> int:
        if self.format == "exact" or not capacity:
            return capacity * (4 + self.dtype.itemsize)
        return 4 * _num_runs(numel) + 4 * capacity

    def _is_dense(self, numel: int, capacity: int) -> bool:
        return self.may_be_dense and 0 < numel * self._wire.itemsize <= self._entries_nbytes(numel, capacity)


def _num_runs(numel: int) -> int:
    return -(-numel // _RUN)


def _bytes_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _as(message: Tensor, dtype: torch.dtype) -> Tensor:
    return message.clone().view(dtype)  # a copy, because a part of a message may begin at any byte
