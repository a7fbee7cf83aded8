"""DeAR: all-reduces in two halves, under the backward and under the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch

from ddp_hooks.comm import mebibytes, suited_to
from ddp_hooks.planning.atoms import (
    Atom,
    FusionRule,
    ParameterShape,
    atom_and_fusion_bytes,
    cut_bucket,
    fuse,
    tuned_atom_bytes,
)
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.network import Costs, Network, Phase
from ddp_hooks.planning.simulation import Run, Strategy, simulate
from ddp_hooks.planning.step import StepProfile
from ddp_hooks.planning.strategies.in_backward import coded_width, ddp_buckets, launcher
from ddp_hooks.tuning.candidates import Range
from ddp_hooks.tuning.config import BucketTuner

Update: TypeAlias = Literal["sharded", "replicated"]
Wire: TypeAlias = Literal["auto", "bf16", "int8", "int4"]

_HOOK_S = {"sharded": 23e-6, "replicated": 29e-6}  # measured as DDP's in ddp_hooks.planning.strategies.in_backward
_ALIKE = 0.005  # part of a step; closer sizes are equally fast
_NUM_SIZES = 24  # that are simulated; the tuner goes on from the best


@dataclass(frozen=True)
class Dear(Strategy):
    """DeAR: reduce-scatters under the backward, all-gathers under the next forward, on one level.

    Atoms and groups are formed as in the hook, and settings that are None are chosen for the link, as there.
    """

    #: With ``"sharded"`` parameters are gathered, and a worker updates its share. With ``"replicated"`` gradients are
    #: gathered, and every worker updates each parameter before it is read.
    update: Update = "sharded"
    bucket_mb: float = 5.0  #: of DDP; a gradient counts as ready with its bucket, except in the last bucket
    fusion_mb: float | None = None  #: largest group, in MiB (section IV-B)
    tuner: BucketTuner | None = None  #: may choose another fusion size, and asks for smaller atoms
    lanes: int | None = None  #: streams of communication
    slice_mb: float | None = None  #: largest message, in MiB
    wire: Wire = "auto"  #: of both halves; auto: gradients that fit 16 bits travel in them, on CPUs
    gather_dtype: torch.dtype | None = None  #: of parameters that only autocast reads, with an exact wire

    @property
    def name(self) -> str:
        if self.gather_dtype is not None:
            return "DeAR, 16-bit gathers"
        return f"DeAR, {self.update if self.wire == 'auto' else self.wire}"

    @property
    def settings(self) -> list[str]:
        """What ``DearConfig`` gets to do the same, but for sizes."""
        values = {"update": self.update, "wire": self.wire}
        settings = [f'{name}="{value}"' for name, value in values.items() if value != getattr(Dear, name)]
        return settings if self.gather_dtype is None else [*settings, f"gather_dtype={self.gather_dtype}"]

    @property
    def effect(self) -> str:
        if self.wire == "auto":
            return ""
        return (
            f"It rounds gradients and changes of parameters to {self.wire}, and adds what rounding took to the next "
            f"ones: check that your model learns as well (docs/fewer_bytes.md)."
        )

    @property
    def line(self) -> str:
        config = f", DearConfig({', '.join(self.settings)})" if self.settings else ""
        lines = [
            f"ddp = DistributedDataParallel(model, bucket_cap_mb={self.bucket_mb:g}, gradient_as_bucket_view=True)",
            f"state = DearState(ddp, optimizer{config})",
            "ddp.register_comm_hook(state, dear_hook)",
            "state.clip_grad_norm_(max_norm)  # where the loop clips, in place of torch.nn.utils.clip_grad_norm_",
        ]
        if self.gather_dtype is not None:
            lines.append("state.synchronize()  # on all ranks, before one rank reads or saves parameters alone")
        if self.update == "sharded":
            lines.append("state.consolidate()  # on all ranks, before rank 0 saves optimizer.state_dict()")
        return "\n".join(lines)

    def train(self, run: Run) -> Process:
        sizes = self.sizes(run)
        groups = _form_groups(run, self.bucket_mb, sizes)
        lanes = run.lanes(sizes.lanes)
        replicates = self.update == "replicated"

        def update_s(tensor: int) -> float:
            own_s = run.update_s(tensor) if replicates else 0.0
            return own_s + _HOOK_S[self.update] * run.costs.python

        def submit(phase: Phase, number: int, group: Sequence[int], after: Sequence[Signal] = ()) -> Signal:
            slices = self.collective(run, phase, [groups.atoms[atom] for atom in group], sizes.message_bytes)
            label, turn = f"{phase} of group {number}", number % sizes.lanes
            if phase == "reduce-scatter":
                return lanes[turn].submit(slices, label, after)
            # As Lanes.all_gather: all lanes share the slices, and the next lane gets the first one.
            shares = [slices[i :: sizes.lanes] for i in range(max(1, min(sizes.lanes, len(slices))))]
            gathers = [lanes[(turn + i) % sizes.lanes].submit(share, label, after) for i, share in enumerate(shares)]
            return run.engine.all_of(gathers)

        scattered: dict[int, Signal] = {}  # by atom

        def launch(number: int) -> None:
            group = groups.scatters[number]
            scattered.update(dict.fromkeys(group, submit("reduce-scatter", number, group)))

        arrived: dict[int, Signal] = {}  # by tensor
        while not run.is_over:
            yield from run.forward(arrived, update_s)
            scattered.clear()
            yield from run.backward(launcher(groups.gradients, launch))
            if not replicates:
                yield from run.wait_all(list(scattered.values()), "reduce-scatters")
                yield from run.optimizer(1 / run.network.workers)
            gathered: dict[int, Signal] = {}  # by atom
            for number, group in enumerate(groups.gathers):
                after = [scattered[atom] for atom in group]
                gathered.update(dict.fromkeys(group, submit("all-gather", number, group, after)))
            for tensor, atoms in groups.atoms_of.items():
                arrived[tensor] = run.engine.all_of([gathered[atom] for atom in atoms])
            run.end_step()

    def collective(self, run: Run, phase: Phase, group: Sequence[Atom], message_bytes: int) -> list[Slice]:
        """Return the slices of a group: atom after atom."""
        is_exact_sum = phase == "reduce-scatter" and self.wire == "auto"
        slices: list[Slice] = []
        for atom in group:
            widths = [(end - start, self.width(run, phase, tensor)) for tensor, start, end, _ in atom.members]
            width = sum(num_bytes * width for num_bytes, width in widths) / atom.nbytes
            coded_bytes = sum(num_bytes for num_bytes, width in widths if width < 1)
            code_s = self.code_s_per_byte(run.costs, phase) * coded_bytes
            # Exact sums are cut before anybody knows what fits.
            limit_bytes = message_bytes * width if is_exact_sum else message_bytes
            slices += run.collective(phase, atom.nbytes, limit_bytes, width, code_s)
        return slices

    def width(self, run: Run, phase: Phase, tensor: int) -> float:
        """Return the bytes of a tensor that travel, per byte."""
        use = run.step.tensors[tensor]
        if self.wire != "auto":
            codes = phase == "reduce-scatter" or self.update == "sharded"
            return coded_width(self.wire, run.step.element_bytes) if codes else 1.0
        if phase == "reduce-scatter":
            return 1.0 if run.network.native else use.exact_width
        return 0.5 if self.gather_dtype is not None and use.is_cast else 1.0

    def code_s_per_byte(self, costs: Costs, phase: Phase) -> float:
        """Return the seconds per byte of a tensor that does not travel whole, to encode and decode it once."""
        if self.wire != "auto":
            return costs.code_s_per_byte
        return costs.exact_s_per_byte if phase == "reduce-scatter" else costs.copy_s_per_byte

    def sizes(self, run: Run) -> Sizes:
        """Return the sizes that the hook would choose where settings do not give them."""
        network, model_bytes = run.network, run.step.num_bytes
        link = suited_to(None if network.native else network.bytes_per_s)
        message_bytes = link.message_bytes if self.slice_mb is None else mebibytes(self.slice_mb)
        busy = self.update == "replicated" and link.outruns_processor
        atom_bytes, fusion_bytes = atom_and_fusion_bytes(message_bytes, model_bytes, busy, network.native)
        if self.tuner is not None:
            atom_bytes = tuned_atom_bytes(atom_bytes, model_bytes, network.workers, mebibytes(self.tuner.low_mb))
        fusion_mb = fusion_bytes / (1 << 20) if self.fusion_mb is None else self.fusion_mb
        return Sizes(self.lanes or link.num_lanes, message_bytes, atom_bytes, FusionRule("size", fusion_mb, 0))


class Sizes(NamedTuple):
    """Number of lanes, and largest messages, atoms and groups."""

    lanes: int
    message_bytes: int
    atom_bytes: int
    rule: FusionRule


class _Groups(NamedTuple):
    """Atoms, as indices, that travel together."""

    atoms: list[Atom]
    atoms_of: dict[int, list[int]]  # by tensor
    scatters: list[tuple[int, ...]]
    gradients: list[list[int]]  # tensors for which each reduce-scatter waits
    gathers: list[tuple[int, ...]]


def _form_groups(run: Run, bucket_mb: float, sizes: Sizes) -> _Groups:
    """Cut DDP's buckets into atoms, and fuse them in the order of the backward and of the forward.

    The last bucket, after which nothing comes, is cut finer on CPUs; its atoms are scattered one by one.
    """
    step = run.step
    layers = {moment: layer for layer, moment in enumerate(sorted({tensor.needed_s for tensor in step.tensors}))}
    shapes = [ParameterShape(tensor.num_bytes, 1, layers[tensor.needed_s]) for tensor in step.tensors]
    buckets = ddp_buckets(run, bucket_mb)
    has_tail = len(buckets) > 1 and not run.network.native
    atoms: list[Atom] = []
    for number, bucket in enumerate(buckets):
        tail = has_tail and number == len(buckets) - 1
        atoms += cut_bucket(number, bucket, shapes, run.network.workers, sizes.atom_bytes, tail)
    first_of_tail = next((index for index, atom in enumerate(atoms) if atom.tail), len(atoms))
    scatters = fuse(range(first_of_tail), atoms, shapes, sizes.rule)
    scatters += [(index,) for index in range(first_of_tail, len(atoms))]
    tensors_of = [[member.parameter for member in atom.members] for atom in atoms]
    waits_for = [tensors_of[index] if atom.tail else buckets[atom.bucket] for index, atom in enumerate(atoms)]
    gradients = [list(dict.fromkeys(tensor for index in group for tensor in waits_for[index])) for group in scatters]
    need_of = {tensor: need for need, tensor in enumerate(step.forward_order)}
    first_need = [min(need_of[tensor] for tensor in tensors) for tensors in tensors_of]
    by_need = sorted(range(len(atoms)), key=lambda index: (first_need[index], -index))
    atoms_of: dict[int, list[int]] = {}
    for index, tensors in enumerate(tensors_of):
        for tensor in tensors:
            atoms_of.setdefault(tensor, []).append(index)
    return _Groups(atoms, atoms_of, scatters, gradients, fuse(by_need, atoms, shapes, sizes.rule))


def predicted_start(
    tuner: BucketTuner, step: StepProfile, network: Network, costs: Costs | None = None, strategy: Dear | None = None
) -> BucketTuner:
    """Return the tuner with a first trial whose simulated step is the fastest.

    Among equally fast sizes the middle one is taken: there an error of the model costs least.
    ``strategy`` is DeAR as it is configured; None: with the defaults of :class:`~ddp_hooks.DearConfig`.
    """
    dear = replace(strategy or Dear(), tuner=tuner)
    sizes = Range(tuner.low_mb, tuner.high_mb)
    sizes_mb = [sizes.size_at(i / (_NUM_SIZES - 1)) for i in range(_NUM_SIZES)]
    steps_s = {mb: simulate(replace(dear, fusion_mb=mb), step, network, costs).step_s for mb in sizes_mb}
    fast = [mb for mb, step_s in steps_s.items() if step_s <= (1 + _ALIKE) * min(steps_s.values())]
    # Ends of the range may be off by a rounding error.
    return replace(tuner, start_mb=min(max(fast[len(fast) // 2], tuner.low_mb), tuner.high_mb))
