"""DeAR: all-reduces in two halves, under the backward and under the next forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddp_hooks.comm import mebibytes, suited_to
from ddp_hooks.planning.events import Process, Signal
from ddp_hooks.planning.groups import Launcher, ddp_buckets, fuse, part_of
from ddp_hooks.planning.patterns import Schedule
from ddp_hooks.planning.simulation import Run
from ddp_hooks.planning.sizes import TAIL_CUTS, atom_and_fusion_bytes

_HOOK_S = {"sharded": 13e-6, "replicated": 19e-6}  # as in ddp_hooks.planning.all_reduce


@dataclass(frozen=True)
class Dear:
    """DeAR: reduce-scatters under the backward, all-gathers under the next forward.

    Args:
        update: ``"sharded"``: parameters are gathered, and a worker updates its share; ``"replicated"``: gradients are,
            and every worker updates all of them, each before it is read; the hook begins some of these gathers in
            the backward already, which is left out here.
        bucket_mb: of DDP; a gradient counts as ready with its bucket, but for the last one's.
        fusion_mb: largest group, in MiB (section IV-B).
        lanes: streams of communication.
        slice_mb: largest message, in MiB. What is None is chosen for the link, as by ``DearConfig``.
        schedule: of its collectives.
        scatters, gathers: False: as if these took no time (Fig. 8).
    """

    update: Literal["sharded", "replicated"] = "sharded"
    bucket_mb: float = 5.0
    fusion_mb: float | None = None
    lanes: int | None = None
    slice_mb: float | None = None
    schedule: Schedule = "ring"
    scatters: bool = True
    gathers: bool = True

    @property
    def name(self) -> str:
        """What tables call it."""
        parts = "" if self.scatters and self.gathers else ", RS only" if self.scatters else ", AG only"
        return f"DeAR, {self.update}{parts}"

    @property
    def line(self) -> str:
        """What a user writes."""
        config = "" if self.update == "sharded" else ', DearConfig(update="replicated")'
        return (
            f"ddp = DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g}, gradient_as_bucket_view=True)\n"
            f"ddp.register_comm_hook(DearState(ddp, optimizer{config}), dear_hook)"
        )

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        sizes = self._sizes(run)
        backward_groups = self._scattered_groups(run, sizes)
        forward_groups = fuse(run, run.step.forward_order, sizes.fusion_bytes)
        lanes = run.lanes(sizes.lanes)
        replicates = self.update == "replicated"

        def update_s(tensor: int) -> float:
            own_s = run.step.optimizer_s * part_of(run, tensor) if replicates else 0.0
            return own_s + _HOOK_S[self.update] * run.costs.python

        arrived: dict[int, Signal] = {}
        while not run.is_over:
            yield from run.forward(arrived, update_s)
            scattered: dict[int, Signal] = {}  # by tensor

            def launch(number: int, scattered: dict[int, Signal] = scattered) -> None:
                if self.scatters:
                    num_bytes = run.num_bytes(backward_groups[number])
                    slices = run.collective("reduce-scatter", num_bytes, self.schedule, sizes.message_bytes)
                    signal = lanes[number % sizes.lanes].submit(slices, f"reduce-scatter of group {number}")
                    scattered.update(dict.fromkeys(backward_groups[number], signal))

            yield from run.backward(Launcher(backward_groups, launch).ready)
            if not replicates:
                for signal in scattered.values():
                    yield from run.wait(signal, "reduce-scatters")
                yield from run.optimizer(1 / run.network.workers)
            arrived = dict.fromkeys(run.step.forward_order, _HAPPENED) | scattered
            for number, group in enumerate(forward_groups if self.gathers else []):
                after = [scattered[tensor] for tensor in group if tensor in scattered]
                slices = run.collective("all-gather", run.num_bytes(group), self.schedule, sizes.message_bytes)
                signal = lanes[number % sizes.lanes].submit(slices, f"all-gather of group {number}", after=after)
                arrived.update(dict.fromkeys(group, signal))
            run.end_step()

    def _sizes(self, run: Run) -> _Sizes:
        network = run.network
        link = suited_to(None if network.native else network.bytes_per_s)
        message_bytes = link.message_bytes if self.slice_mb is None else mebibytes(self.slice_mb)
        busy = self.update == "replicated" and link.outruns_processor
        atom_bytes, fusion_bytes = atom_and_fusion_bytes(message_bytes, run.step.num_bytes, busy, network.native)
        if self.fusion_mb is not None:
            fusion_bytes = mebibytes(self.fusion_mb)
        return _Sizes(self.lanes or link.num_lanes, message_bytes, atom_bytes, fusion_bytes)

    def _scattered_groups(self, run: Run, sizes: _Sizes) -> list[list[int]]:
        """Whole buckets while they fit; the last one, behind which nothing comes, in smaller parts on CPUs."""
        *buckets, last = ddp_buckets(run, self.bucket_mb)
        groups: list[list[int]] = []
        for bucket in buckets:
            if groups and run.num_bytes(groups[-1]) + run.num_bytes(bucket) <= sizes.fusion_bytes:
                groups[-1] += bucket
            else:
                groups.append(list(bucket))
        tail_bytes = sizes.fusion_bytes if run.network.native else sizes.atom_bytes // TAIL_CUTS
        return [*groups, *fuse(run, last, tail_bytes)]


class _Sizes(NamedTuple):
    lanes: int
    message_bytes: int
    atom_bytes: int
    fusion_bytes: int


_HAPPENED = Signal(happened=True)
