"""Draw the blocks that workers send in SparDL's Spar-Reduce-Scatter, from the messages of the algorithm itself.

    python -m recipes.paper.spardl_bags --workers 6 --output docs/images/bags.png

Every worker begins with all blocks of the vector. Each round halves what it still has to send away; in the end it holds
one block, reduced over all workers (zhao2024spardl, section III-B and Fig. 5).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch

from ddp_hooks.comm import Algorithm, Send, num_rounds, run_on_fabric
from ddp_hooks.comm.algorithms.bruck import reduce_scatter_steps
from ddp_hooks.sparse import BlockSelector
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Plan
from ddp_hooks.sparse.error_feedback import ErrorFeedback
from ddp_hooks.sparse.spardl import spardl

_ENTRIES = 4  # per block


@dataclass(frozen=True)
class Move:
    """Blocks that a worker sends in a round."""

    target: int
    blocks: tuple[int, ...]


def moves_of(workers: int) -> list[list[Move]]:
    """Run the algorithm; return the blocks that are sent, per worker and round.

    Raises:
        RuntimeError: the messages are other ones than the bags say.
    """
    wire = EntryCodec("exact", torch.float32)
    sent: list[list[tuple[int, int]]] = [[] for _ in range(workers)]  # (peer, bytes), per worker and round

    def watched(rank: int) -> Algorithm:
        plan = Plan(_ENTRIES * workers, _ENTRIES * workers, workers, 1, rank)
        work = torch.arange(plan.numel, dtype=torch.float32) + rank
        exchange = spardl(ErrorFeedback(work), BlockSelector(work, plan.bounds, plan.counts), plan, wire)
        for exchanges in exchange:
            exchanges = list(exchanges)
            sent[rank] += [(each.peer, each.tensor.nbytes) for each in exchanges if isinstance(each, Send)]
            yield exchanges

    run_on_fabric([watched(rank) for rank in range(workers)])
    moves = []
    for rank in range(workers):
        steps = reduce_scatter_steps(rank, workers)
        per_block = wire.nbytes(_ENTRIES, _ENTRIES)
        expected = [(step.target, per_block * len(step.outgoing)) for step in steps]
        if sent[rank][: len(steps)] != expected:
            raise RuntimeError(f"worker {rank} has sent {sent[rank][: len(steps)]}, the bags say {expected}")
        moves.append([Move(step.target, step.outgoing) for step in steps])
    return moves


def draw(workers: int, path: Path) -> None:
    """Draw a row per worker and a column per round: the blocks that it holds, and those that it sends next."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch, Rectangle

    moves, rounds = moves_of(workers), num_rounds(workers)
    held, sending, away = "#56b4e9", "#e69f00", "#f0f0f0"
    width = workers + 3.0
    figure, ax = plt.subplots(figsize=(1.0 + 0.3 * width * (rounds + 1), 0.9 + 0.42 * workers))
    for worker in range(workers):
        present = set(range(workers))
        for column in range(rounds + 1):
            move = moves[worker][column] if column < rounds else None
            leaving = set(move.blocks) if move is not None else set()
            for block in range(workers):
                colour = sending if block in leaving else held if block in present else away
                ax.add_patch(Rectangle((column * width + block, -worker), 0.9, 0.7, facecolor=colour))
                ax.text(column * width + block + 0.45, -worker + 0.35, str(block), ha="center", va="center", fontsize=7)
            if move is not None:
                ax.text(column * width + workers + 0.1, -worker + 0.35, f"→ {move.target}", va="center", fontsize=8)
            present -= leaving
    for column in range(rounds + 1):
        title = f"round {column + 1}" if column < rounds else "in the end"
        ax.text(column * width + workers / 2, 1.0, title, ha="center", fontsize=9)
    for worker in range(workers):
        ax.text(-0.4, -worker + 0.35, f"worker {worker}", ha="right", va="center", fontsize=8)
    ax.legend(
        handles=[
            Patch(color=held, label="held"),
            Patch(color=sending, label="made sparse and sent"),
            Patch(color=away, label="sent before"),
        ],
        loc="upper center", bbox_to_anchor=(0.5, 0.02), ncols=3, fontsize=8, frameon=False,
    )  # fmt: skip
    ax.set_xlim(-3.2, width * (rounds + 1))
    ax.set_ylim(-workers, 1.6)
    ax.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.paper.spardl_bags", description="Draw the bags of SparDL.")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--output", type=Path, default=Path("build/bags.png"))
    options = parser.parse_args()
    if not 2 <= options.workers <= 16:
        parser.error(f"--workers must be from 2 to 16, got {options.workers}")
    draw(options.workers, options.output)
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
