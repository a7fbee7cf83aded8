"""Ranges of a tensor as rectangles, and a tensor that is spread over the ranks: every element once, or an error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddp_hooks.dear.layout.placement import EvenSplit, ParameterRange
from ddp_hooks.dear.update.spread_tensor import SpreadTensor, blocks_of

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@given(SHAPES, st.data())
def test_blocks_are_the_range_in_its_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    values = torch.arange(numel).view(shape)
    blocks = list(blocks_of(shape, start, end))
    assert [v for block in blocks for v in _cut(values, block).flatten().tolist()] == list(range(start, end))
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


@given(SHAPES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_blocks_of_all_ranks_are_the_whole(shape: list[int], world_size: int, random: Any) -> None:
    order = random.sample(range(len(shape)), len(shape))  # of dimensions in memory, as with channels_last
    flat = torch.arange(math.prod(shape))
    whole = flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    seen = torch.full_like(whole, -1)
    for rank in range(world_size):
        spread = _spread(whole, flat, EvenSplit((flat.numel(),), world_size), rank)
        chunks = spread.__create_chunk_list__()
        for chunk, (block, values) in zip(chunks, spread._blocks(), strict=True):
            assert (tuple(chunk.offsets), tuple(chunk.sizes)) == block
            part = _cut(seen, block)
            assert bool((part == -1).all())
            part.copy_(values)
    assert torch.equal(seen, whole)


def _cut(values: Tensor, block: Any) -> Tensor:
    return values[tuple(slice(o, o + size) for o, size in zip(block.offsets, block.sizes, strict=True))]


def _spread(like: Tensor, flat: Tensor, placement: EvenSplit, rank: int) -> SpreadTensor:
    parts = {elements: flat[elements.start : elements.end] for elements in placement.ranges(rank)}
    return SpreadTensor(like, flat.dtype, flat.device, parts, placement, "exp_avg of weight")


def spread_tensor() -> SpreadTensor:
    return _spread(torch.zeros(4, 3), torch.arange(12.0), EvenSplit((12,), 2), 1)


@pytest.mark.parametrize("use", [
    torch.norm, torch.zeros_like, Tensor.zero_, lambda t: t + 1, lambda t: t[0], lambda t: torch.stack([t]),
    lambda t: t.numpy(), lambda t: t.tolist(), numpy.asarray,
    lambda t: torch._foreach_add([t], 1), lambda t: torch.zeros(4, 3).copy_(t), lambda t: torch.save(t, "/dev/null"),
])  # fmt: skip
def test_values_of_the_whole_are_refused(use: Callable[[Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, TypeError), match=r"state\.full_optimizer_state_dict\(\)"):
        use(spread_tensor())


def test_copies_have_memory_of_their_own() -> None:
    spread = spread_tensor()
    assert (spread.shape, spread.stride(), spread.dtype) == (torch.Size([4, 3]), (3, 1), torch.float32)
    with torch.no_grad():
        copies = [copy.deepcopy(spread), spread.clone(), spread.detach().clone(), spread.to("cpu", copy=True)]
        empty = spread.new_empty(spread.size())
        copies.append(empty.copy_(spread))
    for copied in copies:
        assert isinstance(copied, SpreadTensor)
        elements, part = next(iter(copied.parts.items()))
        assert elements == ParameterRange(0, 6, 12) and torch.equal(part, torch.arange(6.0, 12.0))
        assert part.data_ptr() != spread.local_shards()[0].data_ptr()
