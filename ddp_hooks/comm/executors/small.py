"""Exchange of a few numbers of every rank in one round, for norms and flags of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_hooks.comm.algorithms.collectives import pairwise_exchange
from ddp_hooks.comm.algorithms.exchange import Algorithm
from ddp_hooks.comm.failure import packed, refuse_different_calls, unpacked

_CALL_BYTES, _HEAD_BYTES, _INLINE_BYTES = 96, 120, 128  # a head: the call, and size and dtype of its value


class SmallExchange:
    """Exchange of every rank's value with the name of its call, so that ranks in different calls are noticed.

    Up to 128 bytes travel in one round, more in two.
    """

    def __init__(self, value: Tensor, call: str, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._value = value = value.contiguous()
        self._data = value.reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
        description = f"{value.numel()} of {str(value.dtype).removeprefix('torch.')}"
        self._heads = [torch.zeros(_HEAD_BYTES + _INLINE_BYTES, dtype=torch.uint8) for _ in range(world_size)]
        self._heads[rank][:_CALL_BYTES] = packed(call, _CALL_BYTES)
        self._heads[rank][_CALL_BYTES:_HEAD_BYTES] = packed(description, _HEAD_BYTES - _CALL_BYTES)
        if self._data.numel() <= _INLINE_BYTES:
            self._heads[rank][_HEAD_BYTES : _HEAD_BYTES + self._data.numel()] = self._data
        self._large: list[Tensor] | None = None

    def run(self) -> Algorithm:
        yield from pairwise_exchange([self._heads[self._rank]] * self._world_size, self._heads, self._rank)
        if self._data.numel() > _INLINE_BYTES and len(set(self._calls())) == 1:
            self._large = [torch.empty_like(self._data) for _ in self._heads]
            self._large[self._rank] = self._data
            yield from pairwise_exchange([self._data] * self._world_size, self._large, self._rank)

    def result(self, ranks: Sequence[int], largest: bool = False) -> Tensor:
        """Return the sum in the order of ranks, or the largest values: the same bits on every rank.

        Raises LaneError, which names the global ``ranks``, on all of them if they are in different calls.
        """
        refuse_different_calls(ranks, self._calls())
        nbytes = self._data.numel()
        found = self._large or [head[_HEAD_BYTES : _HEAD_BYTES + nbytes].clone() for head in self._heads]
        values = [each.view(self._value.dtype).view(self._value.shape) for each in found]
        result = values[0].clone()
        for value in values[1:]:
            result = torch.maximum(result, value) if largest else result.add_(value)
        return result

    def _calls(self) -> list[tuple[str, str]]:
        """Return every rank's call, and size and dtype of its value."""
        return [
            (unpacked(head[:_CALL_BYTES]), f" with {unpacked(head[_CALL_BYTES:_HEAD_BYTES])}") for head in self._heads
        ]
