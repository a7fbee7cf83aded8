"""BackPipe: reduce-scatters under the backward that makes the gradients (DeAR, section III-B).

One :class:`Reduction` is one synchronised backward: the buckets that DDP handed over, the atoms cut from them, and
the reduce-scatters under way. Means are formed in DDP's own bucket memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddp_hooks.comm import Lanes, Partition, RoundedWire, Work, see
from ddp_hooks.comm.rounding_warning import RoundingWarning
from ddp_hooks.comm.wire.codecs import relative_error
from ddp_hooks.dear.layout.model_layout import ModelLayout
from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.dear.reduction.wires import ReductionWires
from ddp_hooks.planning.atoms import Atom

_SAMPLE_NUMEL = 1 << 18  # of an atom, to look at what rounding takes, in about a millisecond


class Reduction:
    def __init__(
        self,
        lanes: Lanes,
        model_layout: ModelLayout,
        ready: Mapping[int, Tensor],
        reduce_dtype: torch.dtype | None,
        wires: ReductionWires,
        warning: RoundingWarning | None,
    ) -> None:
        self.buckets: list[tuple[int, ...]] = []
        self.num_parameters = 0  # in the buckets so far
        self.atoms: list[Atom] = []
        self.gradients: list[Tensor] = []  # per atom, (numel,), in DDP's buckets
        self.used: set[int] = set()  # parameters that took part on any rank; known when the backward has ended
        self.works: list[tuple[Work, tuple[int, ...]]] = []  # with the atoms that each one reduces
        self._lanes = lanes
        self._model_layout = model_layout
        self._known = model_layout.current  # None once a bucket is not one of its buckets
        self._ready = ready
        self._reduce_dtype = reduce_dtype
        self._wires = wires
        self._warning = warning if warning is not None and warning.begin_backward() else None
        self._converted: dict[int, Tensor] = {}  # atoms whose sums are formed in another type
        self._launched = 0  # atoms that have been handed to a lane
        self._next_group = 0
        self._ahead: dict[int, tuple[Atom, Tensor]] = {}  # atoms that were launched before their bucket came

    def add_bucket(self, parameters: tuple[int, ...], buffer: Tensor, is_last: bool) -> None:
        """Take a bucket that is ready, and launch every group that is now complete."""
        position = len(self.buckets)
        self.buckets.append(parameters)
        self.num_parameters += len(parameters)
        atoms = self._model_layout.cut(position, parameters, is_last)
        self.atoms += atoms
        self.gradients += [buffer[atom.start : atom.start + atom.numel] for atom in atoms]
        self._refuse_moved_memory()
        buckets = self._known.buckets if self._known is not None else ()
        if position < len(buckets) and buckets[position] == parameters:
            self.advance()
        else:  # DDP has changed its buckets; until the whole layout is known, every bucket is a layout of its own
            self._known = None
            self.flush()

    def advance(self) -> None:
        """Launch, in order, every group whose atoms are all ready."""
        groups = self._model_layout.scatter_groups if self._known is not None else []
        for group in groups[self._next_group :]:
            if not all(atom < len(self.atoms) or atom in self._ready for atom in group):
                return
            self._launch(group)
            self._next_group += 1

    def flush(self) -> None:
        """Launch the atoms that still wait for the rest of their group."""
        first = self._launched
        for group in self._model_layout.fuse_in_order(self.atoms[first:]):
            self._launch(tuple(first + index for index in group))

    def layout(self) -> Layout:
        return Layout(tuple(self.buckets), tuple(self.atoms))

    def wait(self) -> None:
        for work, _ in self.works:
            work.wait()

    def _launch(self, group: tuple[int, ...]) -> None:
        atoms, partitions = [], []
        for index in group:
            if index < len(self.atoms):
                atom, gradient = self.atoms[index], self.gradients[index]
            else:  # its bucket has not been handed over
                assert self._known is not None
                atom, gradient = self._known.atoms[index], self._ready[index]
                self._ahead[index] = atom, gradient
            atoms.append(atom)
            flat = self._in_reduce_dtype(index, gradient)
            wire = self._wires.of(self._known, index, atom, self._bucket_of(atom), flat)
            partitions.append(Partition(flat, atom.bounds, wire))
            if self._warning is not None and isinstance(wire, RoundedWire):
                self._warning.look(
                    self._model_layout.label([atom]), relative_error(wire.codec, flat[:_SAMPLE_NUMEL])
                )
        label = self._model_layout.label(atoms)
        work = self._lanes.reduce_scatter(partitions, label, divisor=self._lanes.world_size)
        self.works.append((work, group))
        self._launched = group[-1] + 1

    def _in_reduce_dtype(self, index: int, gradient: Tensor) -> Tensor:
        if self._reduce_dtype is None or self._reduce_dtype == gradient.dtype:
            return gradient
        self._converted[index] = gradient.to(self._reduce_dtype)
        return self._converted[index]

    def _bucket_of(self, atom: Atom) -> tuple[int, ...]:
        return self.buckets[atom.bucket] if self._known is None else self._known.buckets[atom.bucket]

    def reduced_view(self, atom: int) -> Tensor:
        """Return the memory whose range of this rank becomes the atom's mean: the bucket's, or of another type."""
        return self._converted.get(atom, self.gradients[atom])

    def _refuse_moved_memory(self) -> None:
        for index in [index for index in self._ahead if index < len(self.gradients)]:
            atom, gradient = self._ahead.pop(index)
            if self.atoms[index] != atom or self.gradients[index].data_ptr() != gradient.data_ptr():
                raise RuntimeError(
                    "DDP handed over a bucket with other gradients, or in other memory, than its reduction has "
                    f"begun with; please report this, with the versions of torch and ddp_hooks{see('please-report')}"
                )
