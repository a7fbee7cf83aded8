"""The four language models of the EmbRace paper, as tables, blocks of dense layers, and ids of a batch.

Sizes are those of its Table 1 and gradients those of Table 3, in MiB: a table of 793,472 words and 512 numbers each has
the 1549.75 of half the LM's embeddings, 30,522 by 768 has BERT's 89.4. Ids are made so that a batch looks up as many
(original), as many different ones (coalesced), and shares as many with the next batches of all workers (prior) as
Table 3 says for the average worker.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

MIB = 1 << 20
FLOAT32_BYTES = 4
FLOPS_PER_S = 1e13  # what an accelerator like the paper's RTX 3090 makes of its float32 peak; a guess
BACKWARD_PER_FORWARD = 2.0
PADDING = 0
PADDING_SHARE = 0.5  # of ids that occur again, where sentences are padded; the paper does not say


@dataclass(frozen=True)
class TableSpec:
    """An embedding, and what a batch of one worker looks up in it.

    Args:
        num_ids: original.
        num_rows_used: coalesced.
        num_prior: of these, those that the next batch of some worker uses, too.
        before_block: the dense block in front of which its vectors are needed.
    """

    name: str
    num_rows: int
    dim: int
    num_ids: int
    num_rows_used: int
    num_prior: int
    before_block: int
    padded: bool


@dataclass(frozen=True)
class EmbraceWorkload:
    """A language model.

    Args:
        block_numels: numbers in each block of dense layers, in the order of the forward.
        compute_s: forward and backward of one step, without communication.
    """

    name: str
    tables: tuple[TableSpec, ...]
    block_numels: tuple[int, ...]
    compute_s: float

    @property
    def table_bytes(self) -> int:
        return sum(table.num_rows * table.dim * FLOAT32_BYTES for table in self.tables)

    @property
    def dense_bytes(self) -> int:
        return sum(self.block_numels) * FLOAT32_BYTES

    @property
    def tokens(self) -> int:
        """Of a worker's batch that are not padding."""
        first = self.tables[0]
        again = first.num_ids - first.num_rows_used
        return first.num_ids - (round(again * PADDING_SHARE) if first.padded else 0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> EmbraceWorkload:
        tables = tuple(TableSpec(**table) for table in data["tables"])
        return cls(data["name"], tables, tuple(data["block_numels"]), data["compute_s"])


@dataclass(frozen=True)
class _Source:
    num_rows: int
    dim: int
    names: tuple[str, ...]
    before_blocks: tuple[int, ...]
    original_mib: float  # Table 3, all tables together
    coalesced_mib: float
    prior_mib: float
    dense_mib: float  # Table 1, model less embedding
    num_blocks: int
    padded: bool
    slow: float  # default factor: at 1 Gbit/s and four workers computing takes about as long as communication


_SOURCES = {
    "lm": _Source(793_472, 512, ("words", "softmax"), (0, 2), 8.7, 6.9, 2.6, 87.0, 2, False, 45),
    "gnmt": _Source(32_320, 1024, ("encoder", "decoder"), (0, 8), 26.0, 12.2, 5.8, 486.6, 16, True, 25),
    "transformer": _Source(33_715, 1024, ("encoder", "decoder"), (0, 6), 35.2, 16.6, 8.9, 804.1, 12, True, 18),
    "bert": _Source(30_522, 768, ("words",), (0,), 36.0, 5.5, 3.2, 328.3, 12, True, 7),
    "tiny": _Source(600, 32, ("encoder", "decoder"), (0, 2), 0.06, 0.03, 0.015, 0.25, 4, True, 1000),
}
NAMES = tuple(_SOURCES)
PAPER_MODELS = ("lm", "gnmt", "transformer", "bert")


def load(name: str, scale: float = 1.0, slow: float | None = None) -> EmbraceWorkload:
    """The workload called ``name``.

    Args:
        name: of :data:`NAMES`.
        scale: factor on the width of tables and on dense blocks; what is looked up stays.
        slow: factor on computing time; None: the default. The time is also multiplied by ``scale``.
    """
    if name not in _SOURCES:
        raise ValueError(f"model must be one of {', '.join(NAMES)}, got {name!r}")
    source = _SOURCES[name]
    dim = max(1, round(source.dim * scale))
    count = len(source.names)
    row_bytes = source.dim * FLOAT32_BYTES * count

    def rows(mib: float) -> int:
        return round(mib * MIB / row_bytes)

    num_ids = rows(source.original_mib)
    tables = tuple(
        TableSpec(
            table,
            source.num_rows,
            dim,
            num_ids,
            rows(source.coalesced_mib),
            rows(source.prior_mib),
            before,
            source.padded,
        )
        for table, before in zip(source.names, source.before_blocks, strict=True)
    )
    dense_numel = source.dense_mib * MIB / FLOAT32_BYTES
    compute_s = 2 * (1 + BACKWARD_PER_FORWARD) * dense_numel * num_ids / FLOPS_PER_S
    block = round(dense_numel * scale / source.num_blocks)
    factor = scale * (slow if slow is not None else source.slow)
    return EmbraceWorkload(name, tables, (block,) * source.num_blocks, compute_s * factor)


def common_rows(table: TableSpec, world_size: int) -> int:
    """How many rows every batch of every worker has to have in common, for ``num_prior`` to be prior on average.

    The others are drawn anew each time, and some of them meet by chance.
    """
    low, high = 0, table.num_prior
    while low < high:
        middle = (low + high + 1) // 2
        rest = table.num_rows_used - middle
        by_chance = 1.0 - (1.0 - rest / (table.num_rows - middle)) ** world_size
        if middle + rest * by_chance <= table.num_prior:
            low = middle
        else:
            high = middle - 1
    return low


def make_ids(table: TableSpec, world_size: int, rank: int, step: int) -> Tensor:
    """(num_ids,), int64: what a worker looks up in a table in one step."""
    generator = np.random.default_rng([rank, step, table.before_block])
    common = common_rows(table, world_size)
    rest = table.num_rows_used - common
    shared = np.arange(common)
    others = common + generator.choice(table.num_rows - common, rest, replace=False)
    used = np.concatenate([shared, others])
    again = table.num_ids - len(used)
    num_padding = round(again * PADDING_SHARE) if table.padded else 0
    repeated = used[generator.integers(0, max(1, len(used)), again - num_padding)]
    ids = np.concatenate([used, repeated, np.full(num_padding, PADDING)])
    return torch.from_numpy(generator.permutation(ids))


def square_shapes(numel: int, largest: int = 1 << 20) -> list[tuple[int, ...]]:
    """A block's numbers as matrices that are about square, at most ``largest`` numbers each."""
    count = max(1, math.ceil(numel / largest))
    side = max(1, math.isqrt(numel // count))
    return [(max(1, numel // count // side), side)] * count
