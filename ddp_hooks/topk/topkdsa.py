"""TopkDSA: split, sum, and gather what there is, densely where it has become too much (renggli2019sparcml).

Row 2 of SparDL's Table I. Nothing is discarded on the way, so that messages grow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddp_hooks.comm import bruck_all_gather
from ddp_hooks.topk.blocks import even_bounds
from ddp_hooks.topk.direct import direct_reduce_scatter, gather_numbers
from ddp_hooks.topk.exchange import Exchange, Selector
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.sparse import SparseVector, concatenated
from ddp_hooks.topk.wire import Wire


def topkdsa(ledger: Ledger, selector: Selector, rank: int, world_size: int, wire: Wire) -> Exchange:
    """The sum of all workers' largest entries.

    Args:
        ledger: of this worker's residual, to which the selector adds the gradient; closed in the end.
        selector: of the ledger's working vector, as one block.
        rank, world_size: of the group.
        wire: how entries travel.
    """
    bounds = even_bounds(ledger.work.numel(), world_size)
    lengths = [bounds[r + 1] - bounds[r] for r in range(world_size)]
    region = yield from direct_reduce_scatter(ledger.take(selector.select(0), wire), bounds, rank, wire)
    region = ledger.round(region.shifted(bounds[rank]), wire).shifted(-bounds[rank])
    device = region.values.device
    counts = [numbers[0] for numbers in (yield from gather_numbers([len(region)], rank, world_size, device))]
    sizes = [_nbytes(length, count, wire) for length, count in zip(lengths, counts, strict=True)]
    message = _encode(region, lengths[rank], wire)
    messages = yield from bruck_all_gather(message, sizes, range(world_size), rank)
    parts = [_decode(*arguments, wire) for arguments in zip(messages, lengths, counts, strict=True)]
    result = concatenated([part.shifted(bounds[r]) for r, part in enumerate(parts)])
    ledger.close(result)
    return result


def _is_dense(numel: int, count: int, wire: Wire) -> bool:
    return count > 0 and wire.nbytes(numel, count) >= wire.dense_nbytes(numel)


def _nbytes(numel: int, count: int, wire: Wire) -> int:
    if not count:
        return 0
    return wire.dense_nbytes(numel) if _is_dense(numel, count, wire) else wire.nbytes(numel, count)


def _encode(vector: SparseVector, numel: int, wire: Wire) -> Tensor:
    if not len(vector):
        return vector.values.new_empty(0, dtype=torch.uint8)
    if not _is_dense(numel, len(vector), wire):
        return wire.encode(vector, numel, len(vector))
    dense = vector.values.new_zeros(numel)
    dense[vector.indices] = vector.values
    return wire.encode_dense(dense)


def _decode(message: Tensor, numel: int, count: int, wire: Wire) -> SparseVector:
    if not count:
        return SparseVector(message.new_empty(0, dtype=torch.int64), message.new_empty(0, dtype=wire.dtype))
    if not _is_dense(numel, count, wire):
        return wire.decode(message, numel, count)
    dense = wire.decode_dense(message)
    indices = torch.nonzero(dense).squeeze(1)
    return SparseVector(indices, dense[indices])
