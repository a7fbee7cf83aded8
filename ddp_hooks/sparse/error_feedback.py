"""Error feedback of one exchange: which entries become the residual of the next step (residual collection).

The working vector is the residual of the last step plus the new gradient, and becomes the next residual in the same
memory. Received and sent entries are noted; the vector changes only at the end, when the result is known. Nothing here
is as long as the vector. Rules (zhao2024spardl, section III-C and Algorithm 1; line 9 stores its discards, too):

* ``global``: entries outside of the result keep the value from before the exchange; inside, a worker keeps the entries
  that it has discarded, its own and received ones. Nothing is ever lost.
* ``partial`` (the paper's PRES): inside of the result a worker keeps its own value, unless it has sent it. Received
  entries that it discards are lost.
* ``local`` (LRES): a worker keeps all values that it has not sent. Sent entries that others discard are lost.

Every rule keeps the rounding errors of sent entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.primitives import are_in
from ddp_hooks.sparse.sparse_vector import SparseVector

Collection: TypeAlias = Literal["global", "partial", "local"]


class ErrorFeedback:
    """Account of one exchange of one working vector, (n,).

    ``work`` is the residual. The gradient is added to all of it before :meth:`close`, which turns it into the next one.
    """

    def __init__(self, work: Tensor, collection: Collection = "global") -> None:
        self.work = work
        self._collection = collection
        self._received: list[SparseVector] = []  # in the order in which it was added
        self._sent: list[SparseVector] = []  # rounding errors of sent entries
        self._delivered: list[SparseVector] = []  # the same, of entries that the result certainly has
        self._discarded: list[SparseVector] = []  # entries that were discarded after they had been sent

    def receive(self, vector: SparseVector) -> None:
        """Note entries from another worker, before any of them is taken.

        Entries that will be taken, or will not be in the result, may be left out.
        """
        if self._collection == "global":
            self._received.append(vector)

    def take(self, vector: SparseVector, codec: EntryCodec, in_result: bool = False) -> SparseVector:
        """Note entries of the working vector, with everything received, that are sent; return them as they arrive.

        ``in_result``: the result certainly has all of them.
        """
        arriving, lost = codec.round(vector.values)
        left = SparseVector(vector.indices, torch.zeros_like(arriving) if lost is None else lost)
        (self._delivered if in_result else self._sent).append(left)
        return SparseVector(vector.indices, arriving)

    def round(self, vector: SparseVector, codec: EntryCodec) -> SparseVector:
        """Return taken entries as they arrive; their rounding errors are discarded."""
        arriving, lost = codec.round(vector.values)
        if lost is not None:
            self.discard(SparseVector(vector.indices, lost))
        return SparseVector(vector.indices, arriving)

    def discard(self, vector: SparseVector) -> None:
        """Note entries that do not reach the result: taken before, or never part of the working vector."""
        if len(vector):
            self._discarded.append(vector)

    def close(self, result: SparseVector) -> None:
        """Turn the working vector into the residual; ``result`` is the same on every rank.

        Raises:
            RuntimeError: on every rank, if sums are infinite or NaN. The working vector does not change, so every rank
                has its own gradients in it.
        """
        refuse_nonfinite(result)
        if self._collection == "global":
            self._collect(result.indices)
        elif self._collection == "partial":
            self._replace([*_inside(self._sent, result.indices), *self._delivered])
        else:
            self._replace([*self._sent, *self._delivered])

    def close_without_result(self, is_finite: bool) -> None:
        """Turn the working vector into the residual where no worker learns the whole result: who discards keeps.

        If an infinite or NaN entry was taken, not ``is_finite``, no such value stays.
        """
        self._add(self._received)
        self._replace(self._sent)
        if not is_finite:
            self.work.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _collect(self, result: Tensor) -> None:
        inside = _inside([*self._received, *self._sent, *self._discarded], result)
        num_received, num_kept = len(self._received), len(self._received) + len(self._sent)
        self._add(inside[:num_received])
        self._replace([*inside[num_received:num_kept], *self._delivered])  # also replaces received values
        self._add(inside[num_kept:])

    def _add(self, vectors: Sequence[SparseVector]) -> None:
        for vector in vectors:
            self.work.index_add_(0, vector.indices, vector.values)

    def _replace(self, vectors: Sequence[SparseVector]) -> None:
        for vector in vectors:
            self.work.index_copy_(0, vector.indices, vector.values)


def refuse_nonfinite(result: SparseVector) -> None:
    """Raise RuntimeError if sums, the same on every rank, are infinite or NaN."""
    if len(result) and not math.isfinite(result.values.abs().max()):
        raise RuntimeError(
            "gradients are finite on every rank, and their sum over the ranks is not, or not in bfloat16: they are of "
            "the order of 1e38. Lower the learning rate, or clip gradients before they become so large"
            f"{see('gradients-are-not-finite')}"
        )


def _inside(vectors: Sequence[SparseVector], result: Tensor) -> list[SparseVector]:
    masks = are_in([vector.indices for vector in vectors], result)
    return [vector.at(mask) for vector, mask in zip(vectors, masks, strict=True)]
