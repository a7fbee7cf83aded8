"""All algorithms by name, made alike: for tests, for counting, and for the hook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ddp_hooks.topk.controller import TopHController
from ddp_hooks.topk.exchange import Exchange
from ddp_hooks.topk.gtopk import gtopk
from ddp_hooks.topk.ledger import Collection, Ledger
from ddp_hooks.topk.oktopk import OkTopkEstimates, oktopk
from ddp_hooks.topk.scattered import Scattered
from ddp_hooks.topk.selection import BlockSelector
from ddp_hooks.topk.spardl import Plan, SpAllGather, Split, spardl
from ddp_hooks.topk.topka import topka
from ddp_hooks.topk.topkdsa import topkdsa
from ddp_hooks.topk.wire import Wire

Name: TypeAlias = Literal["spardl", "topka", "topkdsa", "gtopk", "oktopk"]


@dataclass(frozen=True)
class Sparsity:
    """What is kept, and how it travels.

    Args:
        algorithm: its name.
        k: entries to keep of a vector.
        wire: how they travel.
        num_teams, sag, split: of ``"spardl"``, see :func:`~ddp_hooks.topk.spardl.spardl`.
        collection: of residuals, see :mod:`~ddp_hooks.topk.ledger`.
    """

    algorithm: Name
    k: int
    wire: Wire
    num_teams: int = 1
    sag: SpAllGather = "r"
    split: Split = "whole"
    collection: Collection = "global"


class SparseSum:
    """One worker's part in the sums of one vector, step after step.

    Args:
        sparsity: the settings, the same on every rank.
        numel: of the vector.
        rank, world_size: of the group.
    """

    def __init__(self, sparsity: Sparsity, numel: int, rank: int, world_size: int) -> None:
        self.sparsity = sparsity
        self._rank = rank
        self._world_size = world_size
        self._k = min(sparsity.k, numel)
        self._plan = Plan(numel, self._k, world_size, sparsity.num_teams, rank)
        self.memory: TopHController | OkTopkEstimates | None = None
        """What the algorithm remembers from step to step."""
        if sparsity.algorithm == "oktopk":
            self.memory = OkTopkEstimates()
        elif sparsity.algorithm == "spardl" and sparsity.sag == "b" and sparsity.num_teams > 1:
            self.memory = TopHController(self._plan.counts[self._plan.position], sparsity.num_teams)

    def run(self, residual: Tensor, gradient: Tensor | Scattered | None) -> Exchange:
        """Add ``gradient`` to ``residual``, and sum over all workers; returns the sum, sparse.

        Args:
            residual: (n,), of the step before; becomes that of this step.
            gradient: (n,); None if the residual has it already.
        """
        if isinstance(gradient, Tensor):
            gradient = Scattered((gradient,))
        sparsity, memory, place = self.sparsity, self.memory, (self._rank, self._world_size)
        ledger = Ledger(residual, sparsity.collection)
        if sparsity.algorithm == "oktopk":  # selects in its own way
            assert isinstance(memory, OkTopkEstimates)
            return (yield from oktopk(ledger, gradient, self._k, *place, sparsity.wire, memory))
        bounds: tuple[int, ...] = (0, residual.numel())
        counts: tuple[int, ...] = (self._k,)
        if sparsity.algorithm == "spardl":
            bounds, counts = self._plan.bounds, self._plan.counts
        selector = BlockSelector(residual, bounds, counts, gradient)
        if sparsity.algorithm == "topka":
            return (yield from topka(ledger, selector, self._k, *place, sparsity.wire))
        if sparsity.algorithm == "topkdsa":
            return (yield from topkdsa(ledger, selector, *place, sparsity.wire))
        if sparsity.algorithm == "gtopk":
            return (yield from gtopk(ledger, selector, self._k, *place, sparsity.wire))
        assert not isinstance(memory, OkTopkEstimates)
        plan, sag, split = self._plan, sparsity.sag, sparsity.split
        return (yield from spardl(ledger, selector, plan, sparsity.wire, sag, split, memory))

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as plain numbers and lists."""
        return {**self._sizes, **self.memory.state_dict()} if self.memory is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of :meth:`state_dict`; what belongs to another vector or number of entries is left aside."""
        sizes = self._sizes
        if self.memory is not None and all(state.get(key) == value for key, value in sizes.items()):
            self.memory = type(self.memory).from_state({key: state[key] for key in state if key not in sizes})

    @property
    def _sizes(self) -> dict[str, int]:
        return {"numel": self._plan.numel, "k": self._k}
