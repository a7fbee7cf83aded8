"""Strategies that exchange the largest entries of gradients: SparDL."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hooks.comm import mebibytes
from ddp_hooks.comm.algorithms.bruck import all_gather_steps
from ddp_hooks.comm.bags import reduce_scatter_steps
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.groups import Launcher, fuse
from ddp_hooks.planning.patterns import Hop, Pattern
from ddp_hooks.planning.simulation import Run

_HOOK_S = 15e-6  # as in ddp_hooks.planning.all_reduce, but by the clock instead of the thread


@dataclass(frozen=True)
class SparDL:
    """SparDL with one team: Spar-Reduce-Scatter, then Bruck's all-gather, per group, under the backward.

    Args:
        density: part of the elements that is kept.
        group_mb: gradients that are selected from together, in MiB.
        lanes: streams of communication.
        entry_bytes: of an index and a value; 4 in the compact format.
    """

    density: float = 0.01
    group_mb: float = 25.0
    lanes: int = 2
    entry_bytes: int = 4

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"SparDL, {self.density:.3g}"

    @property
    def line(self) -> str:
        """What a user writes."""
        return (
            f"ddp = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)\n"
            f"state = TopKState(ddp, TopKConfig(density={self.density:g}))\n"
            f"ddp.register_comm_hook(state, topk_hook)\n"
            f"state.state_dict()  # what this rank has left out: every rank saves its own, beside the checkpoint"
        )

    def pattern(self, workers: int, num_elements: float) -> Pattern:
        """The rounds for a group: no more than each block's share of the entries is sent of it."""
        share_bytes = self.density * num_elements / workers * self.entry_bytes
        steps = [*reduce_scatter_steps(0, workers), *all_gather_steps(0, workers)]
        return tuple(Hop(1, len(step.outgoing) * share_bytes) for step in steps)

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        if run.network.node_size > 1:
            raise ValueError("SparDL is simulated on one level only: give a network with node_size=1")
        groups = fuse(run, run.step.backward_order, mebibytes(self.group_mb))
        lanes = run.lanes(self.lanes)
        while not run.is_over:
            yield from run.forward({})
            reduced: list[Signal] = []

            def launch(number: int, reduced: list[Signal] = reduced) -> None:
                num_bytes = run.num_bytes(groups[number])
                pattern = self.pattern(run.network.workers, num_bytes / run.step.element_bytes)
                piece = Slice(pattern, run.costs.select_s_per_byte * num_bytes)
                reduced.append(lanes[number % self.lanes].submit([piece], f"sparse all-reduce of group {number}"))

            yield from run.backward(Launcher(groups, launch).ready, _HOOK_S)
            for signal in reduced:
                yield from run.wait(signal, "sparse all-reduces")
            yield from run.optimizer()
            run.end_step()
