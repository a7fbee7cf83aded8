"""Batches of one rank, epoch after epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeVar

from torch.utils.data import DataLoader, Dataset, DistributedSampler

ItemT = TypeVar("ItemT")


def endless_batches(dataset: Dataset[ItemT], batch_size: int) -> Iterator[ItemT]:
    """Yield this rank's batches, shuffled alike in every run."""
    sampler: DistributedSampler[ItemT] = DistributedSampler(dataset, shuffle=True, drop_last=True)
    return endless(DataLoader(dataset, batch_size, sampler=sampler, drop_last=True))


def endless(loader: DataLoader[ItemT]) -> Iterator[ItemT]:
    """Yield a loader's batches without end, in another order in every epoch."""
    assert isinstance(loader.sampler, DistributedSampler)
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader
