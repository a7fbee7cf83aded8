"""What a worker holds, what it has given away and what it has discarded: residual collection.

The working vector is the residual of the step before plus the new gradient, which whoever selects from it adds first.
It becomes the residual of the next step, in the same memory. What arrives from others and what is sent is noted, and
changes the vector only in the end, when the result tells which entries the chosen rule gives other values. Nothing here
is as long as the vector.

The rules (zhao2024spardl, section III-C and Algorithm 1, as corrected: line 9 stores what it discards, too). With I the
indices of the result:

* ``global``: outside of I everything is as it was before the exchange, with the worker that made it; inside of I a
  worker keeps what it has itself discarded, of its own and of what others had sent to it. Nothing is ever lost.
* ``partial`` (the paper's PRES): inside of I a worker keeps its own value, unless it has sent it. What others had sent
  to it is lost where it was discarded.
* ``local`` (LRES): a worker keeps what it has not sent; what it has sent is lost where others discarded it.

Of what is sent, whatever rounding takes from it is kept under every rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.topk.primitives import are_in
from ddp_hooks.topk.sparse import SparseVector
from ddp_hooks.topk.wire import Wire

Collection: TypeAlias = Literal["global", "partial", "local"]


class Ledger:
    """One exchange's account of one working vector.

    Args:
        work: (n,), the residual; the gradient is added to all of it before :meth:`close`, when it becomes the next one.
        collection: the rule.
    """

    def __init__(self, work: Tensor, collection: Collection = "global") -> None:
        self.work = work
        self._collection = collection
        self._received: list[SparseVector] = []  # in the order in which it was added
        self._taken: list[SparseVector] = []  # what rounding has left of them
        self._delivered: list[SparseVector] = []  # the same, where the result is known to have all of them
        self._discarded: list[SparseVector] = []  # what was discarded when it had been taken

    def receive(self, vector: SparseVector) -> None:
        """Another worker has sent this; none of it has been taken before.

        Entries that either are going to be taken or will not be in the result may be left out.
        """
        if self._collection == "global":
            self._received.append(vector)

    def take(self, vector: SparseVector, wire: Wire, in_result: bool = False) -> SparseVector:
        """These entries of the working vector, with what was received, are sent: as they will arrive.

        Args:
            vector: the entries.
            wire: how they travel.
            in_result: whether it is certain that the result has all of them.
        """
        arriving, lost = wire.round(vector.values)
        left = SparseVector(vector.indices, torch.zeros_like(arriving) if lost is None else lost)
        (self._delivered if in_result else self._taken).append(left)
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

    def close(self, result: SparseVector) -> None:
        """Turn the working vector into the residual.

        Args:
            result: the same on every rank.

        Raises:
            RuntimeError: on every rank, if sums have become infinite; the working vector is as it was, so every rank
                has its own gradients in it.
        """
        if len(result) and not math.isfinite(result.values.abs().max()):
            raise RuntimeError(
                "gradients are finite on every rank, and their sum over the ranks is not, or not in bfloat16: they are "
                "of the order of 1e38. Lower the learning rate, or clip gradients before they become so large"
                f"{see('gradients-are-not-finite')}"
            )
        if self._collection == "global":
            self._collect(result.indices)
        elif self._collection == "partial":
            self._replace([*self._inside(self._taken, result.indices), *self._delivered])
        else:
            self._replace([*self._taken, *self._delivered])

    def settle(self, is_finite: bool) -> None:
        """Turn the working vector into the residual where nobody learns the whole result: who leaves out keeps.

        Args:
            is_finite: whether all that was taken is. Otherwise others have it now, and nothing like it stays.
        """
        self._add(self._received)
        self._replace(self._taken)
        if not is_finite:
            self.work.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _collect(self, result: Tensor) -> None:
        inside = self._inside([*self._received, *self._taken, *self._discarded], result)
        num_received, num_kept = len(self._received), len(self._received) + len(self._taken)
        self._add(inside[:num_received])
        self._replace([*inside[num_received:num_kept], *self._delivered])  # with what was received for these
        self._add(inside[num_kept:])

    @staticmethod
    def _inside(vectors: Sequence[SparseVector], result: Tensor) -> list[SparseVector]:
        masks = are_in([vector.indices for vector in vectors], result)
        return [vector.at(mask) for vector, mask in zip(vectors, masks, strict=True)]

    def _add(self, vectors: Sequence[SparseVector]) -> None:
        for vector in vectors:
            self.work.index_add_(0, vector.indices, vector.values)

    def _replace(self, vectors: Sequence[SparseVector]) -> None:
        for vector in vectors:
            self.work.index_copy_(0, vector.indices, vector.values)
