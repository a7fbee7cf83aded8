"""SparDL: sparse all-reduce whose messages do not grow (zhao2024spardl, section III).

Workers form teams.

1. *Spar-Reduce-Scatter* within each team: every worker gets the most important entries of one block.
2. *Spar-All-Gather* between teams: these entries become the same in all teams.
3. Bruck's all-gather within each team: every worker gets all blocks.

Where we differ from the paper:

* Of the workers that discard the same entry exactly one keeps it, whole. The paper has both sides of an exchange keep
  half, which counts an entry more than once from four teams on.
* Algorithm 1 stores no residual in its line 9; ours does, as in line 7.
* Sums are formed in the order of the teams and ties go to the lowest index, so that replicas do not drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ddp_hooks.comm import Recv, Send, bruck_all_gather, round_of
from ddp_hooks.comm.algorithms.bruck import reduce_scatter_steps
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Exchange, Plan
from ddp_hooks.sparse.error_feedback import ErrorFeedback
from ddp_hooks.sparse.selector import BlockSelector
from ddp_hooks.sparse.sparse_vector import SparseVector, add, concatenated, split_largest, total

SpAllGather: TypeAlias = Literal["r", "b"]
_MIN_STEP = 0.1  # of the controller; moves h by one within ten steps


@dataclass
class TopHController:
    """Number of entries that a team sends in B-SAG (Algorithm 2), the same on all workers at one block position.

    The exchange should leave about as many entries as a block keeps. If it leaves more, fewer are sent (the sentence
    above Algorithm 2 says the opposite).
    """

    target: int  # entries that the block keeps, ``d k / P``
    num_teams: int  # d
    h: float = 0.0  # entries to send, a real number from ``k / P`` to ``d k / P``; rounded when it is used
    step: float = 0.0  # added to ``h`` next
    doubles: bool = False  # the next step in the same direction is twice as long

    def __post_init__(self) -> None:
        if self.h == 0.0:
            self.h, self.step = self.lowest, self.initial_step

    @property
    def lowest(self) -> float:
        """``h`` if teams' entries do not overlap."""
        return self.target / self.num_teams

    @property
    def initial_step(self) -> float:
        """One percent of the range of ``h``."""
        return max(0.01 * self.lowest * (self.num_teams - 1), _MIN_STEP)

    @property
    def count(self) -> int:
        return max(1, round(self.h)) if self.target else 0

    def observe(self, num_entries: int) -> None:
        """Adjust ``h`` after an exchange that has left ``num_entries`` different entries (lines 3 to 12)."""
        too_many = num_entries > self.target
        if too_many != (self.step > 0):  # the direction is right
            if self.doubles:
                self.step *= 2
            self.doubles = not self.doubles
        else:
            self.step *= -0.5
            self.doubles = False
        if abs(self.step) < _MIN_STEP:
            self.step = _MIN_STEP if self.step > 0 else -_MIN_STEP
        self.h += self.step
        if not self.lowest <= self.h <= self.target:
            # At a bound, begin anew, pointing inwards: doubling would never end.
            self.h = min(max(self.h, self.lowest), float(self.target))
            self.step = self.initial_step * (1 if self.h == self.lowest else -1)
            self.doubles = False


def spardl(
    feedback: ErrorFeedback,
    selector: BlockSelector,
    plan: Plan,
    codec: EntryCodec,
    sag: SpAllGather = "r",
    controller: TopHController | None = None,
) -> Exchange:
    """Return the sum over all workers, about ``plan.k`` entries, the same on every rank.

    Spar-All-Gather is ``sag="r"`` (recursive, a power of two of teams) or ``"b"`` (Bruck's), which has a controller per
    position, changed here.
    """
    exchange = _Exchange(feedback, selector, plan, codec)
    held = yield from exchange.reduce_scatter()
    if plan.num_teams > 1:
        if sag == "r":
            held = yield from exchange.recursive_all_gather(held)
        else:
            assert controller is not None
            held = yield from exchange.bruck_all_gather(held, controller)
    return (yield from exchange.complete(held))


def spar_reduce_scatter(feedback: ErrorFeedback, selector: BlockSelector, plan: Plan, codec: EntryCodec) -> Exchange:
    """Run the first part alone, within one team: return the sum of this worker's block, with indices in the block.

    No other worker learns this sum, so a discarded entry stays with the worker that discards it, whoever made it.
    Results and residuals of all workers add up to their inputs.
    """
    exchange = _Exchange(feedback, selector, plan, codec, completes=False)
    held = yield from exchange.reduce_scatter()
    feedback.close_without_result(exchange.is_finite)
    return held


