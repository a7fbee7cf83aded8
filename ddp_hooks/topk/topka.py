"""TopkA: every worker's largest entries travel to all (renggli2019sparcml; row 1 of SparDL's Table I)."""

from __future__ import annotations

from ddp_hooks.comm import bruck_all_gather
from ddp_hooks.topk.exchange import Exchange, Selector
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.sparse import total
from ddp_hooks.topk.wire import Wire


def topka(ledger: Ledger, selector: Selector, k: int, rank: int, world_size: int, wire: Wire) -> Exchange:
    """The sum of all workers' ``k`` largest entries, up to ``P k`` of them; nothing is discarded on the way.

    Recursive doubling, which the paper's table counts, is Bruck's all-gather where P is a power of two: as many rounds
    and words.

    Args:
        ledger: of this worker's residual, to which the selector adds the gradient; closed in the end.
        selector: of the ledger's working vector, as one block.
        k: entries per worker.
        rank, world_size: of the group.
        wire: how entries travel.
    """
    numel = ledger.work.numel()
    message = wire.encode(ledger.take(selector.select(0), wire, in_result=True), numel, k)
    messages = yield from bruck_all_gather(message, [message.numel()] * world_size, range(world_size), rank)
    result = total([wire.decode(message, numel, k) for message in messages])
    ledger.close(result)
    return result
