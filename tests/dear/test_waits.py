"""One rank alone makes a collective call: it is told so by name, after the state's own time, and so are the others."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, LaneError, dear_hook
from tests.support.messages import logged, message_of
from tests.support.workers import WorkerPools

CONFIG = DearConfig(timeout_s=2.5, stall_warning_s=0.4, lanes=1, slice_mb=1)


def alone(rank: int, world_size: int) -> tuple[dict[str, str], list[str]]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
    messages = {}

    def make() -> None:
        DearState(ddp, optimizer, CONFIG)

    with logged() as lines:
        messages["made"] = message_of(make) if rank == 0 else ""
        dist.barrier()
        messages["made"] = messages["made"] or message_of(make)
        state = DearState(ddp, optimizer, CONFIG)  # nothing has been changed
        ddp.register_comm_hook(state, dear_hook)
        for _ in range(2):
            ddp(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        messages["saved"] = message_of(state.consolidate) if rank == 0 else ""
        dist.barrier()
        messages["saved"] = messages["saved"] or message_of(state.consolidate)
        state.consolidate()  # and training goes on
        messages["clipped"] = "no error"
        try:
            for _ in range(2):
                ddp(torch.ones(1, 4)).sum().backward()
                if rank == 0:
                    state.clip_grad_norm_(1.0)
                optimizer.step()
        except LaneError as error:
            messages["clipped"] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return messages, lines


def test_one_rank_alone_is_told_so(workers: WorkerPools) -> None:
    pool = workers(2)
    results = pool.run(alone)
    pool.end()
    question = "rank 1 has not called it: is it under `if rank == 0`?"
    for messages, _ in results:
        for key, call in {"made": "the set-up of DearState", "saved": "consolidate()"}.items():
            assert messages[key].startswith("LaneTimeout: ") and f"rank 0 waits in {call}; {question}" in messages[key]
        # Rank 1 waits for parameters that rank 0 does not send; each learns of the other's wait.
        assert "clip_grad_norm_()" in messages["clipped"] and "all-gather" in messages["clipped"], messages
    assert any(messages["clipped"].startswith("LaneTimeout: ") for messages, _ in results), "nobody else has failed"
    warning = re.compile(rf"waited [01] s: rank 0 waits in consolidate\(\); {re.escape(question)}")
    assert any(warning.search(line) for line in results[0][1])