@dataclass
class _Exchange:
    """The three parts; entries of blocks have their indices in the block."""

    feedback: ErrorFeedback
    selector: BlockSelector
    plan: Plan
    codec: EntryCodec
    completes: bool = True  # the second and third parts follow the first
    is_finite: bool = True  # all taken entries are; only without completion, where close() cannot tell

    def reduce_scatter(self) -> Exchange:
        """Spar-Reduce-Scatter (section III-B, with its optimised timing); returns this worker's block.

        Only blocks that are sent next are made sparse; blocks that stay are added to in full.
        """
        members, bounds = self.plan.members, self.plan.bounds
        for step in reduce_scatter_steps(self.plan.position, self.plan.team_size):
            messages = [self._encode(block, self._take(block)) for block in step.outgoing]
            message = messages[0] if len(messages) == 1 else torch.cat(messages)
            sizes = [self._nbytes(block) for block in step.incoming]
            arriving = message.new_empty(sum(sizes))
            yield round_of(Recv(members[step.source], arriving), Send(members[step.target], message))
            for block, part in zip(step.incoming, arriving.split(sizes), strict=True):
                vector = self._decode(block, part)
                self.selector.receive(block, vector)
                if not self._is_final(block):
                    self.feedback.receive(vector.shifted(bounds[block]))
        return self._take(self.plan.position)

    def recursive_all_gather(self, held: SparseVector) -> Exchange:
        """R-SAG (section III-D1): teams at a distance of 1, 2, 4, … exchange entries and keep the largest."""
        plan, block = self.plan, self.plan.position
        distance = 1
        while distance < plan.num_teams:
            peer = plan.peers[plan.team ^ distance]
            message = self._encode(block, held)
            arriving = torch.empty_like(message)
            yield round_of(Recv(peer, arriving), Send(peer, message))
            distance *= 2
            # A sum of two has the same bits in any order, so both peers keep the same entries.
            held = self._keep_largest(add(held, self._decode(block, arriving)), distance)
        return held

    def bruck_all_gather(self, held: SparseVector, controller: TopHController) -> Exchange:
        """B-SAG (section III-D2): the largest h entries of every team travel to all, and the largest sums stay."""
        plan, block = self.plan, self.plan.position
        chosen, rest = split_largest(held, controller.count)
        self.feedback.discard(rest.shifted(plan.bounds[block]))  # no other worker has these
        sizes = [self._nbytes(block, len(chosen))] * plan.num_teams
        message = self._encode(block, chosen, len(chosen))
        messages = yield from bruck_all_gather(message, sizes, plan.peers, plan.team)
        everything = total([self._decode(block, message, len(chosen)) for message in messages])
        controller.observe(len(everything))
        return self._keep_largest(everything, plan.num_teams)

    def complete(self, held: SparseVector) -> Exchange:
        """Bruck's all-gather of the blocks within the team."""
        plan = self.plan
        sizes = [self._nbytes(block) for block in range(plan.team_size)]
        messages = yield from bruck_all_gather(self._encode(plan.position, held), sizes, plan.members, plan.position)
        return concatenated(
            [self._decode(block, message).shifted(plan.bounds[block]) for block, message in enumerate(messages)]
        )

    def _take(self, block: int) -> SparseVector:
        """Return the block's largest entries, which are sent."""
        chosen = self.selector.select(block)
        shifted = chosen.shifted(self.plan.bounds[block])
        arriving = self.feedback.take(shifted, self.codec, in_result=self._is_final(block))
        if not self.completes:
            self.is_finite = self.is_finite and bool(arriving.values.isfinite().all())
        return SparseVector(chosen.indices, arriving.values)

    def _is_final(self, block: int) -> bool:
        """True if the entries taken of the block are those of the result, which all workers learn."""
        return self.completes and self.plan.num_teams == 1 and block == self.plan.position

    def _keep_largest(self, vector: SparseVector, holders: int) -> SparseVector:
        """Return as many entries as the block keeps, as they will arrive.

        ``holders`` workers, of as many teams in a row, have ``vector``; one of them keeps a discarded entry.
        """
        kept, dropped = split_largest(vector, self.plan.counts[self.plan.position])
        arriving, lost = self.codec.round(kept.values)
        for left in [dropped] if lost is None else [dropped, SparseVector(kept.indices, lost)]:
            mine = left.at(left.indices % holders == self.plan.team % holders)
            self.feedback.discard(mine.shifted(self.plan.bounds[self.plan.position]))
        return SparseVector(kept.indices, arriving)

    def _sizes(self, block: int, capacity: int | None) -> tuple[int, int]:
        """Return the block's length, and the room of a message: ``capacity``, or as many as the block keeps."""
        numel = self.plan.bounds[block + 1] - self.plan.bounds[block]
        return numel, self.plan.counts[block] if capacity is None else capacity

    def _nbytes(self, block: int, capacity: int | None = None) -> int:
        return self.codec.nbytes(*self._sizes(block, capacity))

    def _encode(self, block: int, vector: SparseVector, capacity: int | None = None) -> Tensor:
        return self.codec.encode(vector, *self._sizes(block, capacity))

    def _decode(self, block: int, message: Tensor, capacity: int | None = None) -> SparseVector:
        return self.codec.decode(message, *self._sizes(block, capacity))
