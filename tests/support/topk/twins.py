"""SparDL on whole vectors, slow and obvious: every rank's memory in one place, entries found by sorting.

Written from Algorithm 1 and its corrections, not from the implementation: dense vectors everywhere, residuals copied
and replaced as the paper prints it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top(values: Tensor, k: int) -> Tensor:
    """A mask of the k largest magnitudes; ties go to the lowest index."""
    order = sorted(range(values.numel()), key=lambda i: (-abs(float(values[i])), i))
    mask = torch.zeros(values.numel(), dtype=torch.bool)
    mask[order[:k]] = True
    return mask


class DenseTwin:
    """All ranks of one exchange."""

    def __init__(self, work: list[Tensor], k: int, num_teams: int, collection: str) -> None:
        self.copies = [values.clone() for values in work]
        self.work = [values.clone() for values in work]
        self.discards = [torch.zeros_like(values) for values in work]  # what each worker has discarded
        self.sent = [torch.zeros(values.numel(), dtype=torch.bool) for values in work]
        self.world_size, self.num_teams = len(work), num_teams
        self.size = self.world_size // num_teams
        numel = work[0].numel()
        self.bounds = [numel * block // self.size for block in range(self.size + 1)]
        shares = [k * (block + 1) // self.size - k * block // self.size for block in range(self.size)]
        self.counts = [min(self.bounds[b + 1] - self.bounds[b], max(1, shares[b])) for b in range(self.size)]
        self.collection = collection
        self.held = [torch.zeros_like(values) for values in work]  # the reserved block
        self.chosen = [torch.zeros(numel, dtype=torch.bool) for _ in work]  # its entries, also if they are zero

    def block(self, number: int) -> slice:
        return slice(self.bounds[number], self.bounds[number + 1])

    def sparsify(self, rank: int, number: int) -> tuple[Tensor, Tensor]:
        """Lines 6 and 7: what stays of a block (dense), and where; the rest is this worker's discard."""
        part = self.block(number)
        mask = torch.zeros_like(self.sent[rank])
        mask[part] = top(self.work[rank][part], self.counts[number])
        kept = torch.where(mask, self.work[rank], 0.0)
        rest = self.work[rank] - kept
        self.discards[rank][part] += rest[part]
        self.sent[rank] |= mask
        self.work[rank][part] = 0
        return kept, mask

    def reduce_scatter(self) -> None:
        rounds = (self.size - 1).bit_length()
        for i in range(1, rounds + 1):
            distance = 2 ** (rounds - i)
            messages = []
            for rank in range(self.world_size):
                team, position = divmod(rank, self.size)
                bag = [(position + distance + x) % self.size for x in range(min(distance, self.size - distance))]
                target = team * self.size + (position + distance) % self.size
                messages.append((target, sum(self.sparsify(rank, number)[0] for number in bag)))
            for target, message in messages:
                self.work[target] += message
        for rank in range(self.world_size):
            self.held[rank], self.chosen[rank] = self.sparsify(rank, rank % self.size)

    def keep_largest(self, rank: int, values: Tensor, entries: Tensor, holders: int) -> None:
        """Keep as many entries as the block has; the rest belongs to one of ``holders``."""
        number, team = rank % self.size, rank // self.size
        start = self.bounds[number]
        where = torch.nonzero(entries).squeeze(1)
        kept = where[top(values[where], self.counts[number])]
        mask = torch.zeros_like(entries)
        mask[kept] = True
        for index in where.tolist():
            if not mask[index] and (index - start) % holders == team % holders:
                self.discards[rank][index] += values[index]
        self.held[rank], self.chosen[rank] = torch.where(mask, values, 0.0), mask

    def recursive_all_gather(self) -> None:
        distance = 1
        while distance < self.num_teams:
            values, entries = [v.clone() for v in self.held], [e.clone() for e in self.chosen]
            for rank in range(self.world_size):
                team, position = divmod(rank, self.size)
                peer = (team ^ distance) * self.size + position
                self.keep_largest(rank, values[rank] + values[peer], entries[rank] | entries[peer], 2 * distance)
            distance *= 2

    def bruck_all_gather(self, heights: list[int]) -> None:
        """B-SAG; ``heights`` are the numbers of entries sent, per block."""
        for rank in range(self.world_size):
            h = heights[rank % self.size]
            where = torch.nonzero(self.chosen[rank]).squeeze(1)
            kept = torch.zeros_like(self.chosen[rank])
            kept[where[top(self.held[rank][where], h)]] = True
            self.discards[rank] += torch.where(kept, 0.0, self.held[rank])
            self.held[rank], self.chosen[rank] = torch.where(kept, self.held[rank], 0.0), kept
        values, entries = [v.clone() for v in self.held], [e.clone() for e in self.chosen]
        for rank in range(self.world_size):
            peers = [team * self.size + rank % self.size for team in range(self.num_teams)]
            total = torch.stack([values[peer] for peer in peers]).sum(0)
            union = torch.stack([entries[peer] for peer in peers]).any(0)
            self.keep_largest(rank, total, union, self.num_teams)

    def finish(self) -> tuple[Tensor, list[Tensor]]:
        """The result, as the first team has it, and every rank's residual."""
        result = torch.stack(self.held[: self.size]).sum(0)
        inside = torch.stack(self.chosen[: self.size]).any(0)
        residuals = []
        for rank in range(self.world_size):
            copy = self.copies[rank]
            if self.collection == "global":
                residuals.append(torch.where(inside, self.discards[rank], copy))
            elif self.collection == "partial":
                residuals.append(torch.where(self.sent[rank] & inside, 0.0, copy))
            else:
                residuals.append(torch.where(self.sent[rank], 0.0, copy))
        return result, residuals
