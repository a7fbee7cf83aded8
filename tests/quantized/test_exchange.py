"""The exchange of one run of gradients, for many numbers of ranks and nodes, in one process.

Prevents: ranges that go to another owner, slices that change the result, and memory that changes while it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_hooks.comm import Nodes, Round, run_on_fabric
from ddp_hooks.quantized.exchange import Exchange
from tests.support.quantized.twins import CONFIG, Twin, noise


def in_turn(exchange: Exchange, slice_numel: int) -> Iterator[Round]:
    for start in exchange.slices(slice_numel):
        yield from start()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize(("world_size", "node_size"), [(2, 1), (3, 1), (7, 1), (4, 2), (6, 3), (9, 3), (12, 4)])
def test_equal_to_the_twin(world_size: int, node_size: int, bits: Any) -> None:
    config = replace(
        CONFIG, bits=bits, block_numel=64 if bits < 16 else None, node_size=node_size if node_size > 1 else None
    )
    codec = config.codec_for(torch.float32)
    assert codec is not None
    for numel in (5, 12_345):
        twin = Twin(config, [torch.zeros(numel)], world_size)
        residuals = [torch.zeros(numel) for _ in range(world_size)]
        for step, slice_numel in enumerate((1 << 31, 192)):
            flats = [noise(10 * step + rank, 0, residuals[rank]) for rank in range(world_size)]
            expected = twin.reduce([[flat.clone()] for flat in flats], [(0,)])[0]
            exchanges = [
                Exchange("weight", flat, residual, codec, Nodes(world_size, rank, node_size), step == 0, False)
                for rank, (flat, residual) in enumerate(zip(flats, residuals, strict=True))
            ]
            traffic = run_on_fabric([in_turn(each, slice_numel) for each in exchanges])  # type: ignore[misc]
            for rank, flat in enumerate(flats):
                assert torch.equal(flat, expected)
                assert torch.equal(residuals[rank], twin.residuals[rank][0])
            if node_size == 1 and numel > 5 and step == 0:
                share = bits / 32 + 0.03
                assert all(each.sent_bytes < share * 2 * 4 * numel for each in traffic)


def test_a_smaller_block_rounds_less() -> None:
    def error(block_numel: int) -> float:
        twin = Twin(replace(CONFIG, block_numel=block_numel), [torch.zeros(4096)], 2)
        values: list[list[Tensor]] = [[noise(rank, 0, torch.zeros(4096))] for rank in range(2)]
        mean = (values[0][0] + values[1][0]) / 2
        return float((twin.reduce(values, [(0,)])[0] - mean).norm())

    assert error(16) < 0.9 * error(256)
