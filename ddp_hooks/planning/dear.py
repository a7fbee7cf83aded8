"""DeAR: all-reduces in two halves, under the backward and under the next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ddp_hooks.comm import mebibytes, suited_to
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.groups import Launcher, ddp_buckets, fuse, part_of
from ddp_hooks.planning.patterns import Phase
from ddp_hooks.planning.simulation import Run
from ddp_hooks.planning.sizes import TAIL_CUTS, atom_and_fusion_bytes, tuned_atom_bytes
from ddp_hooks.tuning.config import BucketTuner

_HOOK_S = {"sharded": 23e-6, "replicated": 29e-6}  # as in ddp_hooks.planning.all_reduce


@dataclass(frozen=True)
class Dear:
    """DeAR: reduce-scatters under the backward, all-gathers under the next forward, on one level.

    Args:
        update: ``"sharded"``: parameters are gathered, and a worker updates its share; ``"replicated"``: gradients are,
            and every worker updates all of them, each before it is read; the hook begins some of these gathers in
            the backward already, which is left out here.
        bucket_mb: of DDP; a gradient counts as ready with its bucket, but for the last one's.
        fusion_mb: largest group, in MiB (section IV-B).
        fusion_layers: groups of so many layers instead (section VI-G); tensors that are read at once are one layer's.
        tuner: the one that may choose another fusion size: it asks for smaller atoms.
        in_buffers: groups travel in one piece, as the paper's do; the hook moves their atoms one after another.
        lanes: streams of communication.
        slice_mb: as of ``DearConfig``. What is None is chosen for the link, as there.
        scatters, gathers: False: as if these took no time (Fig. 8).
    """

    update: Literal["sharded", "replicated"] = "sharded"
    bucket_mb: float = 5.0
    fusion_mb: float | None = None
    fusion_layers: int | None = None
    tuner: BucketTuner | None = None
    in_buffers: bool = False
    lanes: int | None = None
    slice_mb: float | None = None
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
        is_sharded = self.update == "sharded"
        config = "" if is_sharded else ', DearConfig(update="replicated")'
        lines = [
            f"ddp = DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g}, gradient_as_bucket_view=True)",
            f"state = DearState(ddp, optimizer{config})",
            "ddp.register_comm_hook(state, dear_hook)",
            "state.clip_grad_norm_(max_norm)  # where the loop clips, in place of torch.nn.utils.clip_grad_norm_",
        ]
        if is_sharded:
            lines.append("state.consolidate()  # on all ranks, before rank 0 saves optimizer.state_dict()")
        return "\n".join(lines)

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        sizes = self._sizes(run)
        atoms = self._atoms(run, sizes)
        backward_groups = self._fused([atom for atom in atoms if not atom.is_tail], sizes.fusion_bytes)
        backward_groups += [(atom,) for atom in atoms if atom.is_tail]
        need_of = {tensor: need for need, tensor in enumerate(run.step.forward_order)}
        by_need = sorted(atoms, key=lambda atom: min(need_of[tensor] for tensor in atom.tensors))
        forward_groups = self._fused(by_need, sizes.fusion_bytes)
        lanes = run.lanes(sizes.lanes)
        replicates = self.update == "replicated"

        def update_s(tensor: int) -> float:
            own_s = run.optimizer_s * part_of(run, tensor) if replicates else 0.0
            return own_s + _HOOK_S[self.update] * run.costs.python

        arrived: dict[int, Signal] = {}
        while not run.is_over:
            yield from run.forward(arrived, update_s)
            scattered: dict[int, Signal] = {}  # by tensor

            def launch(number: int, scattered: dict[int, Signal] = scattered) -> None:
                if self.scatters:
                    slices = self._slices(run, "reduce-scatter", backward_groups[number], sizes)
                    signal = lanes[number % sizes.lanes].submit(slices, f"reduce-scatter of group {number}")
                    scattered.update(dict.fromkeys(_tensors(backward_groups[number]), signal))

            yield from run.backward(_when_complete(atoms, backward_groups, launch))
            if not replicates:
                for signal in scattered.values():
                    yield from run.wait(signal, "reduce-scatters")
                yield from run.optimizer(1 / run.network.workers)
            arrived = dict.fromkeys(run.step.forward_order, _HAPPENED) | scattered
            for number, group in enumerate(forward_groups if self.gathers else []):
                after = [scattered[tensor] for tensor in _tensors(group) if tensor in scattered]
                slices = self._slices(run, "all-gather", group, sizes)
                signal = lanes[number % sizes.lanes].submit(slices, f"all-gather of group {number}", after=after)
                arrived.update(dict.fromkeys(_tensors(group), signal))
            run.end_step()

    def _slices(self, run: Run, phase: Phase, group: Sequence[_Atom], sizes: _Sizes) -> list[Slice]:
        pieces = [sum(atom.num_bytes for atom in group)] if self.in_buffers else [atom.num_bytes for atom in group]
        return [
            piece
            for num_bytes in pieces
            for piece in run.collective(phase, num_bytes, sizes.message_bytes)
        ]

    def _sizes(self, run: Run) -> _Sizes:
        network = run.network
        link = suited_to(None if network.native else network.bytes_per_s)
        message_bytes = link.message_bytes if self.slice_mb is None else mebibytes(self.slice_mb)
        busy = self.update == "replicated" and link.outruns_processor
        atom_bytes, fusion_bytes = atom_and_fusion_bytes(message_bytes, run.step.num_bytes, busy, network.native)
        if self.tuner is not None:
            low_bytes = mebibytes(self.tuner.low_mb)
            atom_bytes = tuned_atom_bytes(atom_bytes, run.step.num_bytes, network.workers, low_bytes)
        if self.fusion_mb is not None:
            fusion_bytes = mebibytes(self.fusion_mb)
        return _Sizes(self.lanes or link.num_lanes, message_bytes, atom_bytes, fusion_bytes)

    def _atoms(self, run: Run, sizes: _Sizes) -> list[_Atom]:
        """Buckets, cut; the last one, behind which nothing comes, in smaller parts on CPUs."""
        *buckets, last = ddp_buckets(run, self.bucket_mb)
        atoms = [
            _atom(run, number, part)
            for number, bucket in enumerate(buckets)
            for part in fuse(run, bucket, sizes.atom_bytes)
        ]
        finer = bool(buckets) and not run.network.native
        parts = fuse(run, last, sizes.atom_bytes // TAIL_CUTS if finer else sizes.atom_bytes)
        return [*atoms, *(_atom(run, len(buckets), part, finer) for part in parts)]

    def _fused(self, atoms: Iterable[_Atom], limit: int) -> list[tuple[_Atom, ...]]:
        """Neighbours together while their total does not exceed ``limit`` bytes, or so many layers."""
        groups: list[tuple[_Atom, ...]] = []
        for atom in atoms:
            together = (*groups[-1], atom) if groups else ()
            if self.fusion_layers is not None:
                fits = len(frozenset().union(*(each.layers for each in together))) <= self.fusion_layers
            else:
                fits = sum(each.num_bytes for each in together) <= limit
            if together and fits:
                groups[-1] = together
            else:
                groups.append((atom,))
        return groups


class _Sizes(NamedTuple):
    lanes: int
    message_bytes: int
    atom_bytes: int
    fusion_bytes: int


class _Atom(NamedTuple):
    """Tensors that always travel together. Large ones are not cut here."""

    bucket: int
    tensors: Sequence[int]
    num_bytes: int
    layers: frozenset[float]  # when each is read
    is_tail: bool  # its gradients count as ready by themselves, not with their bucket


def _atom(run: Run, bucket: int, tensors: Sequence[int], is_tail: bool = False) -> _Atom:
    layers = frozenset(run.step.tensors[tensor].needed_s for tensor in tensors)
    return _Atom(bucket, tensors, run.num_bytes(tensors), layers, is_tail)


def _tensors(group: Iterable[_Atom]) -> list[int]:
    return [tensor for atom in group for tensor in atom.tensors]


def _when_complete(
    atoms: Sequence[_Atom], groups: Sequence[Sequence[_Atom]], launch: Callable[[int], None]
) -> Callable[[int], None]:
    """What hears of gradients, and launches a group when the buckets of all its atoms are complete."""
    number_of = {id(atom): number for number, atom in enumerate(atoms)}
    by_atom = Launcher([[number_of[id(atom)] for atom in group] for group in groups], launch)
    together: dict[tuple[int, int], list[int]] = {}  # by bucket; those of the tail by themselves
    for number, atom in enumerate(atoms):
        together.setdefault((atom.bucket, number if atom.is_tail else -1), []).append(number)
    parts = list(together.values())

    def complete(part: int) -> None:
        for number in parts[part]:
            by_atom.ready(number)

    return Launcher([_tensors(atoms[number] for number in part) for part in parts], complete).ready


_HAPPENED = Signal(happened=True)
