"""Rounds and words of sparse all-reduce algorithms, counted: `python -m recipes.benchmarks.sparse_costs`.

Runs the algorithms themselves, for many workers in one process, and prints what is on their critical path beside
Table I of the SparDL paper: the clock of the slowest rank where a round, or a word, costs one second. Words are two per
entry, as in the paper. Where the table has a logarithm and P is no power of two, it is rounded up. The lengths that
TopkDSA and Ok-Topk exchange are counted here; the table leaves them out.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ddp_hooks.comm import Algorithm, AlphaBeta, num_rounds, run_on_fabric
from ddp_hooks.sparse import SparseSum, Sparsity
from ddp_hooks.sparse.codec import EntryCodec

WORLD_SIZES = (2, 4, 8, 14, 16, 32, 64)
ENTRIES_PER_WORKER = 16
DENSITY = 0.1
_WIRE = EntryCodec("exact", torch.float32)


@dataclass(frozen=True)
class Cost:
    """What is on the critical path."""

    rounds: float
    words: float


@dataclass(frozen=True)
class Counted:
    """One line of the table: what was counted, and what the paper says, at least and at most."""

    name: str
    world_size: int
    k: int
    counted: Cost
    least: Cost
    most: Cost


def count(sparsity: Sparsity, numel: int, world_size: int, steps: int = 1) -> Cost:
    """The cost of the last of several steps."""
    sums = [SparseSum(sparsity, numel, rank, world_size) for rank in range(world_size)]
    for _ in range(steps - 1):
        _run(sums, numel, AlphaBeta())
    saved = [each.state_dict() for each in sums]
    rounds = _run(sums, numel, AlphaBeta(1.0, 0.0))
    for each, state in zip(sums, saved, strict=True):
        each.load_state_dict(state)
    return Cost(rounds, _run(sums, numel, AlphaBeta(0.0, 0.25)))  # a word has four bytes


def _run(sums: list[SparseSum], numel: int, cost: AlphaBeta) -> float:
    generator = torch.Generator().manual_seed(0)
    algorithms = [_only(each.run(torch.randn(numel, generator=generator), None)) for each in sums]
    return max(traffic.clock_s for traffic in run_on_fabric(algorithms, cost))


def _only(exchange: Generator[Any, None, Any]) -> Algorithm:
    yield from exchange


def lines(world_size: int) -> list[Counted]:
    """Every algorithm with every number of teams."""
    k = ENTRIES_PER_WORKER * world_size
    numel = round(k / DENSITY)
    log, share = num_rounds(world_size), (world_size - 1) / world_size

    def line(name: str, sparsity: Sparsity, least: Cost, most: Cost | None = None, steps: int = 1) -> Counted:
        return Counted(name, world_size, k, count(sparsity, numel, world_size, steps), least, most or least)

    result = [line("SparDL", Sparsity("spardl", k, _WIRE), Cost(2 * log, 4 * k * share))]
    for d in (d for d in range(2, world_size + 1) if world_size % d == 0):
        inside = 2 * num_rounds(world_size // d)
        if d.bit_count() == 1:
            words = 2 * k * ((2 * world_size - 2 * d) / world_size + d / world_size * num_rounds(d))
            sparsity = Sparsity("spardl", k, _WIRE, d, "r")
            result.append(line(f"SparDL, R-SAG, d = {d}", sparsity, Cost(inside + num_rounds(d), words)))
        # Eq. 10, with the term T1 that its lower bound omits.
        lowest = 2 * k * (world_size * d + world_size - 2 * d) / (world_size * d)
        highest = 2 * k * (d * d + 2 * world_size - 3 * d) / world_size
        rounds = inside + num_rounds(d)
        sparsity = Sparsity("spardl", k, _WIRE, d, "b")
        result.append(line(f"SparDL, B-SAG, d = {d}", sparsity, Cost(rounds, lowest), Cost(rounds, highest)))
    balanced = Cost(0, 2 * k * share), Cost(2 * (world_size + log), 6 * k * share)
    growing = Cost(0, 4 * k * share), Cost(world_size + 2 * log, share * (2 * k + numel))
    result.append(line("Ok-Topk", Sparsity("oktopk", k, _WIRE), *balanced, steps=2))  # the first step estimates
    result.append(line("gTopk", Sparsity("gtopk", k, _WIRE), Cost(0, 0), Cost(2 * log, 4 * k * log)))
    result.append(line("TopkA", Sparsity("topka", k, _WIRE), Cost(log, 2 * (world_size - 1) * k)))
    result.append(line("TopkDSA", Sparsity("topkdsa", k, _WIRE), *growing))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORLD_SIZES), help="numbers of workers")
    for world_size in parser.parse_args().workers:
        Console().print(_table(lines(world_size), world_size))


def _table(counted: list[Counted], world_size: int) -> Table:
    table = Table(title=f"P = {world_size}, k = {counted[0].k} of {round(counted[0].k / DENSITY)}")
    table.add_column("algorithm")
    for title in ("rounds", "Table I", "words / k", "Table I / k"):
        table.add_column(title, justify="right")
    for each in counted:
        table.add_row(
            each.name,
            f"{each.counted.rounds:.0f}",
            _range(each.least.rounds, each.most.rounds, ".0f"),
            f"{each.counted.words / each.k:.2f}",
            _range(each.least.words / each.k, each.most.words / each.k, ".2f"),
        )
    return table


def _range(least: float, most: float, form: str) -> str:
    if least == most:
        return f"{least:{form}}"
    return f"at most {most:{form}}" if least == 0 else f"{least:{form}} to {most:{form}}"


if __name__ == "__main__":
    main()
