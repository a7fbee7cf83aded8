"""Training loops for tables, and their comparison with whole tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ddp_hooks import TableConfig, TableStats
from ddp_hooks.comm import Work
from ddp_hooks.embedding.exchange.gradients import GradientExchange
from tests.support.embedding.twins import Batch, Loop, Side, Twins, batches

NUM_BATCHES = 12


def plain(side: Side, data: Iterator[Batch]) -> None:
    for batch in data:
        side.zero_grad()
        side.ddp(batch).backward()
        side.step()


def zero_after_forward(side: Side, data: Iterator[Batch]) -> None:
    for batch in data:
        loss = side.ddp(batch)
        side.zero_grad(set_to_none=False)
        loss.backward()
        side.step()


def accumulate(side: Side, data: Iterator[Batch]) -> None:
    """Every second step has one backward, so that its rows are still delayed when others look ahead."""
    side.zero_grad()
    for number, batch in enumerate(data):
        if number % 4 in (1, 2):
            with side.ddp.no_sync():
                side.ddp(batch).backward()
            continue
        side.ddp(batch).backward()
        side.step()
        side.zero_grad()


def accumulate_with_sync(side: Side, data: Iterator[Batch]) -> None:
    """Two synchronised backwards per step: their sums add up."""
    side.zero_grad()
    for number, batch in enumerate(data):
        side.ddp(batch).backward()
        if number % 2:
            side.step()
            side.zero_grad()


def look_before_the_step(side: Side, data: Iterator[Batch]) -> None:
    """A forward without a backward, so that the next batch is another one than when gradients were sent."""
    for batch in data:
        side.zero_grad()
        side.ddp(batch).backward()
        following = next(data, None)
        if following is not None:
            side.ddp(following)
        side.step()


def sum_losses(side: Side, data: Iterator[Batch]) -> None:
    """Both forwards before one backward."""
    for batch in data:
        side.zero_grad()
        with side.ddp.no_sync():
            first = side.ddp.module(batch)
        (first + side.ddp(batch)).backward()
        side.step()


def skip_steps(side: Side, data: Iterator[Batch]) -> None:
    for number, batch in enumerate(data):
        side.zero_grad()
        side.ddp(batch).backward()
        if number % 3 != 1:
            side.step()


def evaluate_between(side: Side, data: Iterator[Batch]) -> None:
    for number, batch in enumerate(data):
        side.zero_grad()
        side.ddp(batch).backward()
        side.step()
        if number % 4 == 1:
            side.ddp.eval()
            with torch.no_grad():
                side.ddp.module(batch)
            side.ddp.train()


def leave_early(side: Side, data: Iterator[Batch]) -> None:
    """Skips a batch on all ranks."""
    for number, batch in enumerate(data):
        if number == 5:
            continue
        side.zero_grad()
        side.ddp(batch).backward()
        side.step()


def zero_the_model(side: Side, data: Iterator[Batch]) -> None:
    """As the Hugging Face Trainer does, through DDP or the model; and gradients are dropped after some backwards."""
    for number, batch in enumerate(data):
        loss = side.ddp(batch)
        (side.ddp if number % 2 else side.ddp.module).zero_grad(set_to_none=number % 4 < 2)
        loss.backward()
        if number % 3 != 1:
            side.step()


def zero_by_hand(side: Side, data: Iterator[Batch]) -> None:
    for number, batch in enumerate(data):
        for parameter in side.ddp.parameters():
            parameter.grad = None
        if number % 3 == 1:
            with side.ddp.no_sync():
                side.ddp(batch).backward()
            continue
        side.ddp(batch).backward()
        if number % 3 != 2:
            side.step()


def schedule(side: Side, data: Iterator[Batch]) -> None:
    optimizers = [*side.optimizers, *([side.tables.optimizer] if side.tables is not None else [])]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in optimizers]
    for batch in data:
        side.zero_grad()
        side.ddp(batch).backward()
        side.step()
        for scheduler in schedulers:
            scheduler.step()


LOOPS: dict[str, Loop] = {
    function.__name__: function
    for function in (
        plain,
        zero_after_forward,
        accumulate,
        accumulate_with_sync,
        look_before_the_step,
        sum_losses,
        skip_steps,
        evaluate_between,
        leave_early,
        zero_the_model,
        zero_by_hand,
        schedule,
    )
}


def run(
    rank: int, world_size: int, loop: str, optimizer: str, prefetch: bool, config: TableConfig
) -> tuple[float, float, TableStats, int]:
    twins = Twins.of(world_size, optimizer, config)
    assert twins.ours.tables is not None
    delayed = 0

    def counting(side: Side, data: Iterator[Batch]) -> None:
        nonlocal delayed
        if side.tables is None:
            LOOPS[loop](side, data)
            return
        send = side.tables._step._send_delayed

        def send_delayed(exchanges: Sequence[GradientExchange], after: Sequence[Work]) -> Work:
            nonlocal delayed
            delayed += sum(exchange.num_delayed for exchange in exchanges)
            return send(exchanges, after)

        side.tables._step._send_delayed = send_delayed  # type: ignore[method-assign]
        LOOPS[loop](side, data)

    twins.train(counting, batches(rank, world_size, NUM_BATCHES), prefetch)
    result = twins.gap(), twins.optimizer_gap(), twins.ours.tables.stats(), delayed
    twins.ours.tables.close()
    return result
