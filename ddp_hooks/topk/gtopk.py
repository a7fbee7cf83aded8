"""gTopk: a tree that keeps the largest entries wherever two branches meet (shi2019gtopk; row 3 of SparDL's Table I).

A binomial tree, so any number of workers will do.
"""

from __future__ import annotations

from ddp_hooks.comm import Recv, Send, num_rounds, round_of
from ddp_hooks.topk.exchange import Exchange, Selector
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.sparse import add, split_largest
from ddp_hooks.topk.wire import Wire


def gtopk(ledger: Ledger, selector: Selector, k: int, rank: int, world_size: int, wire: Wire) -> Exchange:
    """An approximation of the ``k`` largest entries of the sum: reduced up the tree, and sent back down.

    What a branch discards stays with the worker where it was discarded.

    Args:
        ledger: of this worker's residual, to which the selector adds the gradient; closed in the end.
        selector: of the ledger's working vector, as one block.
        k: entries to keep.
        rank, world_size: of the group.
        wire: how entries travel.
    """
    numel = ledger.work.numel()
    held = ledger.take(selector.select(0), wire)
    message = wire.encode(held, numel, k)
    height = next((t for t in range(num_rounds(world_size)) if rank >> t & 1), num_rounds(world_size))

    for t in range(height):  # from those who are children of this one
        child = rank + (1 << t)
        if child < world_size:
            arriving = message.new_empty(message.numel())
            yield round_of(Recv(child, arriving))
            held, dropped = split_largest(add(held, wire.decode(arriving, numel, k)), k)
            ledger.discard(dropped)
            held = ledger.round(held, wire)
    if rank:
        parent = rank - (1 << height)
        yield round_of(Send(parent, wire.encode(held, numel, k)))
        message = message.new_empty(message.numel())
        yield round_of(Recv(parent, message))
    else:
        message = wire.encode(held, numel, k)
    for t in reversed(range(height)):
        child = rank + (1 << t)
        if child < world_size:
            yield round_of(Send(child, message))
    result = wire.decode(message, numel, k)
    ledger.close(result)
    return result
