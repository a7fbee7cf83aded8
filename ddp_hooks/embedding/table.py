"""Embedding table whose columns are split over the ranks (EmbRace, section 4.1.1)."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_hooks.comm import Algorithm, Recv, Round, Send, pairwise_exchange, round_of, see

_CHUNK_BYTES = 32 << 20  # of whole rows in one round, which bounds the memory of messages


@dataclass
class Selected:
    """Weight that becomes a table."""

    places: list[tuple[str, nn.Embedding]]  # paths and modules that have it, in the order of the model
    others: list[tuple[str, nn.Module, str]]  # path, module and attribute of other layers that share it

    @property
    def name(self) -> str:
        return self.places[0][0]

    @property
    def module(self) -> nn.Embedding:
        return self.places[0][1]


@dataclass
class Table:
    index: int  # among the tables
    name: str  # path of the nn.Embedding in the model; the first path if several modules share the weight
    aliases: tuple[str, ...]  # the other paths
    num_rows: int
    dim: int  # columns of the whole table
    bounds: tuple[int, ...]  # rank r owns columns [bounds[r], bounds[r + 1])
    rank: int  # of this process
    weight: nn.Parameter  # (num_rows, own columns), contiguous
    padding_idx: int | None  # row without gradient

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_rows, self.dim

    @property
    def world_size(self) -> int:
        return len(self.bounds) - 1

    def num_columns(self, rank: int) -> int:
        return self.bounds[rank + 1] - self.bounds[rank]

    def nbytes(self, num_rows: int, rank: int) -> int:
        return num_rows * self.num_columns(rank) * self.weight.element_size()

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """Return a view of a rank's columns of (..., dim)."""
        return full[..., self.bounds[rank] : self.bounds[rank + 1]]

    def chunks(self) -> list[tuple[int, int]]:
        step = max(1, _CHUNK_BYTES // max(1, self.dim * self.weight.element_size()))
        return [(start, min(start + step, self.num_rows)) for start in range(0, self.num_rows, step)]


def column_bounds(dim: int, world_size: int) -> tuple[int, ...]:
    """Split ``dim`` columns as ``torch.chunk`` and DTensor's ``Shard`` do; return each rank's start, and the end."""
    share = -(-dim // world_size)
    return tuple(min(rank * share, dim) for rank in range(world_size + 1))


class _Surroundings(NamedTuple):
    name: str  # of the nearest module around a table with other trained parameters
    parameters: list[weakref.ref[nn.Parameter]]


class RequiresGradSync:
    """Trains and freezes tables, and refuses loops over parameters that leave tables out.

    A table's weight is no parameter of its module. If a loop has frozen everything around a table, the user may have
    meant the table, too.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._around: dict[int, _Surroundings] = {}  # by table, until the user sets requires_grad of the table itself

    def attach(self, root: nn.Module) -> None:
        for table in self._tables:
            names = table.name.split(".")
            for end in reversed(range(len(names))):
                module = root.get_submodule(".".join(names[:end]))
                trained = [weakref.ref(each) for each in module.parameters() if each.requires_grad]
                if trained:
                    name = "the model" if module is root else type(module).__name__
                    self._around[table.index] = _Surroundings(name, trained)
                    break

    def set(self, index: int, requires_grad: bool) -> None:
        self._tables[index].weight.requires_grad_(requires_grad)
        self._around.pop(index, None)

    def refuse_ambiguous(self) -> None:
        """Raise ``RuntimeError`` if everything around a table was frozen, and the user did not say if the table is."""
        for index, around in self._around.items():
            name, weight = self._tables[index].name, self._tables[index].weight
            alive = [parameter for reference in around.parameters if (parameter := reference()) is not None]
            if alive and weight.requires_grad and not any(parameter.requires_grad for parameter in alive):
                raise RuntimeError(
                    f"all parameters of {around.name} were frozen since shard_embeddings(), and a loop over parameters "
                    f"does not reach the sharded table {name}, which is no parameter of its module: call "
                    f'tables.requires_grad_(False, ["{name}"]) on all ranks to freeze it, too, or '
                    f'tables.requires_grad_(True, ["{name}"]) to go on training it'
                    f"{see('set-up-changed-later')}"
                )


def scatter_columns(table: Table, full: Tensor) -> Algorithm:
    """Fill ``table.weight`` on every rank with its columns of the first rank's ``full``, (num_rows, dim)."""
    with torch.no_grad():
        if table.rank == 0:
            table.weight.copy_(table.cut(full, 0))
        for start, stop in table.chunks():
            if table.rank == 0:
                parts = [(peer, table.cut(full[start:stop], peer)) for peer in range(1, table.world_size)]
                yield round_of(*(Send(peer, part.contiguous().view(-1)) for peer, part in parts))
            else:
                yield round_of(Recv(0, table.weight.detach()[start:stop].view(-1)))


def gather_columns(table: Table, columns: Tensor, to: int | None) -> Generator[Round, None, Tensor | None]:
    """Gather a table, or an entry of its optimizer state, from (num_rows, own columns) of all ranks.

    Returns (num_rows, dim) on rank ``to``, or on all ranks if ``to`` is None; otherwise None.
    """
    receives = to in (None, table.rank)
    full = columns.new_empty(table.shape if receives else 0)
    peers = range(table.world_size)
    for start, stop in table.chunks():
        mine = columns[start:stop].reshape(-1)
        outgoing = [mine if to in (None, peer) else mine[:0] for peer in peers]
        sizes = [(stop - start) * table.num_columns(peer) if receives else 0 for peer in peers]
        incoming = [mine if peer == table.rank else mine.new_empty(sizes[peer]) for peer in peers]
        yield from pairwise_exchange(outgoing, incoming, table.rank)
        for peer in peers if receives else ():
            table.cut(full[start:stop], peer).copy_(incoming[peer].view(stop - start, table.num_columns(peer)))
    return full if receives else None
