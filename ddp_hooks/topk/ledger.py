"""What a worker holds, what it has given away and what it has discarded: residual collection.

The working vector is the residual of the step before plus the new gradient, and becomes the residual of the next step,
in the same memory. What arrives from others is added to it and what is sent is taken out of it; both are noted, so that
in the end every entry can be given the value that the chosen rule asks for. Nothing here is as long as the vector.

The rules (zhao2024spardl, section III-C and Algorithm 1, as corrected: line 9 stores what it discards, too). With I the
indices of the result:

* ``global``: outside of I everything is as it was before the exchange, with the worker that made it; inside of I a
  worker keeps what it has itself discarded, of its own and of what others had sent to it. Nothing is ever lost.
* ``partial`` (the paper's PRES): inside of I a worker keeps its own value, unless it has sent it. What others had sent
  to it is lost where it was discarded.
* ``local`` (LRES): a worker keeps what it has not sent; what it has sent is lost where others discarded it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.topk.primitives import is_in
from ddp_hooks.topk.sparse import SparseVector
from ddp_hooks.topk.wire import Wire

Collection: TypeAlias = Literal["global", "partial", "local"]


class Ledger:
    """One exchange's account of one working vector.

    Args:
        work: (n,), residual plus gradient; becomes the next residual.
        collection: the rule.
    """

    def __init__(self, work: Tensor, collection: Collection = "global") -> None:
        self.work = work
        self._collection = collection
        self._before: list[SparseVector] = []  # entries before something was added to them, oldest first
        self._taken: list[SparseVector] = []  # what rounding has left of them
        self._discarded: list[SparseVector] = []  # what was discarded when it had left the working vector

    def receive(self, vector: SparseVector) -> None:
        """Add what another worker has sent to the working vector; none of it has been taken before."""
        before = self.work.index_select(0, vector.indices)
        self._before.append(SparseVector(vector.indices, before))
        self.work.index_copy_(0, vector.indices, before + vector.values)

    def take(self, vector: SparseVector, wire: Wire) -> SparseVector:
        """Take these entries out of the working vector, as they will arrive; what rounding takes stays.

        Not before :meth:`close` do they go: most of what is taken comes back then, and nobody looks there meanwhile.
        """
        arriving, lost = wire.round(vector.values)
        self._taken.append(SparseVector(vector.indices, torch.zeros_like(arriving) if lost is None else lost))
        return SparseVector(vector.indices, arriving)

    def round(self, vector: SparseVector, wire: Wire) -> SparseVector:
        """Entries that had been taken, as they will arrive; what rounding takes from them is discarded."""
        arriving, lost = wire.round(vector.values)
        if lost is not None:
            self.discard(SparseVector(vector.indices, lost))
        return SparseVector(vector.indices, arriving)

    def discard(self, vector: SparseVector) -> None:
        """Entries that had been taken, or have never been in the working vector, do not reach the result."""
        if len(vector):
            self._discarded.append(vector)

    def close(self, result: Tensor) -> None:
        """Turn the working vector into the residual.

        Args:
            result: (m,), ascending: the indices of the result, on every rank.
        """
        work = self.work
        if self._collection == "global":
            for vector in reversed(self._before):  # the oldest value last
                outside = vector.at(~is_in(vector.indices, result))
                work.index_copy_(0, outside.indices, outside.values)
            for vector in self._taken:
                inside = vector.at(is_in(vector.indices, result))
                work.index_copy_(0, inside.indices, inside.values)
            for vector in self._discarded:
                inside = vector.at(is_in(vector.indices, result))
                work.index_add_(0, inside.indices, inside.values)
            return
        for vector in reversed(self._before):
            work.index_copy_(0, vector.indices, vector.values)
        for vector in self._taken:
            gone = vector.indices
            if self._collection == "partial":
                gone = gone[is_in(gone, result)]
            work.index_fill_(0, gone, 0.0)
