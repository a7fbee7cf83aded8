"""SparDL: sparse all-reduce whose messages do not grow (zhao2024spardl, section III).

Workers form teams. Within each team *Spar-Reduce-Scatter* leaves every worker with the most important entries of one
block; *Spar-All-Gather* makes them the same in all teams; Bruck's all-gather completes them in every team. Where we
differ from the paper:

* Of the workers that discard the same entry exactly one keeps it, whole. The paper has both sides of an exchange keep
  half, which counts an entry more than once from four teams on.
* Algorithm 1 stores no residual in its line 9; ours does, as in line 7.
* Sums are formed in the order of the teams and ties go to the lowest index, so that replicas do not drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import Recv, Send, bruck_all_gather, round_of
from ddp_hooks.comm.bags import reduce_scatter_steps
from ddp_hooks.topk.blocks import block_counts, even_bounds
from ddp_hooks.topk.controller import TopHController
from ddp_hooks.topk.exchange import Exchange, Selector
from ddp_hooks.topk.ledger import Ledger
from ddp_hooks.topk.sparse import SparseVector, add, concatenated, split_largest, total
from ddp_hooks.topk.wire import Wire

SpAllGather: TypeAlias = Literal["r", "b"]
Split: TypeAlias = Literal["whole", "paper"]


@dataclass(frozen=True)
class Plan:
    """Who is where, and how a vector is cut.

    Args:
        numel: of the vector.
        k: entries to keep of it.
        world_size, num_teams: ``num_teams`` divides ``world_size``.
        rank: of this worker.
    """

    numel: int
    k: int
    world_size: int
    num_teams: int
    rank: int

    @property
    def team_size(self) -> int:
        return self.world_size // self.num_teams

    @property
    def team(self) -> int:
        return self.rank // self.team_size

    @property
    def position(self) -> int:
        """This worker's place in its team, and the block that it reduces."""
        return self.rank % self.team_size

    @property
    def members(self) -> list[int]:
        """The ranks of this worker's team."""
        return [self.team * self.team_size + position for position in range(self.team_size)]

    @property
    def peers(self) -> list[int]:
        """The ranks with this worker's position, of all teams."""
        return [team * self.team_size + self.position for team in range(self.num_teams)]

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the blocks begin and end."""
        return even_bounds(self.numel, self.team_size)

    @property
    def counts(self) -> tuple[int, ...]:
        """Entries that are kept of every block: ``d k / P`` of each."""
        return block_counts(self.k, self.bounds)


def spardl(
    ledger: Ledger,
    selector: Selector,
    plan: Plan,
    wire: Wire,
    sag: SpAllGather = "r",
    split: Split = "whole",
    controller: TopHController | None = None,
) -> Exchange:
    """The sum over all workers of what they hold, sparse; what is left out becomes their residuals.

    Args:
        ledger: of this worker's residual, to which the selector adds the gradient; closed in the end.
        selector: of the ledger's working vector.
        plan: who is where.
        wire: how entries travel.
        sag: Spar-All-Gather between teams: ``"r"`` (recursive, a power of two of teams) or ``"b"`` (Bruck's).
        split: who keeps what several workers discard: one of them, or each a part, as in the paper.
        controller: of ``sag="b"``, one per position; changed here.

    Returns:
        The sum, the same on every rank: about ``plan.k`` entries.
    """
    exchange = _Exchange(ledger, selector, plan, wire, split)
    held = yield from exchange.reduce_scatter()
    if plan.num_teams > 1:
        if sag == "r":
            held = yield from exchange.recursive_all_gather(held)
        else:
            assert controller is not None
            held = yield from exchange.bruck_all_gather(held, controller)
    result = yield from exchange.complete(held)
    ledger.close(result)
    return result


def spar_reduce_scatter(ledger: Ledger, selector: Selector, plan: Plan, wire: Wire) -> Exchange:
    """The first part alone, within one team: every worker ends with the most important entries of its block.

    Nobody else learns which these are, so an entry stays with the worker that has left it out, whoever had it before.
    Nothing is lost: what all workers get, and what they keep, sum up to what they had.

    Args:
        ledger: of this worker's residual, to which the selector adds the gradient; settled in the end.
        selector: of the ledger's working vector.
        plan: who is where; with one team.
        wire: how entries travel.

    Returns:
        The sum of this worker's block, sparse, with indices in the block.
    """
    exchange = _Exchange(ledger, selector, plan, wire, "whole", is_whole=False)
    held = yield from exchange.reduce_scatter()
    ledger.settle(exchange.is_finite)
    return held


class _Exchange:
    """The three parts; entries of blocks have the indices that they have in the block.

    Args:
        is_whole: whether the other parts follow the first one.
    """

    def __init__(
        self, ledger: Ledger, selector: Selector, plan: Plan, wire: Wire, split: Split, is_whole: bool = True
    ) -> None:
        self.ledger = ledger
        self.selector = selector
        self.plan = plan
        self.wire = wire
        self.split = split
        self.is_whole = is_whole
        self.is_finite = True
        """Whether all that was taken is; what is not counts as the largest. Only where no other part follows."""
        self.bounds = plan.bounds
        self.counts = plan.counts

    def reduce_scatter(self) -> Exchange:
        """Spar-Reduce-Scatter (section III-B, with its optimised timing): this worker's block, its most important part.

        Only what is sent next is made sparse; blocks that stay are added to in full.
        """
        members = self.plan.members
        for step in reduce_scatter_steps(self.plan.position, self.plan.team_size):
            message = _joined([self._encode(block, self._take(block)) for block in step.outgoing])
            sizes = [self._nbytes(block) for block in step.incoming]
            arriving = message.new_empty(sum(sizes))
            yield round_of(Recv(members[step.source], arriving), Send(members[step.target], message))
            for block, part in zip(step.incoming, arriving.split(sizes), strict=True):
                vector = self._decode(block, part)
                self.selector.receive(block, vector)
                if not self._is_final(block):
                    self.ledger.receive(vector.shifted(self.bounds[block]))
        return self._take(self.plan.position)

    def recursive_all_gather(self, held: SparseVector) -> Exchange:
        """R-SAG (section III-D1): teams at a distance of 1, 2, 4, … exchange what they hold and keep the largest."""
        plan, block = self.plan, self.plan.position
        distance = 1
        while distance < plan.num_teams:
            peer = plan.peers[plan.team ^ distance]
            message = self._encode(block, held)
            arriving = torch.empty_like(message)
            yield round_of(Recv(peer, arriving), Send(peer, message))
            distance *= 2
            # A sum of two has the same bits in any order, so both peers keep the same entries.
            held = self._keep_largest(add(held, self._decode(block, arriving)), distance, 2)
        return held

    def bruck_all_gather(self, held: SparseVector, controller: TopHController) -> Exchange:
        """B-SAG (section III-D2): the largest h entries of every team travel to all, and the largest sums stay."""
        plan, block = self.plan, self.plan.position
        chosen, rest = split_largest(held, controller.count)
        self.ledger.discard(rest.shifted(self.bounds[block]))  # nobody else has these
        sizes = [self._nbytes(block, len(chosen))] * plan.num_teams
        message = self._encode(block, chosen, len(chosen))
        messages = yield from bruck_all_gather(message, sizes, plan.peers, plan.team)
        everything = total([self._decode(block, message, len(chosen)) for message in messages])
        controller.observe(len(everything))
        return self._keep_largest(everything, plan.num_teams, plan.num_teams)

    def complete(self, held: SparseVector) -> Exchange:
        """Bruck's all-gather of the blocks within the team."""
        plan = self.plan
        sizes = [self._nbytes(block) for block in range(plan.team_size)]
        messages = yield from bruck_all_gather(self._encode(plan.position, held), sizes, plan.members, plan.position)
        return concatenated(
            [self._decode(block, message).shifted(self.bounds[block]) for block, message in enumerate(messages)]
        )

    def _take(self, block: int) -> SparseVector:
        """The block's largest entries, which are sent."""
        chosen = self.selector.select(block)
        arriving = self.ledger.take(chosen.shifted(self.bounds[block]), self.wire, in_result=self._is_final(block))
        if not self.is_whole:
            self.is_finite = self.is_finite and bool(arriving.values.isfinite().all())
        return SparseVector(chosen.indices, arriving.values)

    def _is_final(self, block: int) -> bool:
        """Whether what is taken of the block is what the result, which all workers learn, has of it."""
        return self.is_whole and self.plan.num_teams == 1 and block == self.plan.position

    def _keep_largest(self, vector: SparseVector, holders: int, paper_parts: int) -> SparseVector:
        """As many entries as the block keeps, as they will arrive.

        Args:
            vector: the same on ``holders`` workers, of as many teams in a row; of them, one keeps what is discarded.
            paper_parts: into how many parts the paper divides that.
        """
        block = self.plan.position
        kept, dropped = split_largest(vector, self.counts[block])
        arriving, lost = self.wire.round(kept.values)
        self._share(dropped, holders, paper_parts)
        if lost is not None:
            self._share(SparseVector(kept.indices, lost), holders, paper_parts)
        return SparseVector(kept.indices, arriving)

    def _share(self, vector: SparseVector, holders: int, paper_parts: int) -> None:
        if self.split == "paper":
            mine = SparseVector(vector.indices, vector.values / paper_parts)
        else:
            mine = vector.at(vector.indices % holders == self.plan.team % holders)
        self.ledger.discard(mine.shifted(self.bounds[self.plan.position]))

    def _length(self, block: int) -> int:
        return self.bounds[block + 1] - self.bounds[block]

    def _nbytes(self, block: int, capacity: int | None = None) -> int:
        return self.wire.nbytes(self._length(block), self.counts[block] if capacity is None else capacity)

    def _encode(self, block: int, vector: SparseVector, capacity: int | None = None) -> Tensor:
        return self.wire.encode(vector, self._length(block), self.counts[block] if capacity is None else capacity)

    def _decode(self, block: int, message: Tensor, capacity: int | None = None) -> SparseVector:
        return self.wire.decode(message, self._length(block), self.counts[block] if capacity is None else capacity)


def _joined(messages: Sequence[Tensor]) -> Tensor:
    return messages[0] if len(messages) == 1 else torch.cat(list(messages))
