"""Ready gradients: which already lie in DDP's buckets, so that atoms can travel before their bucket is complete.

DDP hands over a bucket when its last gradient is ready. In the middle of a backward other buckets keep the link busy
meanwhile. Before the first bucket, which may be large, and behind the last nothing does. So in these two buckets each
atom starts as soon as its own gradients are ready, if there are several atoms. (Tracking every bucket gained nothing
more, and cost DenseNet-201, with its 600 parameters, 2 % of a step.)
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.intercept import GradientGuard
from ddp_hooks.planning.atoms import Atom


class GradReadyTracker:
    """Collects the memory of atoms whose gradients are ready, and calls ``advance`` for each.

    A parameter's own hook runs before DDP's, which puts the gradient into the bucket; so a gradient counts as ready
    when the next hook runs.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], advance: Callable[[], None]) -> None:
        self.ready: dict[int, Tensor] = {}  # atom -> (numel,), its part of the bucket
        self._parameters = parameters
        self._advance = advance
        self._atoms: tuple[Atom, ...] = ()
        self._atoms_of: dict[int, list[int]] = {}  # tracked parameter -> atoms that it lies in
        self._num_members: dict[int, int] = {}  # per tracked atom
        self._addresses: list[int] = []  # of every atom in the buckets, as the latest backward has shown them
        self._confirmed = False  # by a whole backward: DDP rebuilds its buckets once, and may use old addresses again
        self._armed = False
        self._counted: set[int] = set()  # parameters whose gradients are ready
        self._missing: dict[int, int] = {}  # per tracked atom, its members that are not ready
        self._latest: int | None = None
        self._handles: list[Any] = []

    def track(self, layout: Layout) -> None:
        """Track the first and the last bucket of ``layout`` from now on."""
        self.close()
        self._confirmed = False
        self._atoms = layout.atoms
        self._atoms_of = {}
        num_atoms = Counter(atom.bucket for atom in self._atoms)
        ends = [bucket for bucket in (0, len(layout.buckets) - 1) if num_atoms[bucket] > 1]
        tracked = {index: atom for index, atom in enumerate(self._atoms) if atom.bucket in ends}
        self._num_members = {index: len(atom.members) for index, atom in tracked.items()}
        for index, atom in tracked.items():
            for member in atom.members:
                self._atoms_of.setdefault(member.parameter, []).append(index)
        this = weakref.ref(self)  # the collector does not see through a parameter's hooks
        self._handles = [
            self._parameters[index].register_post_accumulate_grad_hook(partial(_note, this, index))
            for index in self._atoms_of
            if self._parameters[index].requires_grad
        ]

    def remember(self, gradients: Sequence[Tensor]) -> None:
        """Note where the atoms' ``gradients`` lie after a backward; they stay there unless a layout follows."""
        self._addresses = [gradient.data_ptr() for gradient in gradients]
        self._confirmed = True

    def arm(self, armed: bool) -> None:
        """Begin anew, before a backward that DDP reduces (``armed``) or not."""
        self._armed = armed and self._confirmed
        self._counted.clear()
        self._missing = dict(self._num_members)
        self.ready.clear()
        self._latest = None

    def close(self) -> None:
        self.arm(False)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def accumulated(self, index: int) -> None:
        """Note that autograd has formed the gradient of a parameter."""
        if not self._armed:
            return
        latest, self._latest = self._latest, index  # DDP has put the gradient of the one before into its bucket
        if latest is None or latest in self._counted:
            return
        self._counted.add(latest)
        for atom in self._atoms_of[latest]:
            self._missing[atom] -= 1
            if not self._missing[atom]:
                self._complete(atom)

    def _complete(self, index: int) -> None:
        flat = self._memory_of(self._atoms[index])
        if flat is not None and flat.data_ptr() == self._addresses[index]:
            self.ready[index] = flat
            self._advance()

    def _memory_of(self, atom: Atom) -> Tensor | None:
        """Return the atom's part of the bucket, or None if its gradients do not lie there as neighbours."""
        flat = None
        for parameter, start, _, offset in atom.members:
            gradient = self._parameters[parameter].grad
            if gradient is None or isinstance(gradient, GradientGuard) or gradient.requires_grad:
                return None
            first = gradient.storage_offset() + start - offset
            if flat is None:
                if first < 0 or (first + atom.numel) * atom.element_size > gradient.untyped_storage().nbytes():
                    return None
                flat = gradient.as_strided((atom.numel,), (1,), first)
            if gradient.data_ptr() + (start - offset) * atom.element_size != flat.data_ptr():
                return None
        return flat


def _note(tracker: weakref.ref[GradReadyTracker], index: int, _: Tensor) -> None:
    alive = tracker()
    if alive is not None:
        alive.accumulated(index)
