"""Layout in force, and the fusion groups over it; nothing moves here.

The layout follows DDP's buckets. Groups are formed twice over the same atoms: in the order of the backward for
reduce-scatters, and in the order of the forward for gathers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ddp_hooks.comm import DifferenceWire, NarrowGather, Partition
from ddp_hooks.dear.layout.memory import ManagedParameters
from ddp_hooks.dear.layout.placement import Layout
from ddp_hooks.planning.atoms import Atom, FusionRule, ParameterShape, cut_bucket, fuse


class ModelLayout:
    def __init__(
        self,
        parameters: ManagedParameters,
        root: nn.Module,
        world_size: int,
        rule: FusionRule,
        atom_bytes: int,  # at which buckets and parameters are cut
        cuts_tail: bool,  # cut the last bucket finer, because its atoms may travel before it is complete
    ) -> None:
        self.rule = rule  # may be replaced before plan()
        self.current: Layout | None = None  # None until the first step
        self.scatter_groups: list[tuple[int, ...]] = []  # of atoms, in the order of the backward
        self.gather_groups: list[tuple[int, ...]] = []  # of atoms, in the order of the forward
        self.gather_labels: list[str] = []
        self.rounded: frozenset[int] = frozenset()  # parameters that gathers round
        self._narrow: dict[int, NarrowGather] = {}  # by atom, those that hold some of these
        self._names = parameters.names
        self._shapes = _parameter_shapes(root, parameters.tensors)
        self._world_size = world_size
        self._atom_bytes = atom_bytes
        self._cuts_tail = cuts_tail
        self._atoms_by_need: list[int] = []

    def plan(self, layout: Layout, needed: Sequence[int]) -> list[tuple[int, ...]]:
        """Put ``layout`` in force and form its groups; return the parameters of every group of gathers.

        ``needed``: position of every parameter in the order of need, the same on every rank.
        """
        atoms, self.current = layout.atoms, layout
        first_need = [min(needed[member.parameter] for member in atom.members) for atom in atoms]
        # Ties, and parameters that no forward has read, in the reverse of the backward.
        self._atoms_by_need = sorted(range(len(atoms)), key=lambda i: (first_need[i], -i))
        self.scatter_groups, self.gather_groups = self.groups_with(self.rule)
        members = [[atoms[i] for i in group] for group in self.gather_groups]
        self.gather_labels = [f"group {n} ({self.label(group)})" for n, group in enumerate(members)]
        return [tuple(dict.fromkeys(m.parameter for atom in group for m in atom.members)) for group in members]

    def groups_with(self, rule: FusionRule) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        assert self.current is not None
        atoms = self.current.atoms
        return self.fuse_in_order(atoms, rule), fuse(self._atoms_by_need, atoms, self._shapes, rule)

    def gathers(
        self, memory: Sequence[Tensor], wires: Sequence[DifferenceWire | None] | None
    ) -> list[list[Partition]]:
        """Return the partitions of every group of gathers; ``wires``: per atom."""
        assert self.current is not None
        atoms = self.current.atoms
        of_atom = [
            Partition(flat, atom.bounds, self._narrow.get(i) if wires is None else wires[i])
            for i, (flat, atom) in enumerate(zip(memory, atoms, strict=True))
        ]
        return [[of_atom[i] for i in group] for group in self.gather_groups]

    def round(self, parameters: Collection[int], dtype: torch.dtype) -> None:
        """Let gathers send these parameters in ``dtype``, and all others whole."""
        assert self.current is not None
        self.rounded, self._narrow = frozenset(parameters), {}
        for index, atom in enumerate(self.current.atoms):
            members = [member for member in atom.members if member.parameter in self.rounded]
            ranges = tuple((m.offset, m.offset + m.end - m.start) for m in members if m.start < m.end)
            if ranges:
                self._narrow[index] = NarrowGather(ranges, dtype)

    def whole_gathers(
        self, memory: Sequence[Tensor], parameters: Collection[int]
    ) -> list[tuple[list[Partition], str]]:
        """Return gathers, with their labels, of all atoms that hold some of ``parameters``, with all bits."""
        assert self.current is not None
        atoms = self.current.atoms
        chosen = {i for i, atom in enumerate(atoms) if any(m.parameter in parameters for m in atom.members)}
        groups = [
            ([Partition(memory[i], atoms[i].bounds) for i in group if i in chosen], label)
            for group, label in zip(self.gather_groups, self.gather_labels, strict=True)
        ]
        return [(partitions, label) for partitions, label in groups if partitions]

    def cut(self, position: int, parameters: tuple[int, ...], is_last: bool) -> list[Atom]:
        known = self.current
        if known is not None and position < len(known.buckets) and known.buckets[position] == parameters:
            return [atom for atom in known.atoms if atom.bucket == position]
        tail = is_last and position > 0 and self._cuts_tail
        return cut_bucket(position, parameters, self._shapes, self._world_size, self._atom_bytes, tail)

    def fuse_in_order(self, atoms: Sequence[Atom], rule: FusionRule | None = None) -> list[tuple[int, ...]]:
        """Group atoms in the order in which they come; atoms of the tail travel alone."""
        tail = next((index for index, atom in enumerate(atoms) if atom.tail), len(atoms))
        fused = fuse(range(tail), atoms, self._shapes, rule or self.rule)
        return fused + [(index,) for index in range(tail, len(atoms))]

    def label(self, atoms: Sequence[Atom]) -> str:
        """Return a short name for a group of atoms, for messages."""
        members = [member for atom in atoms for member in atom.members]
        others = len({member.parameter for member in members}) - 1
        return self._names[members[0].parameter] + (f" and {others} more" if others else "")


def _parameter_shapes(root: nn.Module, parameters: Sequence[nn.Parameter]) -> list[ParameterShape]:
    layer_of: dict[int, int] = {}
    for layer, module in enumerate(root.modules()):
        for parameter in module.parameters(recurse=False):
            layer_of.setdefault(id(parameter), layer)
    return [ParameterShape(p.numel(), p.element_size(), layer_of[id(p)]) for p in parameters]
