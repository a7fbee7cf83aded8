"""SparseSum: every algorithm by its name, run in one way by the hook, tests and benchmarks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ddp_hooks.sparse.baselines import gtopk, topka, topkdsa
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Exchange, Plan
from ddp_hooks.sparse.error_feedback import Collection, ErrorFeedback
from ddp_hooks.sparse.oktopk import OkTopkEstimates, oktopk
from ddp_hooks.sparse.selector import BlockSelector
from ddp_hooks.sparse.spardl import SpAllGather, TopHController, spardl
from ddp_hooks.sparse.threshold import ChunkedGradient

Name: TypeAlias = Literal["spardl", "topka", "topkdsa", "gtopk", "oktopk"]


@dataclass(frozen=True)
class Sparsity:
    """Settings of a sparse sum; ``num_teams`` and ``sag`` are those of :func:`spardl`."""

    algorithm: Name
    k: int  # entries to keep of a vector
    codec: EntryCodec
    num_teams: int = 1
    sag: SpAllGather = "r"
    collection: Collection = "global"  # of residuals


class SparseSum:
    """One worker's part in the sums of one vector of ``numel`` elements, step after step."""

    def __init__(self, sparsity: Sparsity, numel: int, rank: int, world_size: int) -> None:
        self.sparsity = sparsity
        self._plan = Plan(numel, min(sparsity.k, numel), world_size, sparsity.num_teams, rank)
        self.memory: TopHController | OkTopkEstimates | None = None
        """State that the algorithm keeps from step to step."""
        if sparsity.algorithm == "oktopk":
            self.memory = OkTopkEstimates()
        elif sparsity.algorithm == "spardl" and sparsity.sag == "b" and sparsity.num_teams > 1:
            self.memory = TopHController(self._plan.counts[self._plan.position], sparsity.num_teams)

    def run(self, residual: Tensor, gradient: Tensor | ChunkedGradient | None) -> Exchange:
        """Add ``gradient``, (n,), to ``residual``, (n,), in place, and return the sparse sum over all workers.

        The residual of the last step becomes that of this step; without a gradient it includes that already.
        """
        feedback = ErrorFeedback(residual, self.sparsity.collection)
        result = yield from self.exchange(feedback, gradient)
        feedback.close(result)
        return result

    def exchange(self, feedback: ErrorFeedback, gradient: Tensor | ChunkedGradient | None) -> Exchange:
        """Return the sum as :meth:`run` does, but leave ``feedback``, of the residual, open."""
        gradient = ChunkedGradient((gradient,)) if isinstance(gradient, Tensor) else gradient
        sparsity, memory, plan, codec = self.sparsity, self.memory, self._plan, self.sparsity.codec
        if isinstance(memory, OkTopkEstimates):
            return oktopk(feedback, gradient, plan, codec, memory)
        if sparsity.algorithm == "spardl":
            selector = BlockSelector(feedback.work, plan.bounds, plan.counts, gradient)
            return spardl(feedback, selector, plan, codec, sparsity.sag, memory)
        selector = BlockSelector(feedback.work, (0, plan.numel), (plan.k,), gradient)
        baseline = {"topka": topka, "topkdsa": topkdsa, "gtopk": gtopk}[sparsity.algorithm]
        return baseline(feedback, selector, plan, codec)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory as plain numbers and lists."""
        return {**self._sizes, **asdict(self.memory)} if self.memory is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved memory, if it is of a vector of the same length with as many entries."""
        sizes = self._sizes
        if self.memory is not None and all(state.get(key) == value for key, value in sizes.items()):
            self.memory = type(self.memory)(**{key: state[key] for key in state if key not in sizes})

    @property
    def _sizes(self) -> dict[str, int]:
        return {"numel": self._plan.numel, "k": self._plan.k}
