"""SparDL: workers exchange the largest entries of their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hooks.comm import mebibytes
from ddp_hooks.comm.algorithms.bruck import all_gather_steps
from ddp_hooks.comm.algorithms.spar_schedule import reduce_scatter_steps
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.rounds import Round, Rounds
from ddp_hooks.planning.simulation import Run, Strategy
from ddp_hooks.planning.strategies.grouping import group_by_size, launcher

_HOOK_S = 15e-6  # as in ddp_hooks.planning.strategies.all_reduce, but by the clock instead of the thread


@dataclass(frozen=True)
class SparDL(Strategy):
    """SparDL with one team: Spar-Reduce-Scatter, then Bruck's all-gather, per group, under the backward."""

    density: float = 0.01  #: selected part of the elements
    group_mb: float = 25.0  #: gradients from which entries are selected together, in MiB
    lanes: int = 2  #: streams of communication
    entry_bytes: int = 4  #: of an index and a value in the compact format

    @property
    def name(self) -> str:
        return f"SparDL, {self.density:.3g}"

    @property
    def line(self) -> str:
        return (
            f"ddp = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)\n"
            f"state = TopKState(ddp, TopKConfig(density={self.density:g}))\n"
            f"ddp.register_comm_hook(state, topk_hook)\n"
            f"state.state_dict()  # what this rank has left out: every rank saves its own, beside the checkpoint"
        )

    def rounds(self, workers: int, num_elements: float) -> Rounds:
        """Return the rounds of a group: of each block at most its share of the entries is sent."""
        share_bytes = self.density * num_elements / workers * self.entry_bytes
        steps = [*reduce_scatter_steps(0, workers), *all_gather_steps(0, workers)]
        return tuple(Round(1, len(step.outgoing) * share_bytes) for step in steps)

    def train(self, run: Run) -> Process:
        if run.network.node_size > 1:
            raise ValueError("SparDL is simulated on one level only: give a network with node_size=1")
        tensors = run.step.tensors
        limit = mebibytes(self.group_mb)
        groups = group_by_size(run.step.backward_order, lambda tensor: tensors[tensor].num_bytes, limit)
        lanes = run.lanes(self.lanes)
        reduced: list[Signal] = []

        def launch(number: int) -> None:
            num_bytes = run.num_bytes(groups[number])
            rounds = self.rounds(run.network.workers, num_bytes / run.step.element_bytes)
            part = Slice(rounds, run.costs.select_s_per_byte * num_bytes)
            reduced.append(lanes[number % self.lanes].submit([part], f"sparse all-reduce of group {number}"))

        while not run.is_over:
            yield from run.forward({})
            reduced.clear()
            yield from run.backward(launcher(groups, launch), _HOOK_S)
            yield from run.wait_all(reduced, "sparse all-reduces")
            yield from run.optimizer()
            run.end_step()
